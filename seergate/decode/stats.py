"""Decode statistics: the tokens and bytes that decode steps read, and the bytes that stay resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seergate.cache.layer import GatedLayer
from seergate.cache.storage import token_bytes
from seergate.methods.base import AttentionOutput, Step
from seergate.methods.selecting import PerHeadSelection, SelectingState
from seergate.ops import Selection, backend


def _blocks_read(counts: Tensor) -> Tensor | np.ndarray:
    """Blocks ``[K]`` of ``counts [B, K]``, all rows together; on the host if they are there."""
    total = counts.sum(0)
    return total.numpy() if total.device.type == "cpu" else total


@dataclass
class StepRecord:
    """One decode step of one layer: what it read and what stays resident.

    Attributes:
        cache: the layer of the cache, before the method evicts.
        selection: the blocks read; ``None`` if the method made no selection: all residents were read, or
            ``attended.read`` of them.
        recall: ``[B]``, share of dense attention's probability that fell on the tokens read; ``None`` if not measured.
    """

    cache: GatedLayer
    step: Step
    selection: Selection | PerHeadSelection | None
    attended: AttentionOutput
    recall: Tensor | None = None

    @cached_property
    def total_tokens(self) -> list[int]:
        """Tokens of each row so far, evicted ones included."""
        rows = self.cache.rows
        return [
            total - resident + end
            for total, resident, end in zip(rows.total, rows.resident, self.step.ends, strict=True)
        ]

    @property
    def read(self) -> Sequence[float]:
        """Tokens that each row read, mean over KV heads; valid only if no blocks were selected."""
        return self.step.ends if self.attended.read is None else self.attended.read

    @cached_property
    def scored(self) -> list[int]:
        """Bytes that each row read to select or score, besides the keys and values attended to; all heads together."""
        (keys, values, _), state, read = self.step.stored, self.cache.state, self.attended.read
        assert state is not None
        heads, bytes_of_rows = keys.shape[1], []
        for row, (resident, seen) in enumerate(zip(self.step.ends, self.total_tokens, strict=True)):
            # A row that reads everything is scored only to keep the batch's shape: not counted.
            chose = (self.selection is not None or read is not None) and not state.reads_all(seen)
            total = state.bytes_read(resident, seen, chose)
            if chose and state.reads_all_keys:  # without a selection, attention reads all keys anyway
                total += resident * heads * keys.shape[3] * keys.element_size()
            if read is not None:  # tokens beyond those in the cache were read from the state, counted above
                total -= max(0, int(read[row]) - resident) * heads * token_bytes(keys, values)
            bytes_of_rows.append(total)
        return bytes_of_rows


@dataclass
class CompiledCounts:
    """Device counters of compiled steps, and the sizes that all of these steps share.

    Attributes:
        lengths: int32 ``[2, C + 1]``: for each row length, how often a row read everything (0) and how often it
            selected (1). Other figures are derived from these, so that a step needs few kernel launches.
        blocks: int64 ``[B, K]``, blocks selected by each row and KV head.
        score_bytes: int64 ``[C + 1]``, on the CPU: for each row length, the bytes that a selection reads.
        resident_bytes, state_bytes: bytes that the layer holds at each step, and the part in the method's state.
    """

    lengths: Tensor
    blocks: Tensor
    score_bytes: Tensor
    resident_bytes: int
    state_bytes: int


class LayerStats:
    """Running sums of one layer. Counts that depend on a selection stay on the device until the sums are read."""

    def __init__(self) -> None:
        self.block_size = self.heads = 1  # KV heads
        self.bytes_per_token = 0  # of a key and a value of one KV head
        self.steps = self.rows = 0
        self.tokens_seen = self.tokens_held = 0
        self.tokens_read = 0.0  # by steps that selected nothing, mean over KV heads
        self.bytes_scored = 0
        self.dense_blocks = 0.0  # blocks read by each head in steps that selected nothing
        self.selected_blocks: Tensor | int = 0  # [K], in steps that selected
        self.host_blocks: np.ndarray | int = 0  # the part of them that was counted on the host
        self.missing_tokens = 0  # tokens that the last selected blocks lack, per head
        self.resident_sum = self.resident_peak = 0
        self.state_bytes = 0
        nothing = torch.zeros(2, 0, dtype=torch.int64, device="cpu")
        self.compiled = CompiledCounts(nothing, nothing, nothing[0], 0, 0)
        self.fetched: int | None = None  # bytes; None if the cache is not offloaded
        self.recall: Tensor | float = 0.0
        self.recall_rows = 0

    def of_cache(self, keys: Tensor, values: Tensor, block_size: int) -> None:
        """Set block size, KV heads and bytes per token from the cache's ``[B, K, C, D]`` keys and values."""
        self.block_size, self.heads, self.bytes_per_token = block_size, keys.shape[1], token_bytes(keys, values)

    def blocks_per_head(self) -> Tensor:
        """Blocks that each KV head read in steps that selected, all rows together: ``[K]``, on the CPU."""
        each = torch.as_tensor(self.selected_blocks).double().cpu() + torch.as_tensor(self.host_blocks).cpu()
        return each.reshape(-1).expand(self.heads)

    def tokens_per_head(self) -> Tensor:
        """Tokens that each KV head read, all rows and steps together: ``[K]``, on the CPU."""
        return self.blocks_per_head() * self.block_size - self.missing_tokens + self.tokens_read

    def bytes_read(self) -> float:
        """Bytes read by all steps: keys, values and what selections read."""
        return self.tokens_per_head().sum().item() * self.bytes_per_token + self.bytes_scored

    def bytes_dense(self) -> int:
        """Bytes that dense attention would have read."""
        return self.tokens_seen * self.heads * self.bytes_per_token

    def fold(self) -> None:
        """Add the counters of compiled steps to the running sums, and zero them."""
        fixed = self.compiled
        everything, selected = fixed.lengths.cpu().long()
        rows, lengths = everything + selected, torch.arange(len(selected), device="cpu")
        if not rows.any():
            return
        steps = int(rows.sum()) // len(fixed.blocks)
        self.steps += steps
        self.rows += int(rows.sum())
        self.tokens_seen += int(rows @ lengths)
        self.tokens_held += int(rows @ lengths)
        self.missing_tokens += int(selected @ (-lengths % self.block_size))
        self.tokens_read += int(everything @ lengths)
        self.dense_blocks += int(everything @ -(-lengths // self.block_size))
        self.bytes_scored += int(selected @ fixed.score_bytes)
        self.resident_sum += steps * fixed.resident_bytes
        self.resident_peak = max(self.resident_peak, fixed.resident_bytes)
        self.state_bytes = max(self.state_bytes, fixed.state_bytes)
        self.selected_blocks = self.selected_blocks + fixed.blocks.sum(0)
        fixed.lengths.zero_()
        fixed.blocks.zero_()


class DecodeStats:
    """Counters of all layers of one handle."""

    def __init__(self, layers: list[int]) -> None:
        self.layers = {layer: LayerStats() for layer in layers}

    def anew(self, make: Callable[[list[int]], DecodeStats]) -> DecodeStats:
        """Return new counters from ``make``; compiled steps keep the tensors in which their graph counts."""
        fresh = make(list(self.layers))
        for layer, stats in self._folded().items():
            new = fresh.layers[layer]
            new.compiled, new.heads, new.bytes_per_token = stats.compiled, stats.heads, stats.bytes_per_token
            new.block_size = stats.block_size
        return fresh

    def _folded(self) -> dict[int, LayerStats]:
        """The sums of all layers, compiled steps included."""
        for stats in self.layers.values():
            stats.fold()
        return self.layers

    def saw_prompt(self, cache: GatedLayer) -> None:
        """Update the peak of a layer's bytes after prefill."""
        stats = self.layers[cache.layer]
        stats.resident_peak = max(stats.resident_peak, cache.nbytes)

    def record(self, record: StepRecord) -> None:
        """Count one decode step."""
        cache, step, selection = record.cache, record.step, record.selection
        stats, size, resident_bytes, state = self.layers[cache.layer], cache.block_size, cache.nbytes, cache.state
        assert state is not None
        stats.of_cache(*step.stored[:2], size)
        stats.steps += 1
        stats.rows += len(record.total_tokens)
        stats.tokens_seen += sum(record.total_tokens)
        stats.tokens_held += sum(step.ends)
        stats.bytes_scored += sum(record.scored)
        if selection is None:
            stats.tokens_read += sum(record.read)
            stats.dense_blocks += sum(-(-tokens // size) for tokens in record.read)
        else:  # the selection includes the current block, which may not be full
            blocks = step.rows.once("blocks read", lambda: _blocks_read(selection.counts), selection.counts)
            if isinstance(blocks, Tensor):
                stats.selected_blocks = stats.selected_blocks + blocks
            else:
                stats.host_blocks = stats.host_blocks + blocks
            stats.missing_tokens += sum(-end % size for end in step.ends)
        stats.resident_sum += resident_bytes
        stats.resident_peak = max(stats.resident_peak, resident_bytes)
        stats.state_bytes = max(stats.state_bytes, state.nbytes)
        if record.attended.fetched is not None:
            stats.fetched = (stats.fetched or 0) + record.attended.fetched
        if record.recall is not None:
            stats.recall = stats.recall + record.recall.double().sum()
            stats.recall_rows += len(record.recall)

    def expect_compiled(self, cache: GatedLayer) -> None:
        """Prepare the counters of compiled steps after an eager one; does nothing if the layer does not compile.

        Tensors that fit are reused, as new ones need a new graph. The counters are in use while they are the cache's
        ``counts``.
        """
        if not cache.compiles:
            return
        stats, state, rows = self.layers[cache.layer], cache.state, cache.rows
        keys, values, size = cache.storage.keys, cache.storage.values, cache.block_size
        assert state is not None and rows.width is not None
        if cache.counts is None or cache.counts is not stats.compiled:
            backend.load(cache.device)
            stats.fold()
            stats.of_cache(keys, values, size)
            shapes = (2, keys.shape[2] + 1), keys.shape[:2]
            lengths, blocks = stats.compiled.lengths, stats.compiled.blocks
            if (lengths.shape, blocks.shape, lengths.device) != (*shapes, keys.device):
                lengths = torch.zeros(shapes[0], dtype=torch.int32, device=keys.device)
                blocks = torch.zeros(shapes[1], dtype=torch.int64, device=keys.device)
            each = torch.arange(keys.shape[2] + 1, device="cpu")
            read = state.bytes_read(each, each)
            if isinstance(state, SelectingState):
                read = read * (each > state.method.covered_tokens)
            held_bytes = keys.nbytes + values.nbytes + state.nbytes
            cache.counts = stats.compiled = CompiledCounts(lengths, blocks, read, held_bytes, state.nbytes)
        if cache.device.type == "cuda":
            own = (keys, values, rows.lengths, rows.width, rows.newest, *state.rows.values())
            for tensor in (*own, stats.compiled.lengths, stats.compiled.blocks):
                torch._dynamo.mark_static_address(tensor, guard=False)

    def record_compiled(self, layer: int, step: Step, selection: Selection | PerHeadSelection | None) -> None:
        """Count one compiled step, on the device only."""
        fixed, lengths = self.layers[layer].compiled, step.lengths
        chose = int(selection is not None)
        fixed.lengths[chose].scatter_add_(0, lengths, torch.ones_like(lengths, dtype=torch.int32))
        if selection is not None:
            fixed.blocks.add_(selection.counts)

    def summary(self) -> dict[str, Any]:
        """Return the figures so far, as plain numbers.

        Returns:
            ``steps``; ``layers`` (indices of layers with a step); ``density`` (tokens read per token seen, mean over
            layers) and ``density_per_layer``; ``bytes_read_per_step`` (keys, values and what selections read, all
            layers and rows), the part ``bytes_scored_per_step`` that selections read, and ``bytes_dense_per_step``
            (what dense attention would have read); ``resident_tokens_per_layer`` (per row and KV head, mean over
            steps); ``resident_bytes_mean`` and ``resident_bytes_peak`` (keys, values and state, all layers, as
            allocated); ``state_bytes`` (peak of the method's state: compressed keys, pooling state);
            ``blocks_per_head`` and ``tokens_per_head`` (mean read per row and step, layers by KV heads);
            ``density_per_head`` (tokens read per token seen, layers by KV heads); ``bytes_fetched_per_step`` if the
            cache is offloaded (from slow memory, all layers and rows); ``recall_per_layer`` if measured.
        """
        ran = {layer: stats for layer, stats in self._folded().items() if stats.steps}
        bytes_read = bytes_scored = bytes_dense = 0.0
        for stats in ran.values():
            bytes_read += stats.bytes_read() / stats.steps
            bytes_scored += stats.bytes_scored / stats.steps
            bytes_dense += stats.bytes_dense() / stats.steps
        density = [(stats.tokens_per_head() / stats.tokens_seen).tolist() for stats in ran.values()]
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
            "blocks_per_head": [
                ((stats.blocks_per_head() + stats.dense_blocks) / stats.rows).tolist() for stats in ran.values()
            ],
            "tokens_per_head": [(stats.tokens_per_head() / stats.rows).tolist() for stats in ran.values()],
        }
        fetched = [stats.fetched / stats.steps for stats in ran.values() if stats.fetched is not None]
        if fetched:
            summary["bytes_fetched_per_step"] = sum(fetched)
        if any(stats.recall_rows for stats in ran.values()):
            summary["recall_per_layer"] = [
                float(stats.recall) / stats.recall_rows if stats.recall_rows else None for stats in ran.values()
            ]
        return summary
