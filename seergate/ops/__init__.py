"""Pure functions on tensors: the teacher's block targets, the gate's loss, pooling, selection, block-sparse attention.

Packed tensors are ``[T, heads, d]`` with ``cu_seqlens`` ``[n + 1]``; caches are ``[B, Hkv, S, d]``. ``H = G * Hkv``
and query head ``h`` belongs to KV head ``h // G``. `seergate.ops.reference` defines what each op computes;
`seergate.ops.backend` says which implementation runs.
"""

from __future__ import annotations

from seergate.ops.compression import update_compressed_keys
from seergate.ops.dense_decode import dense_decode
from seergate.ops.gate_kl import GateKLStats, gate_kl
from seergate.ops.packed_attention import PackedAttention, packed_attention
from seergate.ops.pooling import pool_keys
from seergate.ops.retained_attention import RetainedAttention, retained_attention
from seergate.ops.retention_kl import retention_kl
from seergate.ops.scorer_kl import scorer_kl
from seergate.ops.scoring import score_blocks
from seergate.ops.selection import Selection, select_blocks
from seergate.ops.sparse_decode import sparse_decode
from seergate.ops.teacher import AttentionWithTargets, attention_with_block_targets, block_targets

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
