"""Decode statistics per sample: bytes and tokens read and held, by row.

What a row reads does not depend on its batch, nor does what it holds: its own tokens, and what the method remembers of
them. The memory that is allocated does, because the longest row decides; it is divided equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seergate.stats import DecodeStats, RowBytes, StepRecord

_SUMS = 8

CURVE_STEPS = 32
"""Decode steps per point of a row's curve of tokens read."""


class _LayerRows:
    """Counters of one layer, one entry per row."""

    def __init__(self) -> None:
        # seen, read without a selection, in the cache (tokens per head), bytes scored; bytes allocated (sum over
        # steps), their peak; the row's own bytes, their peak
        self.sums = np.zeros((_SUMS, 0))
        self.arriving: tuple[float, Any] = 0.0, 0.0  # bytes allocated, and own, of rows that have only read a prompt
        self.blocks: Tensor | None = None  # selected, summed over KV heads; stays on the device until it is asked for
        self.heads, self.bytes_per_token, self.block_size = 1, 0, 1
        self.held = np.zeros(0)  # by the rows, at the last step

    def add(self, rows: int) -> None:
        """Add rows that have read their prompts; their peak is at least the bytes that they hold now."""
        new = np.zeros((_SUMS, rows))
        allocated, new[7] = self.arriving
        new[5] = allocated / rows
        self.sums, self.arriving = np.concatenate((self.sums, new), axis=1), (0.0, 0.0)
        if self.blocks is not None:
            self.blocks = torch.cat((self.blocks, self.blocks.new_zeros(rows)))

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.sums = self.sums[:, rows]
        if self.blocks is not None:
            self.blocks = self.blocks[torch.tensor(rows, dtype=torch.int64, device=self.blocks.device)]

    def tokens_read(self, row: int) -> float:
        """Tokens that a row has read so far, mean over KV heads."""
        selected = 0.0 if self.blocks is None else float(self.blocks[row]) * self.block_size / self.heads
        return float(self.sums[1, row]) + selected


