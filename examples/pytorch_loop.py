"""A loop of pageable copies in PyTorch: what cmt speeds up. Checks every byte that it copies.

    python3 examples/pytorch_loop.py [--mib 64] [--seconds 60]

Prints `ready PID`, then one JSON line a second with the throughput of the copies themselves (1e9 bytes a second, both
ways together); the checks in between are not timed. Ends on SIGTERM or after --seconds with a JSON summary; exit code
3 if a byte was wrong.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, default=64)
parser.add_argument("--seconds", type=float, default=60)
options = parser.parse_args()

memcmp = ctypes.CDLL(None).memcmp
memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

running = True


def stop(*_):
    global running
    running = False


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)

size = options.mib << 20
sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(3)]
device = torch.empty(size, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(f"ready {os.getpid()}", flush=True)

start = second = time.monotonic()
copies = mismatches = window_copies = 0
window_s = 0.0
while running and time.monotonic() - start < options.seconds:
    source = sources[copies % len(sources)]
    back = None  # As in a loop that lets go of its result: each `.cpu()` gets fresh memory.
    before = time.perf_counter()
    device.copy_(source)
    back = device.cpu()
    window_s += time.perf_counter() - before
    window_copies += 2
    copies += 1
    # One thread compares: those of torch.equal would spin on beside the next copy and be timed with it.
    if memcmp(back.data_ptr(), source.data_ptr(), size) != 0:
        mismatches += 1
        print("a copy came back changed", file=sys.stderr)
    if time.monotonic() - second >= 1:
        second = time.monotonic()
        gbps = window_copies * size / window_s / 1e9
        print(json.dumps({"t": round(second - start, 1), "gbps": round(gbps, 2)}), flush=True)
        window_s, window_copies = 0.0, 0
print(json.dumps({"pid": os.getpid(), "loops": copies, "bytes": 2 * copies * size, "mismatches": mismatches}))
sys.exit(3 if mismatches else 0)
