"""Base classes of scorers, which compute block scores from queries of tokens and keys of entries.

An entry is the key that a scorer stores for one token or for one block of tokens (`Scorer.entry_tokens`).

Shape suffixes: B batch, S tokens, T tokens that have keys, M entries, N blocks, H query heads, K KV heads, G query
heads per KV head (H = G * K), I query heads of the scorer, J key heads of the scorer, D head dimension of the model, E
gate dimension, P width of the input of an entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seergate.config import GateConfig
from seergate.gates.geometry import ModelGeometry
from seergate.ops.gate_math import Branch, block_scores, branch_end
from seergate.ops.rows import RowLengths

INIT_STD = 0.02


class HeadwiseLinear(nn.Module):
    """A linear map per head without bias; the shape of ``weight`` is the head axes, then ``[in, out]``."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        nn.init.normal_(self.weight, std=INIT_STD)


def group_size(geometry: ModelGeometry) -> int:
    """Query heads per KV head; a ValueError if not a whole number."""
    heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"num_heads is {heads}; it must be a positive multiple of num_kv_heads ({kv_heads})")
    return heads // kv_heads


class Scorer(nn.Module, ABC):
    """Scores every key block for every query token, separately for each KV head.

    Inputs are the model's **pre-RoPE** queries and keys, after any q/k norm. Scorers compute in their weights' dtype.

    Attributes:
        entry_tokens: tokens per entry.
        key_heads: J, number of key heads of the scorer.
        fused: whether a block's score is ``scale * query . key`` with one of each per KV head, as `ops.gate_kl` needs.
    """

    inv_freq: Tensor | None
    k_proj: HeadwiseLinear
    entry_tokens: int
    key_heads: int
    fused: bool = False

    def __init__(self, config: GateConfig, geometry: ModelGeometry) -> None:
        super().__init__()
        self.group_size = group_size(geometry)
        if config.rope and len(geometry.inv_freq) != config.gate_dim // 2:
            raise ValueError(
                f"inv_freq has {len(geometry.inv_freq)} frequencies; with rope on it must have {config.gate_dim // 2}"
            )
        self.config, self.geometry = config, geometry
        self.num_heads, self.num_kv_heads = geometry.num_heads, geometry.num_kv_heads
        self.head_dim = geometry.head_dim
        self.attention_scaling = geometry.attention_scaling
        inv_freq = torch.tensor(geometry.inv_freq, dtype=torch.float32, device="cpu") if config.rope else None
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Frequencies move to the gate's device but stay fp32: in bf16, distant positions would get wrong angles.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if exact is not None and self.inv_freq is not None:
            self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def begin_as_model(self, scale: float = 1.0, order: Tensor | None = None) -> None:
        """Initialise weights so that scores are the model's own ``q . k``; refused by scorers that cannot."""
        raise ValueError(f"init is 'model'; with scorer {self.config.scorer!r} it must be 'random'")

    @abstractmethod
    def queries(self, q_BHSD: Tensor, positions: Tensor) -> Tensor:
        """The scorer's queries, ``[B, I, S, E']``.

        Args:
            q_BHSD: the model's queries before RoPE, ``[B, H, S, D]``; query head h belongs to KV head ``h // G``.
            positions: ``[B, S]`` or ``[S]``, token positions.
        """

    @abstractmethod
    def pool(self, k_BKSD: Tensor) -> Tensor:
        """Inputs of `keys`, ``[B, J, M, P]``.

        Args:
            k_BKSD: the model's keys before RoPE; an entry starts at the first key.
        """

    @abstractmethod
    def keys(self, pooled_BJMP: Tensor, positions: Tensor) -> Tensor:
        """The scorer's keys (entries), ``[B, J, M, E]``.

        Args:
            pooled_BJMP: from `pool`.
            positions: ``[B, M]`` or ``[M]``, the position of each entry's first token.
        """

    @abstractmethod
    def scores(self, queries_BISE: Tensor, keys_BJME: Tensor) -> Tensor:
        """Block logits ``[B, K, S, N]`` of all blocks that have an entry, in fp32 or wider."""

    def step_scores(self, q_BHD: Tensor, rows: RowLengths | Tensor, keys_BJME: Tensor) -> Tensor:
        """Block logits of a decode step, ``[B, K, N]``; only those of complete blocks are valid.

        Args:
            q_BHD: each row's newest query before RoPE.
            rows: tokens of each row, including the newest.
            keys_BJME: each row's entries.
        """
        return self.scores(self.queries(q_BHD[:, :, None], RowLengths.of(rows).positions), keys_BJME)[:, :, 0]

    @abstractmethod
    def remember(
        self, k_BKD: Tensor, rows: RowLengths | Tensor, recent: Tensor, entries: Tensor, **placing: Any
    ) -> None:
        """Store the newest key of each row in a decode step, and write the entries that it completes.

        Args:
            k_BKD: each row's newest key before RoPE.
            rows: tokens of each row, including the newest.
            recent: ``[B, K, 2 * entry_tokens, D]``, raw keys; position ``p`` is at slot ``p % (2 * entry_tokens)``.
                Changed in place.
            entries: ``[B, J, M, E]``, changed in place.
            **placing: ``position_offset`` of `ops.update_compressed_keys`.
        """

    def branch(self, side: Literal["q", "k"]) -> Branch:
        """The linear map, norm and RoPE of the queries or the keys."""
        return Branch(getattr(self, f"{side}_proj").weight, *self._norm_and_rope(f"{side}_norm"))

    def _norm_and_rope(self, norm: str | None = None) -> tuple[Tensor | None, Tensor | None, float]:
        """The last three arguments of `branch_end`: the weight of this norm, or ``None`` without norm, and RoPE."""
        weight = getattr(self, norm).weight if norm is not None and self.config.qk_norm else None
        return weight, self.inv_freq, self.attention_scaling


