#!/usr/bin/env python3
"""Runs each workload stock and tuned, in turns, each time in a process of its own, and says what was gained.

    examples/workloads/run.py [--only NAME,NAME] [--rounds 3] [--json FILE] [--html FILE]

Stock is `python3 WORKLOAD.py`, tuned is `cmt tune --quiet -- python3 WORKLOAD.py`. Exit code 1 if a workload failed, or
if stock and tuned did not end with the same data. Needs Python 3.9 and nothing else; the workloads need PyTorch.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time

import figures
import page
import table
from process import Failure, run

SCHEMA = "cmt/workloads/1"
# Exit code of a workload that found wrong data itself.
WRONG_DATA = 3
# What each is, and whether it loads a file that is to be written before.
WORKLOADS = {
    "tensor_to": ("tensors to the GPU and back, by size", False),
    "checkpoint": ("asynchronous save of a distributed checkpoint", False),
    "activations": ("training of ResNet-152, activations on the CPU", False),
    "offload": ("a diffusion transformer offloaded layer by layer", False),
    "sleep_wake": ("sleep and wake of an engine", False),
    "weight_update": ("weight update from safetensors on disk", True),
    "experts": ("upload of experts in prefill", True),
}
# Memory that is written to once before all runs, since a virtual machine may hand it out slowly the first time.
TOUCH_GIB = 24
TOUCH = """
import ctypes, mmap, sys, threading
def touch(size):
    block = mmap.mmap(-1, size)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(block)), 1, size)
    blocks.append(block)
blocks = []
threads = [threading.Thread(target=touch, args=(int(sys.argv[1]) << 28,)) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def options():
    parser = argparse.ArgumentParser(
        description="Runs workloads stock and tuned, in turns, and compares them.",
        epilog="--tuned-prefix: {json} in it stands for the file that cmt is to write; an empty one compares stock with stock.",
    )
    parser.add_argument("--list", action="store_true", help="names of the workloads")
    parser.add_argument("--only", metavar="A,B", help="these workloads")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each workload, stock and tuned (3)")
    parser.add_argument("--scale", choices=["small", "full"], default="full", help="small: a try, for any machine")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try it; timings mean nothing"
    )
    parser.add_argument("--cmt", default="cmt", metavar="PATH", help="the cmt to use")
    parser.add_argument("--search", choices=["instant", "fast", "full"], help="for cmt tune")
    parser.add_argument("--profile", metavar="FILE", help="for cmt tune")
    parser.add_argument(
        "--tuned-prefix", metavar="COMMAND", help="what goes before the tuned command, instead of cmt tune"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="writes the results there (- for standard output, instead of the table)"
    )
    parser.add_argument("--html", metavar="FILE", help="writes a page there")
    parser.add_argument(
        "--scratch", metavar="DIR", help="keeps prepared files there (13 GB); else a folder that is removed"
    )
    parser.add_argument("--timeout", type=float, default=180, metavar="S", help="for one run of one workload (180)")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds of samples in one run (each workload's own)")
    parser.add_argument("--touch-gib", type=int, metavar="N", help=f"memory to write to before ({TOUCH_GIB}; 0: none)")
    parser.add_argument("--folder", default=os.path.dirname(os.path.abspath(__file__)), help="where the workloads are")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds: at least 1")
    names = list(WORKLOADS) if given.only is None else [name.strip() for name in given.only.split(",")]
    for name in names:
        if name not in WORKLOADS:
            parser.error(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    given.names = names
    for path in (given.json, given.html):
        folder = os.path.dirname(os.path.abspath(path)) if path and path != "-" else None
        if folder and not os.access(folder, os.W_OK):
            parser.error(f"{path}: cannot be written there; nothing was run")
    return given


def prefix(given, report):
    """What goes before the tuned command."""
    if given.tuned_prefix is not None:
        return [word.replace("{json}", report) for word in shlex.split(given.tuned_prefix)]
    words = [given.cmt, "tune", "--quiet", "--json", report]
    if given.search:
        words += ["--search", given.search]
    if given.profile:
        words += ["--profile", given.profile]
    return words + ["--"]


def result_of(code, out, err):
    """The line that a workload printed. Wrong data that it found itself is in it; all else that is wrong fails."""
    found = None
    for line in out.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                parsed = json.loads(line)
                if parsed.get("schema") == "cmt/workload/1":
                    found = parsed
    if code == 0 and found:
        return found
    if code == WRONG_DATA and found:
        found["wrong"] = found.get("wrong") or ["exit code 3"]
        return found
    if code == 0:
        raise Failure("exit code 0, but no result on standard output")
    how = f"exit code {code}"
    if code < 0:
        how = f"ended by signal {-code} ({signal.strsignal(-code) or 'unknown'})"
    raise Failure(f"{how}: {told(err)}")


def told(err):
    """The line of standard error that says what is wrong: one that says so, else the last."""
    lines = err.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if line.startswith(("error:", "cmt:"))), lines[-1])[:300]


