"""Limit of the time that idle OpenMP threads spin."""

from __future__ import annotations

import os

SPINS = "5000"
"""Spin count of idle threads, longer than the time between two operations of a step. Measured: with 1,000 and 2,000
sparse attention over 4,096 of 32k tokens took 4.4 to 14.5 ms on two quiet cores (six runs), with 5,000 4.2 to 4.7,
with libgomp's choice of 300,000 3.7 to 5.0 (three each). 12 rows of the tiny reasoner beside two busy processes took
35 s with 1,000, 42 s with 3,000, 57 s with 10,000; alone, 16 to 27 s with any.
"""


def bound_spinning() -> None:
    """Let idle threads sleep soon, unless the user has chosen otherwise.

    Threads that spin take the cores of a busy machine from those that work. libgomp reads this when torch is imported,
    so it is set before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
