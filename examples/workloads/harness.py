"""What all workloads here have in common: their options, data that can be told from any other, and the line they print.

Data is a pattern that depends on the position of each word, the same on the CPU and on the GPU. So what arrived can be
compared with what should have, by digest, and a tensor that came to the wrong place, or not at all, does not pass.
"""

import argparse
import hashlib
import json
import os
import sys
import time

import torch

SCHEMA = "cmt/workload/1"
# Exit code of a workload that found a wrong byte itself.
WRONG_DATA = 3
GIB = 1 << 30
# Words of 8 bytes that are made or summed up at a time.
CHUNK = 1 << 20
# After work on many CPU threads: they spin for a while, and would be timed with what comes next.
SETTLE_S = 0.02


def options(doc, **more):
    """Reads the command line. `more`: further options, by name, with what argparse wants to know of them."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0], epilog="Prints one JSON line.")
    parser.add_argument("--scale", choices=["small", "full"], default="full", help="small: a try, for any machine")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: no copies, timings mean nothing"
    )
    parser.add_argument(
        "--budget", type=float, default=2.0, metavar="S", help="seconds to take samples for, at least one (2)"
    )
    parser.add_argument("--scratch", default=None, metavar="DIR", help="where prepared files are kept")
    for name, what in more.items():
        parser.add_argument("--" + name.replace("_", "-"), **what)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        refuse("PyTorch sees no GPU; nothing was run. To try the script without one: --device cpu --scale small")
    torch.manual_seed(0)
    return given


def refuse(why):
    """Ends with exit code 1."""
    sys.exit(f"{os.path.basename(sys.argv[0])}: {why}")


def scratch_file(given, name, size):
    """Path of a prepared file, in a folder that has room for it."""
    if given.scratch is None:
        refuse("needs --scratch DIR, a folder for the file that it loads (run.py makes one)")
    if not os.path.isdir(given.scratch):
        refuse(f"--scratch {given.scratch}: no such folder; nothing was run")
    path = os.path.join(given.scratch, f"{name}-{given.scale}")
    if not os.path.exists(path):
        stat = os.statvfs(given.scratch)
        if stat.f_bavail * stat.f_frsize < size:
            refuse(
                f"{given.scratch} has no room for a file of {size / 1e9:.1f} GB; nothing was written. "
                "Choose another folder with --scratch, or --scale small"
            )
    return path


def filesystem(path):
    """Type of the filesystem that holds a path."""
    path, found = os.path.realpath(path), ("", "unknown")
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, point, kind = line.split()[:3]
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(found[0]):
                found = (point, kind)
    return found[1]


def synchronize(given):
    if given.device == "cuda":
        torch.cuda.synchronize()


def settle(given):
    synchronize(given)
    time.sleep(SETTLE_S)


def timed(given, work):
    """Seconds that `work` takes, from an idle device to an idle device, and what it returns."""
    synchronize(given)
    before = time.perf_counter()
    made = work()
    synchronize(given)
    return time.perf_counter() - before, made


def sample(given, step, most):
    """What `step` returns, again and again: at most `most` times, and no more once the budget is used up."""
    taken, before = [], time.perf_counter()
    while len(taken) < most and (not taken or time.perf_counter() - before < given.budget):
        taken.append(step())
    return taken


def signed(word):
    """A word of 64 bits as PyTorch has them."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


MIX = (signed(0x9E3779B97F4A7C15), signed(0xBF58476D1CE4E5B9))
# What the chunks of a digest are multiplied with.
CARRY = signed(0x94D049BB133111EB)
# Of four bfloat16 in a word: signs and mantissas, and exponents that make them 2^-6 to 2^-5, or the negative of that.
BFLOAT16 = (signed(0x807F807F807F807F), signed(0x3C803C803C803C80))

_kept = {}


def kept(kind, device, make):
    """Made once for a device."""
    if (kind, device) not in _kept:
        _kept[kind, device] = make()
    return _kept[kind, device]


def block(device, weights):
    """The first CHUNK words of the pattern."""
    words = torch.arange(1, CHUNK + 1, dtype=torch.int64, device=device).mul_(MIX[0])
    words.bitwise_xor_(words >> 29).mul_(MIX[1])
    return words.bitwise_and_(BFLOAT16[0]).bitwise_or_(BFLOAT16[1]) if weights else words


