"""Asynchronous save of a distributed checkpoint: `torch.distributed.checkpoint.async_save`, one process.

Two times of each save: until `async_save` returns (the state dict is then staged on the CPU, and the training loop goes
on) and until the checkpoint is written. Only the first is what the loop feels.

The code is PyTorch's own. As of 2.11 `async_save` without a stager of one's own stages into ordinary, new memory: it
asks its DefaultStager for no pinned memory, no shared memory, no thread and no non-blocking copies. (A DefaultStager
made with its own defaults pins.) The state is that of a GPT-2-like model in float32 with the two moments of AdamW. The
checkpoint goes to a folder in memory, /dev/shm, if there is one, so that no disk is measured.
"""

import logging
import os
import shutil
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import harness

# Layers, width, vocabulary.
MODEL = {"full": (8, 1024, 50304), "small": (2, 64, 512)}


def shapes(layers, width, vocabulary):
    yield "wte", (vocabulary, width)
    yield "wpe", (1024, width)
    for layer in range(layers):
        for name, shape in (
            ("attn.c_attn.weight", (3 * width, width)),
            ("attn.c_attn.bias", (3 * width,)),
            ("attn.c_proj.weight", (width, width)),
            ("attn.c_proj.bias", (width,)),
            ("mlp.c_fc.weight", (4 * width, width)),
            ("mlp.c_fc.bias", (4 * width,)),
            ("mlp.c_proj.weight", (width, 4 * width)),
            ("mlp.c_proj.bias", (width,)),
            ("ln_1.weight", (width,)),
            ("ln_2.weight", (width,)),
        ):
            yield f"h.{layer}.{name}", shape


def state_dict(device, model):
    """The state of a model and of its optimiser, not yet filled."""
    empty = lambda: {name: torch.empty(shape, device=device) for name, shape in shapes(*model)}
    return {"model": empty(), "exp_avg": empty(), "exp_avg_sq": empty()}


def tensors(state):
    return [(f"{part}.{name}", tensor) for part, named in state.items() for name, tensor in named.items()]


def process_group(result):
    """A process group of one. True if there is none, and saves must do without."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return False
    except (RuntimeError, ValueError) as error:
        result.note(f"no gloo process group here ({str(error).splitlines()[0]}); saved with no_dist=True")
        return True


def main():
    given = harness.options(__doc__, folder=dict(default=None, metavar="DIR", help="where checkpoints go"))
    # The process group of one, and the saves, have nothing of interest to say.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    result = harness.Result(given, engine=f"torch.distributed.checkpoint of PyTorch {torch.__version__}")
    no_dist = process_group(result)
    state = state_dict(given.device, MODEL[given.scale])
    start = 0
    for _, tensor in tensors(state):
        harness.fill(tensor, start)
        start += tensor.nbytes // 8
    sizes = [tensor.nbytes for _, tensor in tensors(state)]
    total = sum(sizes)
    parent = given.folder or ("/dev/shm" if os.path.isdir("/dev/shm") else given.scratch)
    folder = tempfile.mkdtemp(prefix="cmt-checkpoint-", dir=parent)
    result.note(f"checkpoints of {total / 1e9:.2f} GB, written to {harness.filesystem(folder)}")
    # Before each save the last one goes, in time that is not counted.
    saved = os.path.join(folder, "step")

    def save(what):
        shutil.rmtree(saved, ignore_errors=True)
        harness.settle(given)
        before = time.perf_counter()
        done = dcp.async_save(what, checkpoint_id=saved, no_dist=no_dist)
        staged = time.perf_counter()
        done.result()
        return staged - before, time.perf_counter() - before

    try:
        save({"first": torch.ones(1 << 20, device=given.device)})
        times = harness.sample(given, lambda: save(state), 3)
        loaded = state_dict("cpu", MODEL[given.scale])
        dcp.load(loaded, checkpoint_id=saved, no_dist=no_dist)
        for (name, tensor), wanted in zip(tensors(loaded), harness.expected(given, sizes)):
            result.check(name, harness.digest(tensor), wanted, tensor.nbytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not no_dist:
            dist.destroy_process_group()
    result.series("until training goes on", [staged for staged, _ in times], dtoh=total, headline=True)
    result.series("until it is written", [written for _, written in times], dtoh=total)
    result.print()


if __name__ == "__main__":
    main()
