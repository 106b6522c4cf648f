"""Statistics of decoding inside a server, in the same form for every server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def statistics(counts: Iterable[tuple[int, Iterable[int]]], summary_bytes: int) -> dict[str, Any]:
    """What decoding has read since the start.

    Returns:
        ``layers``: for each sparse layer ``tokens_read`` and ``tokens_held``, summed over KV heads and steps, and
        ``density``, their ratio. ``summary_bytes``: the bytes of all block summaries.
    """
    layers = {
        layer: {
            "tokens_read": read_tokens,
            "tokens_held": held_tokens,
            "density": read_tokens / held_tokens if held_tokens else 1.0,
        }
        for layer, (read_tokens, held_tokens) in counts
    }
    return {"layers": layers, "summary_bytes": summary_bytes}
