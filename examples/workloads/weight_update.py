"""Weight update from safetensors on disk: a new checkpoint goes into the weights that an engine has on the GPU.

vLLM and SGLang do this when they start, at `update_weights_from_disk`, and in RL after each step that leaves its weights
in files: they iterate over the file with `safe_open(file, framework="pt")`, which maps it, and copy each tensor into its
place with `parameter.data.copy_(tensor)`; query, key and value, and gate and up, go into the parts of one merged
parameter. The source of each copy is thus the file's pages in the page cache: ordinary memory. safetensors is the real
one; the engine's loader is reproduced.

The file, Qwen3-4B with random weights, 8 GB, is written once by run.py (--prepare), and its pages are in the page cache:
no disk is read. Each update maps the file anew. Before each, the parameters are zeroed, in time that is not counted.
"""

import mmap
import os

import torch

import harness
import qwen3

REPRODUCES = (
    "vLLM/SGLang weight loading: safetensors safe_open (mmap), parameter.data.copy_(tensor) into merged parameters"
)


def sizes(scale):
    """Name, shape and position in the pattern of each tensor."""
    start = 0
    for name, shape in qwen3.weights(scale):
        yield name, shape, start
        count = 1
        for side in shape:
            count *= side
        start += 2 * count // 8


def prepare(given, path):
    from safetensors.torch import save_file

    tensors = {
        name: harness.fill(torch.empty(shape, dtype=torch.bfloat16), start) for name, shape, start in sizes(given.scale)
    }
    save_file(tensors, path + ".part")
    os.replace(path + ".part", path)


def engine(given):
    """The engine's parameters, and for each tensor of the file the part of a parameter that it goes to."""
    parameters, places = {}, {}
    shapes = dict(qwen3.weights(given.scale))
    merged = {part: (whole, parts) for whole, parts in qwen3.MERGED.items() for part in parts}
    for name, shape in shapes.items():
        prefix, _, last = name.removesuffix(".weight").rpartition(".")
        if last not in merged:
            parameters[name] = torch.empty(shape, dtype=torch.bfloat16, device=given.device)
            places[name] = parameters[name]
            continue
        whole, parts = merged[last]
        rows = [shapes[f"{prefix}.{part}.weight"][0] for part in parts]
        key = f"{prefix}.{whole}.weight"
        if key not in parameters:
            parameters[key] = torch.empty((sum(rows), shape[1]), dtype=torch.bfloat16, device=given.device)
        index = parts.index(last)
        places[name] = parameters[key].narrow(0, sum(rows[:index]), rows[index])
    return parameters, places


def main():
    given = harness.options(__doc__, prepare=dict(action="store_true", help="only write the file"))
    total = sum(2 * torch.Size(shape).numel() for _, shape in qwen3.weights(given.scale))
    path = harness.scratch_file(given, "qwen3.safetensors", total)
    if not os.path.exists(path):
        prepare(given, path)
    if given.prepare:
        return
    import safetensors
    from safetensors import safe_open

    result = harness.Result(given, REPRODUCES, engine=f"safetensors {safetensors.__version__}")
    parameters, places = engine(given)
    # Without this the first update could read the disk.
    with open(path, "rb") as file:
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ).close()
    torch.ones(1 << 20).to(given.device)

    def update():
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                places[name].copy_(file.get_tensor(name))

    def one():
        for parameter in parameters.values():
            parameter.zero_()
        harness.settle(given)
        return harness.timed(given, update)[0]

    times = harness.sample(given, one, 4)
    found = list(sizes(given.scale))
    wanted = harness.expected(given, [places[name].nbytes for name, _, _ in found])
    for (name, _, _), right in zip(found, wanted):
        result.check(name, harness.digest(places[name]), right, places[name].nbytes)
    result.series("one weight update", times, htod=total, headline=True)
    result.note(
        f"{total / 1e9:.2f} GB in {len(places)} tensors of a file on {harness.filesystem(path)}, in the page cache"
    )
    result.print()


if __name__ == "__main__":
    main()
