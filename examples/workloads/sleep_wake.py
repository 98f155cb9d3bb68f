"""Sleep and wake of an engine: the weights go to the CPU, the GPU's memory is given back, and later they return.

What engines do differs, and --like says which is measured:

module (the default): `model.cpu()`, `torch.cuda.empty_cache()`, `model.to("cuda")`: ordinary memory, new at each sleep.
    verl does this to an FSDP2 model between rollout and training (`param_offload`), diffusers to a whole model
    (`enable_model_cpu_offload`), and so does whoever swaps models in a process of their own.
vllm-wsl: vLLM's sleep mode, level 1, where it finds pinned memory unavailable, as under WSL 2 by default: for each
    allocation a new uint8 tensor on the CPU and a cudaMemcpy by ctypes, then the same the other way.
vllm: the same on bare Linux, where that tensor is pinned. Nothing there is for cmt to speed up; it is here to see that
    nothing gets slower. (SGLang's memory saver pins too, and so does FSDP1 in verl: `.to("cpu", non_blocking=True)`.)

vLLM itself is not run: its copies are made in its place. Freeing and mapping the GPU's memory are PyTorch's here, not
vLLM's own allocator's.

The weights are those of Qwen3-4B, 8 GB in bfloat16.
"""

import ctypes

import torch
from torch import nn

import harness
import qwen3

REPRODUCES = {
    "module": "verl FSDP2 param_offload, diffusers enable_model_cpu_offload: model.cpu(), empty_cache(), model.to(device)",
    "vllm-wsl": "vLLM sleep mode level 1 without pinned memory (WSL 2): cudaMemcpy to and from torch.empty(uint8)",
    "vllm": "vLLM sleep mode level 1: cudaMemcpy to and from pinned torch.empty(uint8)",
}


class Engine(nn.Module):
    """Weights, and nothing that calculates with them."""

    def __init__(self, shapes, device):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device), requires_grad=False)
            for shape in shapes
        )


def cuda_memcpy():
    """cudaMemcpy of the CUDA runtime that PyTorch has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart" in line}
    runtime = ctypes.CDLL(min(paths))
    runtime.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def memcpy(to, source, size):
        code = runtime.cudaMemcpy(to, source, size, 4)  # cudaMemcpyDefault, as vLLM's wrapper asks for
        if code:
            harness.refuse(f"cudaMemcpy returned {code}")

    return memcpy


def by_module(engine, device):
    def sleep():
        engine.cpu()
        if device == "cuda":
            torch.cuda.empty_cache()

    return sleep, lambda: engine.to(device)


def by_vllm(engine, device, pinned):
    if device != "cuda":
        harness.refuse("--like vllm needs a GPU; nothing was run")
    memcpy = cuda_memcpy()
    backups = []

    def sleep():
        for weight in engine.weights:
            backup = torch.empty(weight.nbytes, dtype=torch.uint8, pin_memory=pinned)
            memcpy(backup.data_ptr(), weight.data_ptr(), weight.nbytes)
            backups.append((backup, weight.shape))
            weight.data = weight.data.new_empty(0)
        torch.cuda.empty_cache()

    def wake():
        for weight, (backup, shape) in zip(engine.weights, backups):
            weight.data = torch.empty(shape, dtype=weight.dtype, device=device)
            memcpy(weight.data_ptr(), backup.data_ptr(), weight.nbytes)
        backups.clear()

    return sleep, wake


def main():
    given = harness.options(
        __doc__, like=dict(choices=list(REPRODUCES), default="module", help="which engine's copies")
    )
    result = harness.Result(given, reproduces=REPRODUCES[given.like])
    engine = Engine([shape for _, shape in qwen3.weights(given.scale)], given.device)
    sizes, start = [], 0
    for weight in engine.weights:
        harness.fill(weight, start)
        sizes.append(weight.nbytes)
        start += sizes[-1] // 8
    total = sum(sizes)
    if given.like == "module":
        sleep, wake = by_module(engine, given.device)
    else:
        sleep, wake = by_vllm(engine, given.device, pinned=given.like == "vllm")
    # The process's first copies, whatever they set up, are no part of an engine's tenth sleep.
    torch.ones(1 << 20).to(given.device).cpu()
    harness.settle(given)

    def cycle():
        return harness.timed(given, sleep)[0], harness.timed(given, wake)[0]

    times = harness.sample(given, cycle, 3)
    for (name, _), weight, wanted in zip(qwen3.weights(given.scale), engine.weights, harness.expected(given, sizes)):
        result.check(name, harness.digest(weight), wanted, weight.nbytes)
    result.series("sleep and wake", [sum(pair) for pair in times], total, total, headline=True)
    result.series("sleep", [pair[0] for pair in times], dtoh=total)
    result.series("wake", [pair[1] for pair in times], htod=total)
    result.note(f"{total / 1e9:.2f} GB in {len(sizes)} tensors")
    result.print()


if __name__ == "__main__":
    main()
