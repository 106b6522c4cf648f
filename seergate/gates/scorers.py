"""Scorers of blocks and retention gates by name, and the one that a configuration describes."""

from __future__ import annotations

import torch

from seergate.config import GateConfig
from seergate.gates.fast_kvzip import FastKVzipGate
from seergate.gates.gate import AttnGate
from seergate.gates.indexer import Indexer
from seergate.gates.msa import MSA
from seergate.gates.retention import RetentionGate
from seergate.gates.scorer import Scorer
from seergate.gates.trim_kv import TrimKVGate
from seergate.geometry import ModelGeometry

SCORERS: dict[str, type[Scorer]] = {"attn_gate": AttnGate, "msa": MSA, "indexer": Indexer}
RETENTION: dict[str, type[RetentionGate]] = {"fast_kvzip": FastKVzipGate, "trim_kv": TrimKVGate}


def make_scorer(config: GateConfig, geometry: ModelGeometry) -> Scorer | RetentionGate:
    """The scorer or retention gate of one layer, with fresh weights.

    Raises:
        ValueError: if the configuration does not fit the model.
    """
    heads = {"num_heads": geometry.num_heads, "num_kv_heads": geometry.num_kv_heads}
    if config.retention:
        return RETENTION[config.scorer](config, hidden_size=geometry.hidden_size, **heads)
    return SCORERS[config.scorer](
        config,
        **heads,
        head_dim=geometry.head_dim,
        inv_freq=torch.tensor(geometry.inv_freq, dtype=torch.float32, device="cpu") if config.rope else None,
        attention_scaling=geometry.attention_scaling,
    )
