"""Single tensors to the GPU and back, by size: `x.to("cuda")` and `y.cpu()` of pageable memory.

The plainest copy that PyTorch makes, and the one that most programs make: a batch, a loss, an embedding. The source is
ordinary memory that is used again; `.cpu()` writes to memory that malloc has just handed out, as it always does. Nothing
is stood in for: the copies are PyTorch's own (cudaMemcpyAsync, then cudaStreamSynchronize).

A pass copies each size both ways, small sizes several times. The first pass is not counted.
"""

import time

import torch

import harness
from harness import GIB

KIB, MIB = 1 << 10, 1 << 20
# Bytes, and copies in one pass.
SIZES = {
    "full": [(64 * KIB, 50), (MIB, 20), (16 * MIB, 5), (64 * MIB, 2), (256 * MIB, 1), (GIB, 1)],
    "small": [(64 * KIB, 5), (MIB, 2), (4 * MIB, 1)],
}


def name(size):
    for unit, word in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {word}"


def main():
    given = harness.options(__doc__)
    result = harness.Result(given, engine=f"PyTorch {torch.__version__}")
    sizes = SIZES[given.scale]
    sources, start = [], 0
    for size, _ in sizes:
        sources.append(harness.fill(torch.empty(size // 8, dtype=torch.int64), start))
        start += size // 8
    wanted = harness.expected(given, [size for size, _ in sizes])
    times = {(size, way): [] for size, _ in sizes for way in ("to", "cpu")}
    passes = []

    def one_pass():
        total = 0.0
        for (size, copies), source, right in zip(sizes, sources, wanted):
            harness.settle(given)
            to, back = [], []
            there = here = None
            for _ in range(copies):
                # Both are let go of before the next, as by a loop that keeps neither.
                there = here = None
                before = time.perf_counter()
                there = source.to(given.device)
                between = time.perf_counter()
                here = there.cpu()
                after = time.perf_counter()
                to.append(between - before)
                back.append(after - between)
            times[size, "to"] += to
            times[size, "cpu"] += back
            total += sum(to) / copies + sum(back) / copies
            result.check(f"{name(size)} on the device", harness.digest(there), right, size)
            result.check(f"{name(size)} back", harness.digest(here), right, size)
        passes.append(total)

    one_pass()
    passes.clear()
    for taken in times.values():
        taken.clear()
    result.checked.clear()
    harness.sample(given, one_pass, 4)
    # Passes differ in number from run to run; the checksum does not.
    del result.checked[2 * len(sizes) :]
    moved = sum(size for size, _ in sizes)
    result.series("each size once, both ways", passes, moved, moved, headline=True)
    for size, _ in sizes:
        result.series(f"{name(size)} to the GPU", times[size, "to"], htod=size)
    for size, _ in sizes:
        result.series(f"{name(size)} to the CPU", times[size, "cpu"], dtoh=size)
    result.print()


if __name__ == "__main__":
    main()
