"""Limit of the time that idle OpenMP threads spin."""

from __future__ import annotations

import os

SPINS = "5000"
"""Spin count of idle threads, longer than the time between two operations of a step. On two quiet cores sparse
attention was as fast as with libgomp's 300,000, and with 2,000 up to three times slower; beside busy processes fewer
are faster."""


def bound_spinning() -> None:
    """Let idle threads sleep soon, unless the user has chosen otherwise.

    Threads that spin take the cores of a busy machine from those that work. libgomp reads this when torch is imported,
    so it is set before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
