"""Copies through libcudart from threads of Python, checks every byte, and keeps the interpreter busy.

Ends at SIGTERM with an account and the exit code that it is given: copies.py CODE.
"""
import ctypes
import json
import os
import random
import signal
import sys
import threading

BYTES = 3 << 20
TO_DEVICE, TO_HOST = 1, 2
cudart = ctypes.CDLL("libcudart.so.13")
cudart.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
stopping = threading.Event()
account = {"copies": 0, "mismatches": 0, "spins": 0, "signals": 0}


def must(code):
    if code:
        print(f"libcudart returned {code}", file=sys.stderr, flush=True)
        os._exit(5)


def copy(seed, started):
    device = ctypes.c_void_p()
    must(cudart.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(BYTES)))
    source, got = bytearray(random.Random(seed).randbytes(BYTES)), bytearray(BYTES)
    from_host = (ctypes.c_char * BYTES).from_buffer(source)
    to_host = (ctypes.c_char * BYTES).from_buffer(got)
    started.release()
    while not stopping.is_set():
        source[0] = (source[0] + 1) % 256
        must(cudart.cudaMemcpy(device, ctypes.addressof(from_host), BYTES, TO_DEVICE))
        must(cudart.cudaMemcpy(ctypes.addressof(to_host), device, BYTES, TO_HOST))
        account["mismatches"] += source != got
        account["copies"] += 2


def spin():
    table = {}
    while not stopping.is_set():
        for i in range(1000):
            table[i] = [str(i), table.get(i - 1)][:1]
        account["spins"] += 1


def count_signal(*_):
    account["signals"] += 1


signal.signal(signal.SIGTERM, lambda *_: stopping.set())
signal.signal(signal.SIGALRM, count_signal)
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
started = threading.Semaphore(0)
threads = [threading.Thread(target=copy, args=(seed, started)) for seed in (1, 2)]
threads.append(threading.Thread(target=spin))
for thread in threads:
    thread.start()
for _ in (1, 2):
    started.acquire()
print(f"ready {os.getpid()}", flush=True)
for thread in threads:
    thread.join()
signal.setitimer(signal.ITIMER_REAL, 0)  # as it ends, Python puts the default handlers back
print(json.dumps(account), flush=True)
sys.exit(int(sys.argv[1]))
