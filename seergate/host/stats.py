"""DecodeStats: what a decode run read and held, counted as it happens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seergate.methods.base import Step
from seergate.ops import Selection


class LayerStats:
    """Running sums of one layer; tensors stay on the device until `DecodeStats.summary`."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.tokens_seen = 0
        self.tokens_read: Tensor | float = 0.0  # mean over KV heads, summed over rows and steps
        self.bytes_read: Tensor | float = 0.0
        self.blocks: Tensor | float = 0.0  # [K], summed over rows and steps
        self.resident_sum, self.resident_peak = 0, 0
        self.recall: Tensor | float = 0.0
        self.recall_rows = 0


class DecodeStats:
    """Counters of all layers of one handle."""

    def __init__(self, layers: list[int]) -> None:
        self.layers = {layer: LayerStats() for layer in layers}

    def record(
        self,
        layer: int,
        step: Step,
        seen: list[int],
        selection: Selection | None,
        block_size: int,
        score_bytes: int,
        resident_bytes: int,
    ) -> None:
        """Count one decode step.

        Args:
            layer: its index.
            step: the step.
            seen: tokens each row has seen, evicted ones included.
            selection: the blocks read, or ``None`` if all residents were.
            block_size: tokens per block.
            score_bytes: read to decide.
            resident_bytes: held by the layer.
        """
        stats = self.layers[layer]
        keys, values = step.keys_BKCD, step.values_BKCD
        heads, per_token = keys.shape[1], keys.shape[3] * keys.element_size() + values.shape[3] * values.element_size()
        stats.steps += 1
        stats.rows += len(seen)
        stats.tokens_seen += sum(seen)
        if selection is None:
            read: Tensor | float = float(sum(step.ends))
            blocks: Tensor | float = float(sum(-(-end // block_size) for end in step.ends)) * torch.ones(heads)
            bytes_read: Tensor | float = read * heads * per_token
        else:
            # every selection holds the current block, which may not be full
            tokens_BK = selection.counts * block_size - ((-step.lengths) % block_size)[:, None]
            read = tokens_BK.double().mean(1).sum()
            blocks = selection.counts.double().sum(0)
            bytes_read = tokens_BK.double().sum() * per_token
        stats.tokens_read = stats.tokens_read + read
        stats.blocks = stats.blocks + blocks
        stats.bytes_read = stats.bytes_read + bytes_read + score_bytes
        stats.resident_sum += resident_bytes
        stats.resident_peak = max(stats.resident_peak, resident_bytes)

    def record_recall(self, layer: int, recall_B: Tensor) -> None:
        """Count the share of dense attention's probability that fell on what was read."""
        stats = self.layers[layer]
        stats.recall = stats.recall + recall_B.double().sum()
        stats.recall_rows += len(recall_B)

    def summary(self) -> dict[str, Any]:
        """The figures so far, as plain numbers.

        Returns:
            ``steps``; ``density`` (tokens read per token seen, mean over layers) and ``density_per_layer``;
            ``bytes_read_per_step`` (keys, values and what was read to decide, all layers and rows);
            ``resident_bytes_mean`` and ``resident_bytes_peak`` (keys, values and state, all layers, as allocated);
            ``blocks_per_head`` (mean blocks read per row and step, layers by KV heads); ``recall_per_layer`` if
            measured.
        """
        ran = {layer: stats for layer, stats in self.layers.items() if stats.steps}
        density = [float(stats.tokens_read) / stats.tokens_seen for stats in ran.values()]
        summary: dict[str, Any] = {
            "steps": max((stats.steps for stats in ran.values()), default=0),
            "layers": list(ran),
            "density": sum(density) / len(density) if density else None,
            "density_per_layer": density,
            "bytes_read_per_step": sum(float(stats.bytes_read) / stats.steps for stats in ran.values()),
            "resident_bytes_mean": sum(stats.resident_sum / stats.steps for stats in ran.values()),
            "resident_bytes_peak": sum(stats.resident_peak for stats in ran.values()),
            "blocks_per_head": [(torch.as_tensor(s.blocks) / s.rows).tolist() for s in ran.values()],
        }
        if any(stats.recall_rows for stats in ran.values()):
            summary["recall_per_layer"] = [
                float(stats.recall) / stats.recall_rows if stats.recall_rows else None for stats in ran.values()
            ]
        return summary
