"""A limit on the time for which idle OpenMP threads spin."""

from __future__ import annotations

import os

SPINS = "5000"
"""Spin count of idle threads; it covers the time between two operations of a decode step. On two idle cores sparse
attention was as fast as with libgomp's default of 300,000, and up to three times slower with 2,000; next to busy
processes, lower counts are faster."""


def bound_spinning() -> None:
    """Let idle threads sleep soon, unless the user has set ``OMP_WAIT_POLICY`` or ``GOMP_SPINCOUNT``.

    On a busy machine, spinning threads take cores from working ones. Call this before torch and libgomp are loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
