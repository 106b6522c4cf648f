"""Baselines of every comparison: dense attention, random selection and eviction; and an upper bound, the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seergate.checks import check_count
from seergate.methods.base import LayerSpec, LayerState, Method, Step
from seergate.methods.evicting import BudgetedMethod, BudgetedState
from seergate.methods.scoring import log_block_maxima
from seergate.methods.selecting import SelectingMethod, SelectingState


@dataclass(kw_only=True)
class Dense(Method):
    """Read everything."""

    name = "dense"
    state = LayerState
    plot_style = ("#000000", "o")

    @property
    def fixed_shapes(self) -> bool:
        return True


class OracleState(SelectingState):
    """Keeps no tensors; scores the cache's keys."""

    reads_all_keys = True

    def scores(self, step: Step) -> Tensor:
        return log_block_maxima(step, self.block_size)


@dataclass(kw_only=True)
class Oracle(SelectingMethod):
    """Score a block by the largest attention probability that any query head of the group gives to any of its keys
    (SeerAttention-R, section 4.2).

    An upper bound on accuracy for a block size and budget, not a speed-up: it computes all scores. This probability is
    the gate's training target before normalisation. Threshold and top-p are applied after normalisation over the past
    blocks, so that they mean the same as for the gate.
    """

    name = "oracle"
    state = OracleState
    plot_style = ("#0072B2", "s")
    role = "bound"


class RandomState(SelectingState):
    """Keeps no tensors."""

    method: Random

    def scores(self, step: Step) -> Tensor:
        blocks_N = torch.arange(-(-step.max_length // self.block_size), device=step.lengths.device)
        blocks_KN = blocks_N.expand(self.spec.num_kv_heads, -1)
        bits_BKN = random_bits(blocks_KN, self.method.seed, self.spec.layer, step.lengths[:, None, None])
        return (bits_BKN >> 40).float()  # 24 bits: exact in fp32


@dataclass(kw_only=True)
class Random(SelectingMethod):
    """Read the current block and uniformly random past blocks, drawn at each step for each layer and KV head.

    The choice is a hash of (seed, layer, head, position, block): it is reproducible and independent of the batch.

    Attributes:
        seed: seed of the hash.
    """

    name = "random"
    state = RandomState
    plot_style = ("#7F7F7F", "x")
    role = "control"
    limits = ("token_budget", "budget_share")
    seed: int = 0

    def __post_init__(self) -> None:
        if self.threshold is not None or self.top_p is not None:
            raise ValueError("random has no probabilities of blocks; give token_budget or budget_share")
        super().__post_init__()
        check_count("seed", self.seed, -(2**43), 2**43)  # `random_bits` multiplies it


def mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64, with wrap-around arithmetic and logical shifts."""
    x = x * -7046029254386353131 + 1442695040888963407
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))


class RandomEvictState(BudgetedState):
    """``position [B, K, T]``, int32: position of each resident in its row."""

    method: RandomEvict

    def __init__(self, spec: LayerSpec, method: RandomEvict) -> None:
        super().__init__(spec, method)
        self.add_per_token("position", torch.int32)

    def append(self, step: Step) -> None:
        super().append(step)
        self.add_positions(step)

    def importance(self, step: Step, row: int) -> Tensor:
        position_KT = self.rows["position"][row, :, : step.ends[row]].long()
        bits_KT = random_bits(position_KT, self.method.seed, self.spec.layer, self.decoded[row])
        return (bits_KT >> 11).double()  # 53 bits: exact in fp64


@dataclass(kw_only=True)
class RandomEvict(BudgetedMethod):
    """Keep the prompt and a uniformly random subset of the generated tokens, drawn for each layer and KV head.

    Only the abstract of "Random Attention" was available, so budget, interval and law are not the authors'. New
    numbers are drawn at every eviction, so a token's chance to survive falls geometrically with age. The draw is a
    hash of (seed, layer, head, position, number of decoded tokens): it is reproducible and independent of the batch.
    Samples of the same prompt share their draws.

    Attributes:
        recent_tokens: number of newest tokens that always stay.
        seed: seed of the hash.
    """

    name = "random_evict"
    state = RandomEvictState
    plot_style = ("#A6A6A6", "1")
    chunked_prefill = True
    role = "control"
    recent_option = "recent_tokens"
    token_budget: int = 2048
    interval: int = 128
    prompt: str = "pinned"
    recent_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("seed", self.seed, -(2**43), 2**43)  # `random_bits` multiplies it


def random_bits(index_KT: Tensor, seed: int, layer: int, event: Tensor | int) -> Tensor:
    """Hash each entry together with its row (head) and ``event``: int64 ``[K, T]``, or what that and ``event``
    broadcast to.
    """
    heads = torch.arange(len(index_KT), device=index_KT.device)[:, None]
    base = mix(mix(torch.tensor(seed * 1_000_003 + layer, device=index_KT.device)) + event)
    return mix(mix(base + heads) + index_KT)
