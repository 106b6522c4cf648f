"""SnapKV, applied repeatedly during decoding (Li et al., arXiv 2404.14469), and R-KV, which subtracts the redundancy
among keys (Cai et al., arXiv 2505.24133).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.checks import check, check_choice, check_counts, check_share
from seergate.methods.base import Step
from seergate.methods.evicting import BudgetedMethod, BudgetedState
from seergate.methods.scoring import TILE, WindowState, causal_softmax, logits, pooled, reduced
from seergate.ops.gate_math import wide_dtype


class SnapKVState(WindowState, BudgetedState):
    """Scores residents by the attention of the window's queries."""

    method: SnapKV

    @property
    def compresses_once(self) -> bool:
        return self.method.compress == "prompt"

    def due(self, row: int, held: int) -> bool:
        return super().due(row, held) and not (self.compresses_once and self.decoded[row])

    def importance(self, step: Step, row: int) -> Tensor:
        resident, method = step.ends[row], self.method
        keys, q = step.keys_BKCD[row : row + 1, :, :resident], self.window(row)
        scores_KGT = window_scores(q, keys, step, by_logits=method.group_reduction == "max_logits")
        if method.pooled_by == "group":
            scores_KGT = reduced(scores_KGT, method.group_reduction, 1)[:, None]
        scores_KT = reduced(pooled(scores_KGT, method.kernel, method.pooling), method.group_reduction, 1)
        return F.pad(scores_KT, (0, method.window))  # the window always stays


@dataclass(kw_only=True)
class SnapKV(BudgetedMethod):
    """Every ``interval`` decode steps keep the last ``window`` tokens and those to which their queries attend most.

    The paper compresses a long prompt once, which would keep all of a reasoning model's long answer. So compression is
    repeated, as in R-KV's comparison (``compress``). Queries are stored after RoPE, at their original positions.

    Attributes:
        window: the observation window; 32 in the authors' code, 8 in R-KV's.
        interval: steps between evictions.
        compress: ``"repeatedly"``; or ``"prompt"``, as in the paper: only a prompt longer than the budget is
            compressed, once, and all generated tokens stay.
        kernel: odd width of the pooling over neighbouring tokens; 7 in the authors' long-context settings.
        pooling: ``"max"`` or ``"avg"``.
        group_reduction: ``"mean"`` or ``"max"`` of the probabilities of a group; or ``"max_logits"``, as in R-KV: the
            softmax over the tokens before the window is of the group's largest logits. In the authors' code each query
            head stores its own keys and keeps its own tokens.
        pooled_by: order of pooling and group reduction: ``"query_head"``, as in the authors' code: pool each query
            head's probabilities first; ``"group"``: reduce the group first. It matters only if one is a maximum and
            the other a mean.
    """

    name = "snapkv"
    state = SnapKVState
    plot_style = ("#117733", "<")
    chunked_prefill = True
    periodic = True
    recent_option = "window"
    token_budget: int = 2048
    window: int = 32
    interval: int = 128
    compress: str = "repeatedly"
    kernel: int = 7
    pooling: str = "max"
    group_reduction: str = "mean"
    pooled_by: str = "query_head"

    def __post_init__(self) -> None:
        check_counts(self, window=1, kernel=1)
        super().__post_init__()
        check("kernel", self.kernel, self.kernel % 2 == 1, "odd")
        check_choice(self, pooling=("max", "avg"), group_reduction=("mean", "max", "max_logits"))
        check_choice(self, compress=("repeatedly", "prompt"), pooled_by=("query_head", "group"))
        if self.compress == "prompt" and self.prompt != "evictable":
            raise ValueError(f"prompt is {self.prompt!r} and compress is 'prompt'; then it must be 'evictable'")


