"""Statistics of decoding inside a server, in the same form for every server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def statistics(counts: Iterable[tuple[int, Iterable[int]]], summary_bytes: int) -> dict[str, Any]:
    """Tokens that decoding has read and held since the start.

    Args:
        counts: for each sparse layer, its number, and the tokens that were read and held by all KV heads and steps.
        summary_bytes: memory of the blocks' summaries.

    Returns:
        ``layers``: for each sparse layer, ``tokens_read`` and ``tokens_held``, and ``density``, their quotient.
        ``summary_bytes``: as given.
    """
    layers = {
        layer: {"tokens_read": read, "tokens_held": held, "density": read / held if held else 1.0}
        for layer, (read, held) in counts
    }
    return {"layers": layers, "summary_bytes": summary_bytes}