def tune_report(path):
    """What cmt wrote of a tuned run, if it did."""
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def measure(name, given, scratch):
    """All rounds of a workload, as collected; keeps what there is when it fails or is interrupted."""
    script = [sys.executable, os.path.join(given.folder, name + ".py")]
    script += ["--scale", given.scale, "--device", given.device, "--scratch", scratch]
    if given.budget is not None:
        script += ["--budget", str(given.budget)]
    runs = {"stock": [], "tuned": []}
    found = {"name": name, "runs": runs, "tune": [], "error": None, "interrupted": False}
    # Whether the tuned command is asked for a report at all.
    found["reports"] = prefix(given, "a") != prefix(given, "b")
    try:
        if WORKLOADS[name][1]:
            say(f"{name}: preparing its file")
            code, _, err = run(script + ["--prepare"], 4 * given.timeout)
            if code:
                raise Failure(f"preparing: exit code {code}: {told(err)}")
        for index in range(given.rounds):
            for mode in runs:
                report = os.path.join(scratch, f"tune-{name}-{index}.json")
                command = prefix(given, report) + script if mode == "tuned" else script
                with contextlib.suppress(FileNotFoundError):
                    os.remove(report)
                before = time.monotonic()
                try:
                    line = result_of(*run(command, given.timeout))
                except Failure as failure:
                    raise Failure(f"{mode}, round {index + 1}: {failure}") from None
                runs[mode].append(line)
                if mode == "tuned":
                    found["tune"].append(tune_report(report))
                say(f"{name}: round {index + 1} of {given.rounds}, {mode}: {time.monotonic() - before:.1f} s")
    except Failure as failure:
        found["error"] = str(failure)
        say(f"{name}: {failure}")
    except KeyboardInterrupt:
        found["interrupted"] = True
    return found


def judge(found):
    """A workload's results: figures of each series, and whether the data was the same."""
    runs = found["runs"]
    lines = runs["stock"] + runs["tuned"]
    wrong = [f"{mode}: {what}" for mode in runs for line in runs[mode] for what in line.get("wrong", [])]
    checksums = {mode: sorted({line["checksum"] for line in runs[mode]}) for mode in runs}
    if len(set(checksums["stock"] + checksums["tuned"])) > 1:
        wrong.append(f"checksums differ: stock {', '.join(checksums['stock'])}, tuned {', '.join(checksums['tuned'])}")
    series = []
    for one in lines[0]["series"] if lines else []:
        sides = {
            mode: [other["seconds"] for line in runs[mode] for other in line["series"] if other["name"] == one["name"]]
            for mode in runs
        }
        series.append(
            {key: one[key] for key in ("name", "headline", "htod_bytes", "dtoh_bytes")}
            | {mode: figures.summary(sides[mode]) for mode in sides}
            | figures.compare(sides["stock"], sides["tuned"])
        )
    notes = list(lines[0]["notes"]) if lines else []
    outputs = {line.get("outputs") for line in lines}
    if len(outputs) > 1:
        notes.append("results of arithmetic differ between runs, which may have reasons other than copies")
    if found["reports"] and runs["tuned"]:
        notes.append(staged(found["tune"]))
    headline = next((one for one in series if one["headline"]), None)
    verdict = headline["verdict"] if headline else "not compared"
    slower = [one["name"] for one in series if one["verdict"] == "slower" and one is not headline]
    if slower:
        notes.append(f"slower in: {', '.join(slower)}")
    if wrong:
        verdict = "WRONG DATA"
    elif found["error"]:
        verdict = "failed"
    return {
        "name": found["name"],
        "title": WORKLOADS[found["name"]][0],
        "verdict": verdict,
        "error": found["error"],
        "interrupted": found["interrupted"],
        "wrong": wrong,
        "slower_in": slower,
        "checksums": checksums,
        "checked_bytes": min((line["checked_bytes"] for line in lines), default=0),
        "engine": lines[0].get("engine") if lines else None,
        "reproduces": lines[0].get("reproduces") if lines else None,
        "notes": notes,
        "series": series,
        "tune": found["tune"],
    }