def window_scores(q_1HWD: Tensor, keys_1KTD: Tensor, step: Step, by_logits: bool) -> Tensor:
    """Attention of the window's queries to the tokens before it, mean over the queries: ``[K, G, T - W]``; with
    ``by_logits``, from a group's largest logits: ``[K, 1, T - W]``.
    """
    before = keys_1KTD.shape[2] - q_1HWD.shape[2]
    if by_logits:
        return logits(q_1HWD, keys_1KTD[:, :, :before], step)[0].amax(1, keepdim=True).softmax(-1).mean(2)
    return causal_softmax(q_1HWD, keys_1KTD, before, step)[0].mean(2)[..., :before]


class RKVState(SnapKVState):
    """State of `RKV`: SnapKV's, with redundancy in the importance."""

    method: RKV

    def clock(self, row: int) -> int:
        return super().clock(row) if self.method.trigger == "generated" else self.total_tokens(row) - 1

    def importance(self, step: Step, row: int) -> Tensor:
        method, attention = self.method, super().importance(step, row)
        keys_KTD = step.keys_BKCD[row, :, : step.ends[row]]
        repeated = redundancy(keys_KTD, method.similarity_threshold, method.spared)
        return method.importance_weight * attention - (1 - method.importance_weight) * repeated


@dataclass(kw_only=True)
class RKV(SnapKV):
    """SnapKV with ``importance_weight * I - (1 - importance_weight) * R`` as the score.

    I is the window's attention, max-pooled. R is the redundancy of a key: the softmax of its mean cosine similarity to
    all residents. The similarity of each resident to its ``spared`` newest look-alikes (above
    ``similarity_threshold``) counts as zero, so that of equal tokens the newest survives.

    Paper and code differ: the paper weighs I with 0.1, the code's class default is 0.07. The code spares one
    look-alike, or index 0 if there is none; here none is spared then. Indices are sorted here, but not in the code's
    first version, where neighbours and "newest" lose their meaning after the first eviction. The paper evicts after
    every ``interval`` generated tokens, the code by the length of the whole text (``trigger``).

    Attributes:
        window, interval, kernel, pooling, group_reduction, pooled_by: see `SnapKV`.
        trigger: ``"generated"``: evict at every multiple of ``interval`` generated tokens; ``"length"``, as in the
            authors' code: one token after every multiple of ``interval`` tokens, the prompt's included.
        importance_weight: weight of the attention against redundancy, the paper's lambda.
        similarity_threshold: cosine similarity above which two keys are look-alikes.
        spared: number of a key's newest look-alikes whose similarity counts as zero, the paper's beta.
    """

    name = "r_kv"
    state = RKVState
    plot_style = ("#332288", ">")
    window: int = 8
    group_reduction: str = "max_logits"
    importance_weight: float = 0.1
    similarity_threshold: float = 0.5
    spared: int = 1
    trigger: str = "generated"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "importance_weight", "similarity_threshold")
        check_counts(self, spared=0)
        check_choice(self, trigger=("generated", "length"))


def redundancy(keys_KTD: Tensor, threshold: float, spared: int) -> Tensor:
    """R-KV's redundancy of each key, ``[K, T]``, summing to 1 over T; tiled over rows of the similarity matrix."""
    keys = F.normalize(keys_KTD.to(wide_dtype(keys_KTD.dtype)), dim=-1)
    total = keys.shape[1]
    sums, places = keys.new_zeros(keys.shape[:2]), torch.arange(1, total + 1, dtype=torch.int32, device=keys.device)
    for first in range(0, total, TILE):
        similarity_KWT = keys[:, first : first + TILE] @ keys.transpose(-1, -2)
        similarity_KWT.diagonal(offset=first, dim1=1, dim2=2).zero_()
        for _ in range(min(spared, total)):
            place, newest = ((similarity_KWT > threshold) * places).max(-1, keepdim=True)  # place 0 if none is alike
            kept = similarity_KWT.gather(-1, newest).masked_fill_(place > 0, 0)
            similarity_KWT.scatter_(-1, newest, kept)
        sums += similarity_KWT.sum(1)
    return (sums / total).softmax(-1)
