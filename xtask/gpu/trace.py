"""Copies of every kind that PyTorch programs make, each of a size of its own, for `cmt trace` to tell apart.

    python3 xtask/gpu/trace.py        prints `ready PID` once all memory is there; copies at SIGUSR1; ends with a summary
    python3 xtask/gpu/trace.py --check REPORT      compares a `cmt trace --json` report of it with what it did
"""

import ctypes
import json
import os
import signal
import sys

ROUNDS = 20
KIB = 1024
# What each stage copies most: bytes, direction, memory kinds that are right.
STAGES = {
    "training step, batch to the device": (3 * 32 * 224 * 224 * 4, "HtoD", ["pageable"]),
    "pinned loader (pin_memory=True)": (512 * KIB, "HtoD", ["pinned"]),
    "strided copy of pageable memory": (2048 * KIB, "HtoD", ["pageable"]),
    "cudaHostRegister before the trace": (256 * KIB, "HtoD", ["pinned", "unknown"]),
    "managed buffer": (8192 * KIB, "HtoD", ["managed", "unknown"]),
    ".cpu() into fresh memory": (32768 * KIB, "DtoH", ["pageable"]),
}


def check(path):
    report = json.load(open(path))
    rows = [row for process in report["processes"] for row in process["copies"]]
    wrong = 0
    for stage, (size, direction, kinds) in STAGES.items():
        size_class = 1 << (size.bit_length() - 1)
        seen = {}
        for row in rows:
            if row["size_class_bytes"] == size_class and row["direction"] == direction:
                key = (row["function"], row["memory"], row["backing"])
                seen[key] = seen.get(key, 0) + row["calls"]
        right = sum(calls for (_, memory, _), calls in seen.items() if memory in kinds)
        verdict = "right" if right >= ROUNDS and right == sum(seen.values()) else "WRONG"
        wrong += verdict == "WRONG"
        what = ", ".join(f"{calls} {function} {memory}/{backing}" for (function, memory, backing), calls in seen.items())
        print(f"{stage}: {verdict}: {what or 'nothing'}")
    print(f"lost {report['lost']}, page tables {'read' if any(row['backing'] != 'unknown' for row in rows) else 'NOT read'}")
    sys.exit(1 if wrong or report["lost"] else 0)


if len(sys.argv) == 3 and sys.argv[1] == "--check":
    check(sys.argv[2])

import torch
from torch.utils.data import DataLoader, TensorDataset

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
runtime = torch.cuda.cudart()
torch.cuda.init()
device = torch.zeros(16384 * KIB, dtype=torch.uint8, device="cuda")
registered = torch.ones(256 * KIB, dtype=torch.uint8)
assert int(runtime.cudaHostRegister(registered.data_ptr(), registered.numel(), 0)) == 0
driver = ctypes.CDLL("libcuda.so.1")
managed = ctypes.c_uint64()
assert driver.cuMemAllocManaged(ctypes.byref(managed), ctypes.c_size_t(8192 * KIB), 1) == 0
ctypes.memset(managed.value, 1, 8192 * KIB)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, stride=4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10)
).cuda()
images = torch.randn(32, 3, 224, 224)
labels = torch.randint(0, 10, (32,)).cuda()
model(images.cuda())
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randint(0, 256, (ROUNDS, 512 * KIB), dtype=torch.uint8)), pin_memory=True)
wide = torch.ones(1024, 4 * KIB, dtype=torch.uint8)
strided_target = torch.zeros(1024, 2 * KIB, dtype=torch.uint8, device="cuda")
large = torch.ones(32768 * KIB, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", os.getpid(), flush=True)
signal.sigwait([signal.SIGUSR1])
for _ in range(ROUNDS):
    loss = torch.nn.functional.cross_entropy(model(images.to("cuda")), labels)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    strided_target.copy_(wide[:, : 2 * KIB])
    device[: registered.numel()].copy_(registered)
    assert driver.cuMemcpyHtoD_v2(
        ctypes.c_uint64(device.data_ptr()), ctypes.c_void_p(managed.value), ctypes.c_size_t(8192 * KIB)
    ) == 0
    large.cpu()
for (batch,) in loader:
    batch.to("cuda", non_blocking=True)
torch.cuda.synchronize()
print(json.dumps({"rounds": ROUNDS}), flush=True)
os._exit(0)