class TokenScorer(Scorer):
    """Base of scorers with one index key per token, shared by all queries: a linear map of the keys of all KV heads.

    A block's score is the maximum of its tokens' scores.
    """

    def __init__(self, config: GateConfig, geometry: ModelGeometry) -> None:
        super().__init__(config, geometry)
        self.entry_tokens = self.key_heads = 1
        self.k_proj = HeadwiseLinear(1, self.num_kv_heads * self.head_dim, config.gate_dim)

    def pool(self, k_BKSD: Tensor) -> Tensor:
        """The keys of all KV heads, concatenated: ``[B, 1, S, K * D]``."""
        return k_BKSD.transpose(1, 2).flatten(2)[:, None]

    def keys(self, pooled_B1TP: Tensor, positions: Tensor) -> Tensor:
        """The index keys, ``[B, 1, T, E]``; ``positions [B, T]`` or ``[T]``."""
        weight = self.k_proj.weight
        return self.key_end(pooled_B1TP.to(weight.dtype) @ weight, positions)

    def key_end(self, keys_B1TE: Tensor, positions: Tensor) -> Tensor:
        """Apply norm (if ``config.qk_norm``) and RoPE (if ``config.rope``) to the output of the linear map."""
        return branch_end(keys_B1TE, positions, *self._norm_and_rope("k_norm"))

    @abstractmethod
    def token_scores(self, queries_BISE: Tensor, keys_B1TE: Tensor) -> Tensor:
        """Scores of tokens, in fp32 or wider: ``[B, K, S, T]``."""

    def products(self, queries_BISE: Tensor, keys_B1TE: Tensor) -> Tensor:
        """``query . key / sqrt(E)``, ``[B, I, S, T]``; a single matrix product reads the keys once for all heads."""
        heads = queries_BISE.shape[1:3]
        return block_scores(queries_BISE.flatten(1, 2)[:, None], keys_B1TE)[:, 0].unflatten(1, heads)

    def scores(self, queries_BISE: Tensor, keys_B1TE: Tensor) -> Tensor:
        """The maximum score of each block's tokens, ``[B, K, S, N]``, in fp32 or wider."""
        tokens, size = keys_B1TE.shape[2], self.config.block_size
        padded = F.pad(self.token_scores(queries_BISE, keys_B1TE), (0, -tokens % size), value=-torch.inf)
        return padded.unflatten(-1, (-1, size)).amax(-1)

    def remember(
        self, k_BKD: Tensor, rows: RowLengths | Tensor, recent: Tensor, entries: Tensor, **placing: Any
    ) -> None:
        """Write the index key of each row's newest token to ``entries``."""
        rows = RowLengths.of(rows)
        at, each = rows.positions[:, 0], rows.each
        with torch.autocast(k_BKD.device.type, enabled=False):
            entries[each, :, at] = self.keys(self.pool(k_BKD[:, :, None]), at[:, None])[:, :, 0]