def staged(reports):
    """What cmt says that it did in the tuned runs."""
    reports = [report for report in reports if report and report.get("schema") == "cmt/run/1"]
    if not reports:
        return "cmt wrote no report of the tuned runs: nothing shows that they were tuned"
    total = statistics.median(sum(side["bytes"] for side in report["staged"]) for report in reports)
    errors = sum(report["errors"] for report in reports)
    if not total:
        return "cmt staged nothing in the tuned runs: they were no different from stock"
    return f"cmt staged {total / 1e9:.2f} GB in a tuned run" + (f", WITH {errors} ERRORS" if errors else "")


def machine(given):
    """Where this ran."""
    found = {
        "gpu": None,
        "driver": None,
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "cmt": None,
    }
    found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    found["python"] = platform.python_version()
    if given.device == "cuda":
        with contextlib.suppress(Failure, ValueError, IndexError):
            _, out, _ = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], 30)
            found["gpu"], found["driver"] = (word.strip() for word in out.splitlines()[0].split(","))
    if given.tuned_prefix is None:
        with contextlib.suppress(Failure):
            found["cmt"] = run([given.cmt, "--version"], 30)[1].strip() or None
    return found


def try_first(given, scratch):
    """Runs a program that does nothing as a tuned one: what is wrong shows before anything is measured, and a search for
    the plan, which cmt keeps, is in no run that is."""
    command = prefix(given, os.path.join(scratch, "tune-first.json"))
    if not command:
        return
    say(f"trying {shlex.join(command)}, which may search for a plan")
    try:
        code, _, err = run([*command, sys.executable, "-c", ""], 4 * given.timeout)
        if code:
            raise Failure(f"exit code {code}: {told(err)}")
    except Failure as failure:
        sys.exit(
            f"run.py: {shlex.join(command)} cannot run even a program that does nothing: {failure}; nothing was run"
        )


def touch(given):
    gib = given.touch_gib
    if gib is None:
        gib = TOUCH_GIB if given.scale == "full" and given.device == "cuda" else 0
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) >> 20 for line in file if line.startswith("MemAvailable"))
    gib = min(gib, available // 2)
    if gib:
        say(f"writing to {gib} GiB of memory once, so that no run is the first to")
        with contextlib.suppress(Failure):
            run([sys.executable, "-c", TOUCH, str(gib)], 300)


def write(path, text):
    """Writes a file as a whole or not at all."""
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    given = options()
    if given.list:
        for name, (title, _) in WORKLOADS.items():
            print(f"{name:14} {title}")
        return 0
    if given.tuned_prefix is None and shutil.which(given.cmt) is None:
        sys.exit(f"run.py: no program {given.cmt}; nothing was run. Say where it is with --cmt PATH")
    report = {
        "schema": SCHEMA,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(given),
        "scale": given.scale,
        "device": given.device,
        "rounds": given.rounds,
        "search": given.search,
        "profile": given.profile,
        "tuned_with": shlex.join(prefix(given, "FILE")),
        "interrupted": False,
        "workloads": [],
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    scratch = given.scratch or tempfile.mkdtemp(prefix="cmt-workloads-")
    os.makedirs(scratch, exist_ok=True)
    try:
        try_first(given, scratch)
        touch(given)
        for name in given.names:
            found = measure(name, given, scratch)
            report["interrupted"] = found["interrupted"]
            report["workloads"].append(judge(found))
            keep(report, given)
            if found["interrupted"]:
                say("interrupted: this is what there was until then")
                break
    except KeyboardInterrupt:
        report["interrupted"] = True
        keep(report, given)
    finally:
        if given.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(report, indent=1) if given.json == "-" else table.draw(report))
    if report["interrupted"]:
        return 130
    return 1 if any(one["verdict"] in ("failed", "WRONG DATA") for one in report["workloads"]) else 0


def keep(report, given):
    """Writes the files that were asked for, with what there is so far."""
    if given.json and given.json != "-":
        write(given.json, json.dumps(report, indent=1) + "\n")
    if given.html:
        write(given.html, page.draw(report))


if __name__ == "__main__":
    sys.exit(main())