def fill(tensor, start, weights=False):
    """Fills a contiguous tensor with the pattern from position `start` on; its size is a multiple of 8 bytes.

    weights: so that each two bytes are a bfloat16 that a model can calculate with.
    """
    words = tensor.detach().view(-1).view(torch.int64)
    source = kept(f"block {weights}", words.device, lambda: block(words.device, weights))
    done = 0
    while done < words.numel():
        chunk, offset = divmod(start + done, CHUNK)
        count = min(CHUNK - offset, words.numel() - done)
        key = signed(chunk * MIX[0] * MIX[1]) & (BFLOAT16[0] if weights else -1)
        torch.bitwise_xor(source[offset : offset + count], key, out=words[done : done + count])
        done += count
    return tensor


def digest(tensor):
    """Sum over a tensor's bytes that depends on their order: one word on the tensor's device. Waits for nothing."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    elif data.storage_offset() % 8:
        data = data.clone()
    words = data.view(torch.int64)
    device = words.device
    factors = kept("factors", device, lambda: torch.arange(CHUNK, dtype=torch.int64, device=device).mul_(2).add_(1))
    product = kept("product", device, lambda: torch.empty(CHUNK, dtype=torch.int64, device=device))
    total = torch.zeros((), dtype=torch.int64, device=device)
    for first in range(0, words.numel(), CHUNK):
        chunk = words[first : first + CHUNK]
        count = chunk.numel()
        total = total * CARRY + torch.mul(chunk, factors[:count], out=product[:count]).sum()
    return total


def expected(given, sizes, weights=False):
    """Digests that tensors of these sizes have when filled one after another from position 0. Made on the device."""
    scratch = torch.empty(max(sizes) // 8, dtype=torch.int64, device=given.device)
    found, start = [], 0
    for size in sizes:
        found.append(digest(fill(scratch[: size // 8], start, weights)))
        start += size // 8
    return found


class Result:
    """What a workload has to say: collected, then printed as one line of JSON."""

    def __init__(self, given, reproduces=None, engine=None):
        self.checked, self.outputs, self.wrong, self.checked_bytes = [], [], [], 0
        self.line = {
            "schema": SCHEMA,
            "workload": os.path.basename(sys.argv[0]).removesuffix(".py"),
            "device": given.device,
            "gpu": torch.cuda.get_device_name() if given.device == "cuda" else None,
            "scale": given.scale,
            "torch": torch.__version__,
            # The engine whose own code made the copies, or whose copies the script makes in its place.
            "engine": engine,
            "reproduces": reproduces,
            "notes": [],
            "series": [],
        }

    def note(self, text):
        self.line["notes"].append(text)

    def series(self, name, samples, htod=0, dtoh=0, headline=False):
        """Seconds of one kind of step or event, and the bytes that one of them moves each way."""
        self.line["series"].append(
            {
                "name": name,
                "seconds": [round(one, 9) for one in samples],
                "htod_bytes": htod,
                "dtoh_bytes": dtoh,
                "headline": headline,
            }
        )

    def check(self, what, found, wanted, size):
        """Compares digests; what was found is part of the checksum that stock and tuned must agree on."""
        found, wanted = int(found), int(wanted)
        self.checked.append(found)
        self.checked_bytes += size
        if found != wanted:
            self.wrong.append(what)

    def output(self, tensor):
        """Result of arithmetic: compared too, but only noted, since it may differ for reasons other than copies."""
        self.outputs.append(int(digest(tensor)))

    def print(self):
        """Prints the line and ends, with exit code 3 if data was wrong."""
        self.line["checksum"] = hashed(self.checked)
        self.line["checked_bytes"] = self.checked_bytes
        self.line["outputs"] = hashed(self.outputs) if self.outputs else None
        self.line["wrong"] = self.wrong[:16]
        print(json.dumps(self.line), flush=True)
        if self.wrong:
            print(f"WRONG DATA: {', '.join(self.wrong[:16])}", file=sys.stderr)
            sys.exit(WRONG_DATA)


def hashed(words):
    return hashlib.sha256(b"".join(word.to_bytes(8, "little", signed=True) for word in words)).hexdigest()[:16]
