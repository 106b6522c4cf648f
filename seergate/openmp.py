"""How long idle OpenMP threads wait awake."""

from __future__ import annotations

import os

SPINS = "1000"
"""24 rows of the tiny reasoner, decoded and measured on two cores: 5.6 s with the choice of libgomp, 6.6 s with
this one, 8.8 s with threads that sleep at once; beside two busy processes 21 to 39 s, 11 s and 13 s.
"""


def bound_spinning() -> None:
    """Let idle threads sleep soon, unless the user has chosen otherwise.

    Threads that spin take the cores of a busy machine from those that work. libgomp reads this when torch is imported,
    so it is set before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
