"""The results as text of at most 80 columns. Standard library only."""

import textwrap

from figures import duration, spread

WIDTH = 80
VERDICTS = {
    "faster": "faster",
    "slower": "SLOWER",
    "within noise": "noise",
    "too few samples": "few",
    "not compared": "-",
    "WRONG DATA": "WRONG",
}


def draw(report):
    lines = machine(report)
    if report["device"] == "cpu":
        lines.append("nothing was copied to a GPU: these timings mean nothing")
    lines += ["", f"{'':23}{'stock':>8} {'p10-p90':<11}{'tuned':>8} {'p10-p90':<11}{'speed-up':>9}"]
    for workload in report["workloads"]:
        lines += rows(workload)
    lines += ["", *below(report)]
    return "\n".join(line.rstrip() for line in lines)


def machine(report):
    there = report["machine"]
    gpu = (
        f"{there['gpu']}, driver {there['driver']}"
        if there["gpu"]
        else "no GPU"
        if report["device"] == "cpu"
        else "GPU unknown"
    )
    lines = [f"{gpu}; {there['cpus']} CPUs, Linux {there['kernel']}"]
    lines += [f"tuned with: {report['tuned_with'] or 'nothing (stock against stock)'}"]
    return [line for text in lines for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def rows(workload):
    series = workload["series"]
    if not series:
        return [f"{workload['name']:23}{workload['verdict']}"]
    lines = []
    for one in sorted(series, key=lambda one: not one["headline"]):
        name = workload["name"] if one["headline"] else f"  {one['name']}"
        line = f"{name[:22]:23}"
        for mode in ("stock", "tuned"):
            side = one[mode]
            line += f"{duration(side['median_s']):>8} {spread(side):<11}" if side else f"{'-':>8} {'':11}"
        line += f"{one['speedup']:>8.2f}x" if one["speedup"] else f"{'-':>9}"
        verdict = workload["verdict"] if one["headline"] else one["verdict"]
        lines.append(f"{line} {VERDICTS.get(verdict, verdict)}")
    return lines


def below(report):
    """What the figures do not say."""
    lines = []
    for workload in report["workloads"]:
        for what in workload["wrong"]:
            lines.append(f"{workload['name']}: WRONG DATA: {what}")
        if workload["error"]:
            lines.append(f"{workload['name']}: failed: {workload['error']}")
        if workload["reproduces"]:
            lines.append(f"{workload['name']} reproduces {workload['reproduces']}")
        lines += [f"{workload['name']}: {note}" for note in workload["notes"]]
    lines.append(summary(report))
    if report["interrupted"]:
        lines.append("interrupted: what was measured until then")
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def summary(report):
    verdicts = [workload["verdict"] for workload in report["workloads"]]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)]
    return f"{count(len(verdicts), 'workload')}, {count(report['rounds'], 'round')}: {', '.join(counts) or 'nothing was run'}"


def count(number, what):
    return f"{number} {what}{'s' * (number != 1)}"
