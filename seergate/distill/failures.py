"""Failures of runs in several processes, so that the user reads each of them once."""

from __future__ import annotations

from seergate.errors import SeergateError


class CommonError(SeergateError):
    """Every process of a run raises it with the same text: the main process tells the user, the others are silent.

    Any other error is of one process, which tells it with its number.
    """
