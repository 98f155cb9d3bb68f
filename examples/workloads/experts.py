"""Upload of experts in the prefill of a mixture-of-experts model whose experts stay on the CPU.

llama.cpp does this with `--cpu-moe`, `--n-cpu-moe N` or `-ot exps=CPU`: a batch of 32 tokens or more is calculated on
the GPU, and the experts that its tokens need are uploaded for it, layer by layer. For each of a layer's three tensors of
experts (gate, up, down) its scheduler waits for the GPU, and copies each run of consecutive experts that are needed, and
512 bytes more, with cudaMemcpyAsync into a buffer that all layers share; then the matrix product runs. Where the batch
goes is read back from the GPU once a layer. The source is the mapped model file: ordinary memory, unless the user asked
for --no-mmap, in which case it is pinned and cmt has nothing to do.

llama.cpp itself is not run: the script makes these copies in its place, from a mapped file to the same kind of buffer.
Sizes are those of Qwen3-30B-A3B in bfloat16, 128 experts of which 8 for each token; four of its 48 layers, 4.8 GB, and a
batch of 512 tokens that prefers some experts, so that not all are needed. Products are calculated for all pairs of
token and expert and then masked, which costs a GPU little.

The file is written once by run.py (--prepare); its pages are in the page cache. A sample is one batch through all
layers. In the batch before them every expert that arrived is compared with what it should be.
"""

import mmap
import os
import warnings

import torch

import harness

REPRODUCES = "llama.cpp --cpu-moe prefill: cudaMemcpyAsync of runs of needed experts from the mapped model file"
# Layers, experts, experts of a token, width, width of an expert, tokens.
MODEL = {"full": (4, 128, 8, 2048, 768, 512), "small": (2, 16, 2, 64, 32, 32)}
# What llama.cpp copies beyond the last expert of a run, for the sake of its kernels.
PADDING = 512


def prepare(path, size):
    with open(path + ".part", "wb") as file:
        file.truncate(size)
    mapped = torch.from_file(path + ".part", shared=True, size=size, dtype=torch.uint8)
    harness.fill(mapped, 0, weights=True)
    del mapped
    os.replace(path + ".part", path)


def map_file(path):
    """The file's bytes, mapped and with all pages there, as llama.cpp maps it."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that must not be written to, which is what is wanted
        return torch.frombuffer(mapped, dtype=torch.uint8)


def routes(layers, experts, chosen, tokens):
    """For each layer the experts of each token. Some are preferred, and others in each layer."""
    random = torch.Generator().manual_seed(0)
    preference = -2.0 * torch.arange(1, experts + 1, dtype=torch.float32).log()
    for _ in range(layers):
        order = torch.randperm(experts, generator=random)
        noise = -torch.empty(tokens, experts).exponential_(generator=random).log()
        yield (preference[order] + noise).topk(chosen).indices.to(torch.int32)


def runs(needed):
    """First and last of each run of consecutive experts."""
    found = []
    for expert in needed:
        if found and found[-1][1] == expert - 1:
            found[-1][1] = expert
        else:
            found.append([expert, expert])
    return found


def main():
    given = harness.options(__doc__, prepare=dict(action="store_true", help="only write the file"))
    layers, experts, chosen, width, inner, tokens = MODEL[given.scale]
    expert_bytes = 2 * width * inner
    tensor_bytes = experts * expert_bytes
    path = harness.scratch_file(given, "experts.bf16", layers * 3 * tensor_bytes)
    if not os.path.exists(path):
        prepare(path, layers * 3 * tensor_bytes)
    if given.prepare:
        return
    result = harness.Result(given, REPRODUCES)
    weights = map_file(path)
    places = [torch.zeros(tensor_bytes + PADDING, dtype=torch.uint8, device=given.device) for _ in range(3)]
    gate, up, down = (
        place[:tensor_bytes].view(torch.bfloat16).view(experts, *shape)
        for place, shape in zip(places, ((inner, width), (inner, width), (width, inner)))
    )
    routing = [ids.to(given.device) for ids in routes(layers, experts, chosen, tokens)]
    hidden = torch.randn(tokens, width, device=given.device).to(torch.bfloat16)
    right = torch.empty(tensor_bytes, dtype=torch.uint8, device=given.device)
    uploaded = []

    def check(index, layer, needed):
        harness.fill(right, (3 * layer + index) * tensor_bytes // 8, weights=True)
        for first, last in needed:
            part = slice(first * expert_bytes, (last + 1) * expert_bytes)
            found, wanted = harness.digest(places[index][part]), harness.digest(right[part])
            name = f"layer {layer}, {('gate', 'up', 'down')[index]}, experts {first} to {last}"
            result.check(name, found, wanted, part.stop - part.start)

    def upload(index, layer, needed):
        """One of a layer's tensors, once the GPU no longer uses what is there."""
        harness.synchronize(given)
        start = (3 * layer + index) * tensor_bytes
        for first, last in needed:
            begin = first * expert_bytes
            end = (last + 1) * expert_bytes + (PADDING if last < experts - 1 else 0)
            places[index][begin:end].copy_(weights[start + begin : start + end], non_blocking=True)
            uploaded.append(end - begin)

    def batch(then=lambda *_: None):
        x = hidden
        for layer, ids in enumerate(routing):
            needed = runs(ids.cpu().unique().tolist())
            used = torch.zeros(tokens, experts, dtype=torch.bool, device=x.device).scatter_(1, ids.long(), True)
            y = torch.nn.functional.rms_norm(x, (width,)).expand(experts, tokens, width)
            upload(0, layer, needed)
            opened = torch.nn.functional.silu(torch.bmm(y, gate.transpose(1, 2)))
            then(0, layer, needed)
            upload(1, layer, needed)
            opened *= torch.bmm(y, up.transpose(1, 2))
            then(1, layer, needed)
            upload(2, layer, needed)
            made = torch.bmm(opened, down.transpose(1, 2))
            then(2, layer, needed)
            x = x + made.masked_fill_(~used.T.unsqueeze(2), 0).sum(0) / chosen
        return x

    result.output(batch(check))
    counts = len(uploaded), sum(uploaded)
    harness.settle(given)
    batches = harness.sample(given, lambda: harness.timed(given, batch), 5)
    result.output(batches[-1][1])
    result.series("one batch", [seconds for seconds, _ in batches], htod=counts[1], headline=True)
    copied = f"{counts[0]} copies, {counts[1] / 1e9:.2f} GB, of a file on {harness.filesystem(path)}"
    result.note(f"{layers} layers, {tokens} tokens: {copied}")
    result.print()


if __name__ == "__main__":
    main()
