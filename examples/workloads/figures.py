"""What the samples of a series say: medians, spread, speed-up, and whether that is more than noise. Standard library only."""

import random
import statistics

# A speed-up nearer to 1 than this is called noise whatever its interval: machines do not repeat themselves better.
FLOOR = 0.03
# Fewer samples on either side, or fewer processes, say nothing: what differs between processes shows in no one of them.
FEWEST = 3
FEWEST_ROUNDS = 3
RESAMPLES = 500
# Of a round's samples, how many one resample draws at most.
DRAWN = 50


NOT_COMPARED = {
    "speedup": None,
    "saved_s": None,
    "low": None,
    "high": None,
    "by_round": [],
    "verdict": "not compared",
}


def quantile(samples, part):
    """Linear between neighbours, as numpy has it."""
    ordered = sorted(samples)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(rounds):
    """Median and spread of all samples; `rounds`: one list of seconds for each process."""
    samples = [seconds for one in rounds for seconds in one]
    if not samples:
        return None
    return {
        "median_s": statistics.median(samples),
        "p10_s": quantile(samples, 0.1),
        "p90_s": quantile(samples, 0.9),
        "samples": len(samples),
        "rounds_s": rounds,
    }


def interval(stock, tuned):
    """95 % of the speed-ups that come of drawing rounds, and samples within them, again and again."""
    draw = random.Random(0)
    found = []
    for _ in range(RESAMPLES):
        drawn = draw.choices(range(len(stock)), k=len(stock))
        medians = [
            statistics.median(
                seconds for index in drawn for seconds in draw.choices(side[index], k=min(len(side[index]), DRAWN))
            )
            for side in (stock, tuned)
        ]
        found.append(medians[0] / medians[1])
    return quantile(found, 0.025), quantile(found, 0.975)


def compare(stock, tuned):
    """Speed-up of tuned over stock, from the samples of as many rounds of each.

    It is faster or slower if every round of the one side was faster than every round of the other: were there only
    noise, three rounds of each would come out like that one time in ten. The rest is to make that rarer.
    """
    whole = [(a, b) for a, b in zip(stock, tuned) if a and b]
    if not whole:
        return NOT_COMPARED
    stock, tuned = [list(side) for side in zip(*whole)]
    sides = [[seconds for one in side for seconds in one] for side in (stock, tuned)]
    speedup = statistics.median(sides[0]) / statistics.median(sides[1])
    low, high = interval(stock, tuned)
    medians = [[statistics.median(one) for one in side] for side in (stock, tuned)]
    by_round = [a / b for a, b in zip(*medians)]
    if min(map(len, sides)) < FEWEST or len(whole) < FEWEST_ROUNDS:
        verdict = "too few samples"
    elif speedup > 1 + FLOOR and low > 1 and max(medians[1]) < min(medians[0]):
        verdict = "faster"
    elif speedup < 1 - FLOOR and high < 1 and min(medians[1]) > max(medians[0]):
        verdict = "slower"
    else:
        verdict = "within noise"
    saved = statistics.median(sides[0]) - statistics.median(sides[1])
    return {"speedup": speedup, "saved_s": saved, "low": low, "high": high, "by_round": by_round, "verdict": verdict}


def duration(seconds):
    """Three digits and a unit."""
    value, unit = scaled(seconds)
    return f"{three(value)} {unit}"


def scaled(seconds):
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * 0.9995:
            return seconds / size, unit
    return seconds * 1e6, "us"


def three(value):
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def spread(side):
    """The 10th and the 90th percentile in the unit of the median."""
    size = side["median_s"] / scaled(side["median_s"])[0]
    return f"{three(side['p10_s'] / size)}-{three(side['p90_s'] / size)}"


def rate(size, seconds):
    """GB/s, 1e9 bytes a second."""
    return f"{three(size / seconds / 1e9)} GB/s"
