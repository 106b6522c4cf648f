"""DecodeStats: what a decode run read and held, counted as it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seergate.cache.ordinary import ordinary_tensors
from seergate.methods.base import LayerState, Step
from seergate.methods.evicting import Eviction
from seergate.ops import Selection

_FIXED = 6

RowBytes = Callable[[], Any]
"""Bytes per row, as an array."""


def token_bytes(keys: Tensor, values: Tensor) -> int:
    """What a token takes in one KV head of a cache ``[..., D]``."""
    return keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size()


@dataclass
class FixedCounts:
    """What steps of fixed shapes count, on the device, and what is the same for all of them.

    Attributes:
        sums: int64: steps; tokens of all rows; tokens by which selections fall short of whole blocks; tokens and
            blocks read by steps that selected nothing; bytes read to decide; then the blocks selected by each KV head.
        rows: per step.
        resident_bytes, state_bytes: held by the layer at each step, and what of it the method remembers.
    """

    sums: Tensor
    rows: int
    resident_bytes: int
    state_bytes: int


class LayerStats:
    """Running sums of one layer. What a selection decides stays on the device until `DecodeStats.summary`."""

    def __init__(self) -> None:
        self.steps = self.rows = 0
        self.tokens_seen = self.tokens_held = 0
        self.tokens_read = 0.0  # by steps that selected nothing, mean over KV heads
        self.bytes_scored = 0
        self.dense_blocks = 0.0  # blocks read by each head in steps that selected nothing
        self.selected_blocks: Tensor | int = 0  # [K], in steps that selected
        self.missing_tokens = 0  # by which the last blocks of selections fall short, per head
        self.resident_sum = self.resident_peak = 0
        self.state_bytes = 0
        self.fixed = FixedCounts(torch.zeros(_FIXED, dtype=torch.int64), 0, 0, 0)
        self.fetched: int | None = None  # bytes; None if the cache is not offloaded
        self.recall: Tensor | float = 0.0
        self.recall_rows = 0


class DecodeStats:
    """Counters of all layers of one handle."""

    def __init__(self, layers: list[int]) -> None:
        self.layers = {layer: LayerStats() for layer in layers}
        self.block_size = 1
        self.heads = dict.fromkeys(layers, 1)  # KV heads
        self.bytes_per_token = dict.fromkeys(layers, 0)  # of a key and a value of one KV head

    def anew(self) -> DecodeStats:
        """Counters that start at zero. Steps of fixed shapes that are under way go on, with the tensors they have."""
        fresh = DecodeStats(list(self.layers))
        fresh.block_size, fresh.heads, fresh.bytes_per_token = self.block_size, self.heads, self.bytes_per_token
        for layer, stats in self.layers.items():
            self._fold(stats)
            fresh.layers[layer].fixed = stats.fixed
        return fresh

    def saw_prompt(self, layer: int, resident_bytes: int, row_bytes: RowBytes) -> None:
        """Count what a layer held right after a prompt. ``row_bytes`` as in `record`."""
        stats = self.layers[layer]
        stats.resident_peak = max(stats.resident_peak, resident_bytes)

    def record(
        self,
        layer: int,
        step: Step,
        seen: list[int],
        read: Sequence[float],
        selection: Selection | None,
        block_size: int,
        score_bytes: Sequence[int],
        resident_bytes: int,
        row_bytes: RowBytes,
    ) -> None:
        """Count one decode step.

        Args:
            layer: its index.
            step: the step.
            seen: tokens each row has seen, evicted ones included.
            read: tokens each row reads if nothing was selected.
            selection: the blocks read, or ``None`` if nothing was selected.
            block_size: tokens per block.
            score_bytes: per row, read to decide.
            resident_bytes: held by the layer.
            row_bytes: says what each row would hold alone. Only what counts rows asks.
        """
        stats = self.layers[layer]
        keys, values, _ = step.stored
        self.block_size, self.heads[layer] = block_size, keys.shape[1]
        self.bytes_per_token[layer] = token_bytes(keys, values)
        stats.steps += 1
        stats.rows += len(seen)
        stats.tokens_seen += sum(seen)
        stats.tokens_held += sum(step.ends)
        stats.bytes_scored += sum(score_bytes)
        if selection is None:
            stats.tokens_read += sum(read)
            stats.dense_blocks += sum(-(-tokens // block_size) for tokens in read)
        else:  # it holds the current block, which may not be full
            stats.selected_blocks = stats.selected_blocks + selection.counts.sum(0)
            stats.missing_tokens += sum(-end % block_size for end in step.ends)
        stats.resident_sum += resident_bytes
        stats.resident_peak = max(stats.resident_peak, resident_bytes)

    @ordinary_tensors
    def expect_fixed(
        self, layer: int, keys: Tensor, values: Tensor, block_size: int, state: LayerState
    ) -> FixedCounts:
        """Get ready for steps of fixed shapes on this cache ``[B, K, C, D]``: a compiler must see no new tensors.

        Returns:
            Where these steps are counted, as long as the layer's ``fixed`` is this very object.
        """
        stats, heads = self.layers[layer], keys.shape[1]
        self._fold(stats)
        self.block_size, self.heads[layer] = block_size, heads
        self.bytes_per_token[layer] = token_bytes(keys, values)
        sums = stats.fixed.sums
        if len(sums) != _FIXED + heads or sums.device != keys.device:
            sums = torch.zeros(_FIXED + heads, dtype=torch.int64, device=keys.device)
        held = keys.nbytes + values.nbytes + state.nbytes
        stats.fixed = FixedCounts(sums, len(keys), held, state.nbytes)
        stats.resident_peak, stats.state_bytes = max(stats.resident_peak, held), max(stats.state_bytes, state.nbytes)
        return stats.fixed

    def record_fixed(self, layer: int, step: Step, selection: Selection | None, score_bytes_B: Tensor | None) -> None:
        """Count one decode step of fixed shapes, without the host. ``score_bytes_B`` as in `record`, if there is a
        selection.
        """
        lengths, sums = step.lengths, self.layers[layer].fixed.sums
        sums[0] += 1
        sums[1] += lengths.sum()
        if selection is None:
            sums[3] += lengths.sum()
            sums[4] += torch.div(lengths + self.block_size - 1, self.block_size, rounding_mode="floor").sum()
        else:
            sums[2] += (-lengths % self.block_size).sum()
            assert score_bytes_B is not None
            sums[5] += score_bytes_B.sum()
            sums[_FIXED:] += selection.counts.sum(0)

    @staticmethod
    def _fold(stats: LayerStats) -> None:
        """Add what was counted on the device to the other figures."""
        fixed = stats.fixed
        steps, tokens, missing, read, blocks, scored, *selected = fixed.sums.tolist()
        if not steps:
            return
        fixed.sums.zero_()
        stats.steps += steps
        stats.rows += steps * fixed.rows
        stats.tokens_seen += tokens
        stats.tokens_held += tokens
        stats.missing_tokens += missing
        stats.tokens_read += read
        stats.dense_blocks += blocks
        stats.bytes_scored += scored
        stats.resident_sum += steps * fixed.resident_bytes
        stats.resident_peak = max(stats.resident_peak, fixed.resident_bytes)
        stats.state_bytes = max(stats.state_bytes, fixed.state_bytes)
        stats.selected_blocks = stats.selected_blocks + torch.tensor(selected, device=fixed.sums.device)

    def remembers(self, layer: int, state_bytes: int) -> None:
        """Take note of how many bytes a layer's method remembers beside keys and values."""
        self.layers[layer].state_bytes = max(self.layers[layer].state_bytes, state_bytes)

    def record_fetched(self, layer: int, count: int) -> None:
        """Count the bytes that a step of an offloaded cache brought from slow memory."""
        stats = self.layers[layer]
        stats.fetched = (stats.fetched or 0) + count

    def evicted(self, layer: int, step: Step, eviction: Eviction) -> None:
        """Take note of what leaves after a step. Nothing is counted here; a subclass may want to know."""

    def record_recall(self, layer: int, recall_B: Tensor) -> None:
        """Count the share of dense attention's probability that fell on what was read."""
        stats = self.layers[layer]
        stats.recall = stats.recall + recall_B.double().sum()
        stats.recall_rows += len(recall_B)

    def kv_totals(self) -> tuple[float, float]:
        """Bytes that all steps so far read of keys and values and to decide, and that dense attention would have."""
        read = seen = 0.0
        for layer, stats in self.layers.items():
            self._fold(stats)
            if stats.steps:
                read += self._tokens_per_head(layer).sum().item() * self.bytes_per_token[layer] + stats.bytes_scored
                seen += stats.tokens_seen * self.heads[layer] * self.bytes_per_token[layer]
        return read, seen

    def _tokens_per_head(self, layer: int) -> Tensor:
        """Tokens that each KV head read, all rows and steps together: ``[K]``, on the CPU."""
        stats = self.layers[layer]
        selected_K = torch.as_tensor(stats.selected_blocks).double().cpu().reshape(-1).expand(self.heads[layer])
        return selected_K * self.block_size - stats.missing_tokens + stats.tokens_read

    def summary(self) -> dict[str, Any]:
        """The figures so far, as plain numbers.

        Returns:
            ``steps``; ``density`` (tokens read per token seen, mean over layers) and ``density_per_layer``;
            ``bytes_read_per_step`` (keys, values and what was read to decide, all layers and rows), of which
            ``bytes_scored_per_step`` to decide, and ``bytes_dense_per_step`` (what dense attention would have read);
            ``resident_tokens_per_layer`` (per row and KV head, mean over steps);
            ``resident_bytes_mean`` and ``resident_bytes_peak`` (keys, values and state, all layers, as allocated);
            ``state_bytes`` (of these, what the method remembers: compressed keys, pooling state; the most there were);
            ``blocks_per_head`` and ``tokens_per_head`` (mean read per row and step, layers by KV heads);
            ``density_per_head`` (tokens read per token seen, layers by KV heads); if the cache is offloaded,
            ``bytes_fetched_per_step`` (from slow memory, all layers and rows); ``recall_per_layer`` if measured.
        """
        for stats in self.layers.values():
            self._fold(stats)
        ran = {layer: stats for layer, stats in self.layers.items() if stats.steps}
        density, bytes_read, bytes_scored, bytes_dense = list[list[float]](), 0.0, 0.0, 0.0
        tokens_per_head, blocks_per_head = list[list[float]](), list[list[float]]()
        for layer, stats in ran.items():
            tokens_K, width = self._tokens_per_head(layer), self.bytes_per_token[layer]
            selected_K = torch.as_tensor(stats.selected_blocks).double().cpu().reshape(-1).expand(len(tokens_K))
            density.append((tokens_K / stats.tokens_seen).tolist())
            bytes_read += (tokens_K.sum().item() * width + stats.bytes_scored) / stats.steps
            bytes_scored += stats.bytes_scored / stats.steps
            bytes_dense += stats.tokens_seen * len(tokens_K) * width / stats.steps
            blocks_per_head.append(((selected_K + stats.dense_blocks) / stats.rows).tolist())
            tokens_per_head.append((tokens_K / stats.rows).tolist())
        density_per_layer = [sum(heads) / len(heads) for heads in density]
        summary: dict[str, Any] = {
            "steps": max((stats.steps for stats in ran.values()), default=0),
            "layers": list(ran),
            "density": sum(density_per_layer) / len(density) if density else None,
            "density_per_layer": density_per_layer,
            "density_per_head": density,
            "bytes_read_per_step": bytes_read,
            "bytes_scored_per_step": bytes_scored,
            "bytes_dense_per_step": bytes_dense,
            "resident_tokens_per_layer": [stats.tokens_held / stats.rows for stats in ran.values()],
            "resident_bytes_mean": sum(stats.resident_sum / stats.steps for stats in ran.values()),
            "resident_bytes_peak": sum(stats.resident_peak for stats in ran.values()),
            "state_bytes": sum(stats.state_bytes for stats in ran.values()),
            "blocks_per_head": blocks_per_head,
            "tokens_per_head": tokens_per_head,
        }
        fetched = [stats.fetched / stats.steps for stats in ran.values() if stats.fetched is not None]
        if fetched:
            summary["bytes_fetched_per_step"] = sum(fetched)
        if any(stats.recall_rows for stats in ran.values()):
            summary["recall_per_layer"] = [
                float(stats.recall) / stats.recall_rows if stats.recall_rows else None for stats in ran.values()
            ]
        return summary