class RowStats(DecodeStats):
    """`DecodeStats` that also counts per row; a handle counts with it after `Handle.count_with`."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__(layers)
        self.by_layer = {layer: _LayerRows() for layer in layers}
        self.decode_steps = np.zeros(0)
        self.savings = np.zeros(0)  # of memory, by sharing blocks: ratios, summed over steps
        self.shares = False
        self.before = self.decode_steps, list[int](), dict[int, Any]()
        self.curves: list[list[tuple[int, float, float]]] = []  # per row: tokens of context, read so far; bytes held

    def begin_step(self) -> None:
        """Mark the begin of a step, which `take_back` may undo."""
        self.before = self.decode_steps.copy(), [len(curve) for curve in self.curves], dict[int, Any]()

    def take_back(self) -> None:
        """Forget what the step has counted since `begin_step`. Figures of all rows together keep it."""
        self.decode_steps, lengths, layers = self.before
        self.curves = [curve[:length] for curve, length in zip(self.curves, lengths, strict=True)]
        for layer, (sums, blocks) in layers.items():
            self.by_layer[layer].sums, self.by_layer[layer].blocks = sums, blocks

    def saw_prompt(self, layer: int, resident_bytes: int, row_bytes: RowBytes) -> None:
        """Count a prompt that was read. Its rows are those that `add_rows` is called for next."""
        super().saw_prompt(layer, resident_bytes, row_bytes)
        self.by_layer[layer].arriving = float(resident_bytes), row_bytes()

    def add_rows(self, rows: int) -> None:
        """Add rows at the end of the batch, whose prompts have been read."""
        self.decode_steps, self.savings = (
            np.concatenate((counted, np.zeros(rows))) for counted in (self.decode_steps, self.savings)
        )
        self.curves += [[] for _ in range(rows)]
        for counters in self.by_layer.values():
            counters.add(rows)

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.decode_steps, self.savings = self.decode_steps[rows], self.savings[rows]
        self.curves = [self.curves[row] for row in rows]
        for counters in self.by_layer.values():
            counters.keep(rows)

    def record(self, record: StepRecord) -> None:
        """Count one decode step, row by row too."""
        super().record(record)
        layer, seen, selection, block_size = record.layer, record.total_tokens, record.selection, record.block_size
        counters = self.by_layer[layer]
        self.before[2][layer] = counters.sums.copy(), counters.blocks
        counters.heads, counters.bytes_per_token = self.layers[layer].heads, self.layers[layer].bytes_per_token
        counters.block_size = block_size
        ends = np.array(record.step.ends)
        seen_, read_, cached, scored, allocated, allocated_peak, own, own_peak = counters.sums
        seen_ += seen
        missing = -(-ends % block_size)  # the current block may not be full
        read_ += np.array(record.read, dtype=float) if selection is None else missing
        cached += ends
        scored += record.scored
        allocated += record.resident_bytes / len(seen)
        np.maximum(allocated_peak, record.resident_bytes / len(seen), out=allocated_peak)
        counters.held = held = record.row_bytes()
        own += held
        np.maximum(own_peak, held, out=own_peak)
        if selection is not None:
            counts = selection.counts.sum(1)
            counters.blocks = counts if counters.blocks is None else counters.blocks + counts
        if layer == next(reversed(self.by_layer)):
            self.decode_steps += 1
            for row in np.flatnonzero(self.decode_steps % CURVE_STEPS == 0).tolist():
                read_so_far = sum([each.tokens_read(row) for each in self.by_layer.values()]) / len(self.by_layer)
                held_now = sum([float(each.held[row]) for each in self.by_layer.values()])
                self.curves[row].append((seen[row], read_so_far, held_now))

    def note_savings(self, ratios: Sequence[float]) -> None:
        """Add the share of each row's blocks that sharing saves in a step, under a method that shares blocks."""
        self.shares = True
        self.savings += ratios

    def of(self, row: int) -> dict[str, Any]:
        """The figures of one row, as plain numbers.

        Returns:
            ``density`` (tokens read per token seen, mean over layers), ``cached_tokens`` (in the cache of one KV head,
            mean over steps and layers; every head of a layer holds as many), ``bytes_read_per_step``,
            ``own_bytes_mean``, ``own_bytes_peak`` (what the row would hold alone, all layers),
            ``resident_bytes_mean``, ``resident_bytes_peak`` (its share of what was allocated), and ``read_curve``: for
            every `CURVE_STEPS` steps, the context's length at their end, the tokens read per step, mean over layers
            and KV heads, and the bytes that the row would then hold alone. Under a method that shares blocks also
            ``amsr``, the row's memory saving ratio, mean over its decode steps. Means are over decode steps; the
            prompt counts in the peaks. Empty if nothing was decoded.
        """
        steps = float(self.decode_steps[row])
        ran = [counters for counters in self.by_layer.values() if counters.sums[0, row] > 0]
        if not steps or not ran:
            return {}
        density = cached_tokens = read_bytes = 0.0
        held = np.zeros(4)  # allocated and own: mean, peak
        for counters in ran:
            seen, _, cached, scored, *bytes_ = (float(value) for value in counters.sums[:, row])
            read = counters.tokens_read(row)
            density += read / seen / len(ran)
            cached_tokens += cached / steps / len(ran)
            read_bytes += (read * counters.heads * counters.bytes_per_token + scored) / steps
            held += np.array(bytes_) / (steps, 1, steps, 1)
        resident, resident_peak, own, own_peak = held.tolist()
        shared = {"amsr": float(self.savings[row]) / steps} if self.shares else {}
        return {
            **shared,
            "density": density,
            "cached_tokens": cached_tokens,
            "bytes_read_per_step": read_bytes,
            "own_bytes_mean": own,
            "own_bytes_peak": own_peak,
            "resident_bytes_mean": resident,
            "resident_bytes_peak": resident_peak,
            "read_curve": [
                [length, round((read - before) / CURVE_STEPS, 2), held]
                for (length, read, held), (_, before, _) in zip(
                    self.curves[row], [(0, 0.0, 0.0), *self.curves[row]], strict=False
                )
            ],
        }
