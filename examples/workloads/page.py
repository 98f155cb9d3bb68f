"""The results as one page of HTML that needs no network. Standard library only."""

import html

import table
from figures import duration, rate, spread

STYLE = """
:root { color-scheme: light dark; --c0: #c4500a; --c1: #00805e; --ink: #222; }
@media (prefers-color-scheme: dark) { :root { --c0: #ff9a4d; --c1: #3ed6a0; --ink: #ddd; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { opacity: .7; }
dd { margin: 0; }
p { max-width: 46rem; }
small { font-weight: normal; opacity: .75; }
.warning { border-left: .3rem solid var(--c0); padding-left: .7rem; font-weight: 600; }
.legend i, td i { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin: 0 .4em 0 .2em; }
.c0 { background: var(--c0); } .c1 { background: var(--c1); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 15px system-ui, sans-serif; fill: currentColor; }
svg .c0 { fill: var(--c0); } svg .c1 { fill: var(--c1); }
svg line { stroke: var(--ink); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: right; padding: .15rem .6rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:nth-child(2) { text-align: left; }
tbody tr:has(th:not(:empty)) > * { border-top: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
"""
# Units of the drawings; the page scales them.
WIDTH = 480
SIDES = (("stock", "c0"), ("tuned", "c1"))


def draw(report):
    gpu = report["machine"]["gpu"] or f"device {report['device']}"
    title = f"cmt workloads: {html.escape(gpu)}"
    body = f"<h1>{title}</h1>\n<p>{table.summary(report)}</p>\n{warnings(report)}{machine(report)}{method(report)}"
    body += "<p class=legend><i class=c0></i>stock <i class=c1></i>tuned</p>\n<div class=charts>\n"
    body += "".join(chart(workload) for workload in report["workloads"])
    body += "</div>\n<h2>All figures</h2>\n" + "".join(section(workload) for workload in report["workloads"])
    body += f"<p><small>examples/workloads/run.py, {html.escape(report['started'])}</small></p>\n"
    return (
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">\n'
        f"<title>{title}</title><style>{STYLE}</style>\n{body}</html>\n"
    )


def warnings(report):
    found = []
    if report["device"] == "cpu":
        found.append("Run without a GPU: nothing was copied to a device. These timings mean nothing.")
    if report["interrupted"]:
        found.append("Interrupted: what was measured until then.")
    for workload in report["workloads"]:
        found += [f"{workload['name']}: WRONG DATA: {what}" for what in workload["wrong"]]
        if workload["error"]:
            found.append(f"{workload['name']} failed: {workload['error']}")
    return "".join(f"<p class=warning>{html.escape(text)}</p>\n" for text in found)


def machine(report):
    there = report["machine"]
    facts = {
        "GPU": f"{there['gpu']}, driver {there['driver']}" if there["gpu"] else None,
        "CPUs": f"{there['cpus']}, {there['memory_gib']:.0f} GiB of memory",
        "Linux": there["kernel"],
        "cmt": there["cmt"],
        "tuned with": report["tuned_with"] or "nothing: stock against stock",
        "scale": report["scale"],
    }
    return (
        "<dl>\n"
        + "".join(f"<dt>{name}</dt><dd>{html.escape(str(what))}</dd>\n" for name, what in facts.items() if what)
        + "</dl>\n"
    )


def method(report):
    return (
        f"<p>Each workload ran {table.count(report['rounds'], 'time')} stock and as often tuned, in turns, each time in a "
        "process of its own. Bars are medians of all samples, lines go from the 10th to the 90th percentile. The interval of a "
        "speed-up holds 95&nbsp;% of those that come of drawing rounds, and samples within them, again. Faster or slower: by "
        "more than 3&nbsp;%, with 1 outside the interval, and each round of one side faster than each of the other. The data that was copied was compared.</p>\n"
    )


def chart(workload):
    """Stock and tuned of each series, on the scale of the slowest of its kind."""
    series = [one for one in workload["series"] if one["stock"] and one["tuned"]]
    caption = f"{html.escape(workload['name'])} <small>{html.escape(workload['title'])}</small>"
    if not series:
        return f"<figure><figcaption>{caption}</figcaption><p>{html.escape(workload['verdict'])}</p></figure>\n"
    drawn, y = "", 0
    for one in series:
        longest = max(one[mode]["p90_s"] for mode, _ in SIDES)
        label = html.escape(one["name"])
        speedup = f"{one['speedup']:.2f}× {html.escape(one['verdict'])}"
        drawn += (
            f'<text x="0" y="{y + 16}">{label}</text><text x="{WIDTH}" y="{y + 16}" text-anchor="end">{speedup}</text>'
        )
        y += 22
        for mode, colour in SIDES:
            side = one[mode]
            place = lambda seconds: f"{seconds / longest * (WIDTH - 90):.1f}"
            middle = y + 8
            drawn += (
                f'<rect class={colour} x="0" y="{y}" width="{place(side["median_s"])}" height="16" rx="2"/>'
                f'<line x1="{place(side["p10_s"])}" x2="{place(side["p90_s"])}" y1="{middle}" y2="{middle}" stroke-width="2"/>'
                f'<text x="{WIDTH}" y="{y + 13}" text-anchor="end">{duration(side["median_s"])}</text>'
            )
            y += 18
        y += 8
    svg = f'<svg role=img viewBox="0 0 {WIDTH} {y}" aria-label="{html.escape(workload["name"])}">{drawn}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>\n"


def section(workload):
    text = f"<h3>{html.escape(workload['name'])} <small>{html.escape(workload['verdict'])}</small></h3>\n"
    for name in ("engine", "reproduces"):
        if workload[name]:
            text += f"<p>{'Copies made by' if name == 'engine' else 'Reproduces'} {html.escape(workload[name])}.</p>\n"
    if workload["notes"]:
        text += f"<p>{html.escape('; '.join(workload['notes']))}.</p>\n"
    if not workload["series"]:
        return text
    text += (
        "<div class=wide><table><thead><tr><th>series<th><th>median<th>p10 – p90<th>moves<th>samples<th>speed-up"
        "<th>interval<th>by round<th>verdict</tr></thead>\n"
    )
    for one in workload["series"]:
        for index, (mode, colour) in enumerate(SIDES):
            side = one[mode]
            if not side:
                continue
            moved = one["htod_bytes"] + one["dtoh_bytes"]
            cells = [duration(side["median_s"]), spread(side), rate(moved, side["median_s"]), str(side["samples"])]
            if index and one["speedup"]:
                cells += [f"{one['speedup']:.2f}×", f"{one['low']:.2f} – {one['high']:.2f}"]
                cells += [" ".join(f"{ratio:.2f}" for ratio in one["by_round"]), html.escape(one["verdict"])]
            else:
                cells += [""] * 4
            text += f"<tr><th>{'' if index else html.escape(one['name'])}</th><td><i class={colour}></i>{mode}</td>"
            text += "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
    return text + "</table></div>\n"
