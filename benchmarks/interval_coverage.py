"""How often 95 % intervals contain the true value, for paired differences of accuracies and for accuracies.

    python benchmarks/interval_coverage.py

1. `one-sided`: a method loses each problem with a probability of 2 to 20 % and wins none, with one sample per problem.
   Computed exactly, over all numbers of lost problems. `coverage` is the minimum over these probabilities; `monotone`
   says whether more lost problems never raise an end of the interval. `plain_t` is the coverage of the t interval.
2. `two-sided`: the method also wins some problems. Simulated.
3. `several samples`: several samples per problem, with problems of different difficulty. Simulated, for the difference
   and for the accuracy (Wilson's interval).
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from seergate.eval.statistics.intervals import clustered, paired, t95, wilson

SIZES = (16, 32, 64, 128, 256)
LOSSES = [percent / 100 for percent in range(2, 21)]


def _interval(n: int, lost: int) -> tuple[float, float]:
    difference = paired({str(i): [float(i >= lost)] for i in range(n)}, {str(i): [1.0] for i in range(n)})
    return difference.low, difference.high


def _plain(n: int, lost: int) -> tuple[float, float]:
    share = lost / n
    half = t95(n - 1) * (share * (1 - share) / (n - 1)) ** 0.5
    return -share - half, -share + half


def _covered(intervals: list[tuple[float, float]], n: int) -> float:
    """The minimum coverage over `LOSSES` if problems are lost and none is won."""
    return min(
        sum(binom.pmf(lost, n, loss) for lost, (low, high) in enumerate(intervals) if low <= -loss <= high)
        for loss in LOSSES
    )


def one_sided(n: int) -> dict[str, Any]:
    """Exact coverage with ``n`` problems."""
    intervals = [_interval(n, lost) for lost in range(n + 1)]
    falls = all(after <= before + 1e-12 for ends in zip(*intervals, strict=True) for before, after in pairwise(ends))
    return {
        "case": "one-sided",
        "problems": n,
        "coverage": round(_covered(intervals, n), 4),
        "monotone": falls,
        "plain_t": round(_covered([_plain(n, lost) for lost in range(n + 1)], n), 4),
    }


def two_sided(n: int, lost: float, won: float, repeats: int, rng: np.random.Generator) -> dict[str, Any]:
    """Simulated coverage if a method loses some problems and wins others."""
    inside = 0
    for _ in range(repeats):
        draw = rng.random(n)
        ours = {str(i): [float(x >= lost)] for i, x in enumerate(draw)}
        difference = paired(ours, {str(i): [float(x < 1 - won)] for i, x in enumerate(draw)})
        inside += difference.low <= won - lost <= difference.high
    return {"case": "two-sided", "problems": n, "lost": lost, "won": won, "coverage": round(inside / repeats, 4)}


def several(n: int, samples: int, loss: float, repeats: int, rng: np.random.Generator) -> dict[str, Any]:
    """Simulated coverage with several samples per problem, whose probability of success is uniform in [0, 1]."""
    inside = accurate = 0
    for _ in range(repeats):
        chance = rng.random(n)
        dense, ours = (
            {str(i): (rng.random(samples) < c).astype(float).tolist() for i, c in enumerate(chance * factor)}
            for factor in (1, 1 - 2 * loss)
        )
        difference = paired(ours, dense)
        inside += difference.low <= -loss <= difference.high
        low, high = wilson(clustered(dense), n * samples)
        accurate += low <= 0.5 <= high
    shares = {"coverage": round(inside / repeats, 4), "accuracy_coverage": round(accurate / repeats, 4)}
    return {"case": "several samples", "problems": n, "samples": samples, "loss": loss, **shares}


def main() -> None:
    """Parse the command line, compute, print, save."""
    from common import RESULTS, save, shown

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=4000, help="of the simulated cases")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = []
    for n in SIZES:
        rows.append(one_sided(n))
        rows += [
            two_sided(n, lost, won, options.repeats, rng) for lost, won in ((0.1, 0.02), (0.1, 0.1), (0.02, 0.02))
        ]
    for n, samples in ((5, 16), (16, 8), (30, 64)):
        rows += [several(n, samples, loss, options.repeats, rng) for loss in (0.0, 0.05)]
    for row in rows:
        print(shown(row), flush=True)
    print("saved", save("interval_coverage", {"repeats": options.repeats}, rows, options.output))


if __name__ == "__main__":
    main()
