"""Statistics of decoding inside a server, in the same form for every server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def statistics(counts: Iterable[tuple[int, Iterable[int]]], summary_bytes: int) -> dict[str, Any]:
    """The bytes of all block summaries; and for each sparse layer, the tokens read and held since the start, summed
    over KV heads and steps, and ``density``, their ratio.
    """
    layers = {
        layer: {"tokens_read": read, "tokens_held": held, "density": read / held if held else 1.0}
        for layer, (read, held) in counts
    }
    return {"layers": layers, "summary_bytes": summary_bytes}
