"""Decode statistics per sample: the bytes and tokens that each row of a batch reads and holds.

What a row reads and what it holds (its tokens, and the method's state for them) do not depend on its batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seergate.cache.layer import GatedLayer
from seergate.decode.stats import DecodeStats, StepRecord

CURVE_STEPS = 32
"""Decode steps between two points of a row's ``read_curve`` (`RowStats.of`)."""

FIGURES = ("seen", "read", "cached", "scored", "own", "own_peak")
"""Tokens of context; tokens read, of a selection only the (negative) empty slots of the current block; tokens cached
per head; bytes read to select; the row's own bytes. Sums over steps, or a peak."""


class RowStats(DecodeStats):
    """`DecodeStats` that also counts per row; `Handle.count_with` installs it."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__(layers)
        self.place = {layer: i for i, layer in enumerate(layers)}
        self.figures = {name: np.zeros((len(layers), 0)) for name in FIGURES}  # [layers, rows]
        self.blocks = dict[int, Tensor]()  # layer -> blocks selected by each row, summed over KV heads; on the device
        self.last_own_bytes = dict[int, Any]()  # layer -> own bytes of each row at the last step
        self.new_own_bytes = dict[int, Any]()  # layer -> own bytes of new rows
        self.decode_steps = np.zeros(0)
        self.savings = np.zeros(0)  # per row: ratio of memory saved by sharing blocks, summed over steps
        self.shares = False
        self.curves: list[list[tuple[int, float, float]]] = []  # per row: tokens of context, read so far; bytes held

    def saw_prompt(self, cache: GatedLayer) -> None:
        """Count the prefill of a layer; the next call of `add_rows` adds its rows."""
        super().saw_prompt(cache)
        self.new_own_bytes[cache.layer] = cache.row_bytes()

    def add_rows(self, rows: int) -> None:
        """Add rows at the end of the batch after their prefill, which counts in the peaks. The first decode step adds
        its rows by itself.
        """
        new = {name: np.zeros((len(self.layers), rows)) for name in FIGURES}
        for layer, i in self.place.items():
            new["own_peak"][i] = self.new_own_bytes.pop(layer, 0.0)
        self.figures = {name: np.concatenate((figure, new[name]), axis=1) for name, figure in self.figures.items()}
        self.blocks = {layer: torch.cat((n, n.new_zeros(rows))) for layer, n in self.blocks.items()}
        self.decode_steps, self.savings = (
            np.concatenate((counted, np.zeros(rows))) for counted in (self.decode_steps, self.savings)
        )
        self.curves += [[] for _ in range(rows)]

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.figures = {name: figure[:, rows] for name, figure in self.figures.items()}
        self.blocks = {layer: n[torch.tensor(rows, device=n.device).long()] for layer, n in self.blocks.items()}
        self.decode_steps, self.savings = self.decode_steps[rows], self.savings[rows]
        self.curves = [self.curves[row] for row in rows]

    def record(self, record: StepRecord) -> None:
        """Count one decode step of a layer, in total and per row."""
        super().record(record)
        if not len(self.decode_steps):
            self.add_rows(len(record.total_tokens))
        cache, seen, selection = record.cache, record.total_tokens, record.selection
        layer, ends = cache.layer, np.array(record.step.ends)
        of = {name: figure[self.place[layer]] for name, figure in self.figures.items()}
        of["seen"] += seen
        # selected blocks are counted whole below; subtract the empty slots of the current one
        of["read"] += np.array(record.read, dtype=float) if selection is None else -(-ends % cache.block_size)
        of["cached"] += ends
        of["scored"] += record.scored
        self.last_own_bytes[layer] = own_bytes = cache.row_bytes(record.step.ends)
        of["own"] += own_bytes
        np.maximum(of["own_peak"], own_bytes, out=of["own_peak"])
        if selection is not None:
            self.blocks[layer] = self.blocks.get(layer, 0) + selection.counts.sum(1)
        if layer == next(reversed(self.layers)):
            self.decode_steps += 1
            for row in np.flatnonzero(self.decode_steps % CURVE_STEPS == 0).tolist():
                read_so_far = sum([self._tokens_read(each, row) for each in self.layers]) / len(self.layers)
                held_bytes = sum([float(self.last_own_bytes[each][row]) for each in self.layers])
                self.curves[row].append((seen[row], read_so_far, held_bytes))

    def note_savings(self, ratios: Sequence[float]) -> None:
        """Add the share of each row's blocks that sharing saves in a step, under a method that shares blocks."""
        self.shares = True
        self.savings += ratios

    def of(self, row: int) -> dict[str, Any]:
        """The figures of one row, as plain numbers.

        Returns:
            ``density`` (tokens read per token seen, mean over layers), ``cached_tokens`` (in the cache of one KV head,
            mean over steps and layers; all heads of a layer hold equally many), ``bytes_read_per_step``,
            ``own_bytes_mean``, ``own_bytes_peak`` (what the row would hold alone, all layers), and ``read_curve``: for
            every `CURVE_STEPS` steps, the context's length at their end, the tokens read per step, mean over layers
            and KV heads, and the bytes that the row would then hold alone. Under a method that shares blocks also
            ``amsr``, the row's memory saving ratio, mean over its decode steps. Means are over decode steps; the
            prompt counts in the peak. Empty if nothing was decoded.
        """
        steps, totals = float(self.decode_steps[row]), defaultdict[str, float](float)
        figures = {
            layer: {name: float(f[i, row]) for name, f in self.figures.items()} for layer, i in self.place.items()
        }
        ran = {layer: of for layer, of in figures.items() if of["seen"]}
        if not steps or not ran:
            return {}
        if self.shares:
            totals["amsr"] = float(self.savings[row]) / steps
        for layer, of in ran.items():
            read = self._tokens_read(layer, row)
            totals["density"] += read / of["seen"] / len(ran)
            totals["cached_tokens"] += of["cached"] / steps / len(ran)
            heads, width = self.layers[layer].heads, self.layers[layer].bytes_per_token
            totals["bytes_read_per_step"] += (read * heads * width + of["scored"]) / steps
            totals["own_bytes_mean"] += of["own"] / steps
            totals["own_bytes_peak"] += of["own_peak"]
        curve = self.curves[row]
        return {
            **totals,
            "read_curve": [
                [length, round((read - before) / CURVE_STEPS, 2), own_bytes]
                for (length, read, own_bytes), (_, before, _) in zip(curve, [(0, 0.0, 0.0), *curve], strict=False)
            ],
        }

    def _tokens_read(self, layer: int, row: int) -> float:
        """Tokens that a row has read so far in a layer, mean over KV heads."""
        stats, blocks = self.layers[layer], float(self.blocks[layer][row]) if layer in self.blocks else 0.0
        return float(self.figures["read"][self.place[layer], row]) + blocks * stats.block_size / stats.heads
