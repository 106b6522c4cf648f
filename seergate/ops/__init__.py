"""Pure functions on tensors: targets and losses for training; pooling, selection and sparse attention for decoding.

Packed tensors are ``[T, heads, d]`` with ``cu_seqlens`` ``[n + 1]``; caches are ``[B, Hkv, S, d]``. ``H = G * Hkv``
and query head ``h`` belongs to KV head ``h // G``. `seergate.ops.reference` defines what each op computes;
`seergate.ops.backend` says which implementation runs. A wrong argument raises a ValueError, which names the argument,
its value and what it must be; values of index tensors are checked only in host memory.
"""

from __future__ import annotations

from seergate.ops.attention import (
    AttentionWithTargets,
    PackedAttention,
    RetainedAttention,
    attention_with_block_targets,
    block_targets,
    packed_attention,
    retained_attention,
)
from seergate.ops.compression import pool_keys, update_compressed_keys
from seergate.ops.decode import dense_decode, sparse_decode
from seergate.ops.losses import GateKLStats, gate_kl, retention_kl, scorer_kl
from seergate.ops.selection import Selection, score_blocks, select_blocks

__all__ = [
    "AttentionWithTargets",
    "GateKLStats",
    "PackedAttention",
    "RetainedAttention",
    "Selection",
    "attention_with_block_targets",
    "block_targets",
    "dense_decode",
    "gate_kl",
    "packed_attention",
    "pool_keys",
    "retained_attention",
    "retention_kl",
    "score_blocks",
    "scorer_kl",
    "select_blocks",
    "sparse_decode",
    "update_compressed_keys",
]
