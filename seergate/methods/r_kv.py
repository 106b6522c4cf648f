"""R-KV: attention of the newest queries, less redundancy among the keys (Cai et al., arXiv 2505.24133)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.methods.base import LayerSpec, LayerState, Step
from seergate.methods.checks import check_counts, check_flags, check_share
from seergate.methods.scoring import TILE, pooled
from seergate.methods.snapkv import SnapKV, SnapKVState, window_scores


@dataclass(kw_only=True)
class RKV(SnapKV):
    """SnapKV with ``importance_weight * I - (1 - importance_weight) * R`` as the score.

    I is the window's attention, max-pooled. R is high for keys that others resemble: the softmax of each key's mean
    cosine similarity to all residents, where every resident lets go of its ``spared`` newest look-alikes (similarity
    above ``similarity_threshold``), so that of equal tokens the newest survives.

    Where paper and code differ: the paper weighs I with 0.1, the code's class default is 0.07; the code spares one
    look-alike, and index 0 if there is none (here: none then; ``spare_first`` does as the code). Indices are sorted,
    which the code's first version does not do; without it neighbours and "newest" lose their meaning after the first
    eviction.

    Attributes:
        window, interval, kernel, pooling, group_reduction: see `SnapKV`.
        importance_weight: the paper's lambda.
        similarity_threshold: see above.
        spared: the paper's beta.
        spare_first: as in the authors' code, a resident that has no look-alike lets go of the very first resident,
            whose redundancy is thereby too low.
    """

    name: ClassVar[str] = "r_kv"
    window: int = 8
    group_reduction: str = "max_logits"
    importance_weight: float = 0.1
    similarity_threshold: float = 0.5
    spared: int = 1
    spare_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "importance_weight", "similarity_threshold")
        check_counts(self, spared=0)
        check_flags(self, "spare_first")

    def new_state(self, spec: LayerSpec) -> LayerState:
        """See `Method`."""
        return RKVState(spec, self)


class RKVState(SnapKVState):
    """The same as SnapKV's."""

    def __init__(self, spec: LayerSpec, method: RKV) -> None:
        super().__init__(spec, method)
        self.rkv = method

    def importance(self, step: Step, row: int) -> Tensor:
        """See `BudgetedState`."""
        held, method = step.ends[row], self.rkv
        keys = step.keys_BKCD[row : row + 1, :, :held]
        attention = window_scores(self.window.of(row), keys, step, method.group_reduction)
        attention = F.pad(pooled(attention, method.kernel, method.pooling)[0], (0, method.window))
        repeated = redundancy(keys[0], method.similarity_threshold, method.spared, method.spare_first)
        return method.importance_weight * attention - (1 - method.importance_weight) * repeated


def redundancy(keys_KTD: Tensor, threshold: float, spared: int, spare_first: bool = False) -> Tensor:
    """R-KV's redundancy of each key, ``[K, T]``, summing to 1 over T; tiled over rows of the similarity matrix."""
    keys = F.normalize(keys_KTD.to(torch.promote_types(keys_KTD.dtype, torch.float32)), dim=-1)
    total = keys.shape[1]
    sums = keys.new_zeros(keys.shape[:2])
    for first in range(0, total, TILE):
        similarity_KWT = keys[:, first : first + TILE] @ keys.transpose(-1, -2)
        similarity_KWT.diagonal(offset=first, dim1=1, dim2=2).zero_()
        alike = similarity_KWT > threshold
        newer_alike = alike.flip(-1).cumsum(-1).flip(-1)  # itself included
        let_go = alike & (newer_alike <= spared)
        if spare_first:
            let_go[..., 0] |= ~alike.any(-1)
        sums += similarity_KWT.masked_fill_(let_go, 0).sum(1)
    return (sums / total).softmax(-1)
