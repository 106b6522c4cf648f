"""Eviction combined with selection: an evictor decides which tokens stay, a gate which of them are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from seergate import ops
from seergate.errors import SeergateError
from seergate.methods.base import AttentionOutput, LayerSpec, Step
from seergate.methods.evicting import EvictingMethod, EvictingState, Eviction
from seergate.methods.gate import Gate, GateState

if TYPE_CHECKING:
    from seergate.gates.bank import Gates

SUFFIX = "+gate"
"""``snapkv+gate`` is SnapKV with the gate on what remains."""
OWN_ATTENTION = "the gate's attention would replace that method's own"


class GateOnEvictorState(EvictingState):
    """States of evictor and gate, and ``position [B, K, T]``, int32: position of each resident in its row."""

    method: GateOnEvictor

    def __init__(self, spec: LayerSpec, method: GateOnEvictor) -> None:
        super().__init__(spec, method)
        evicting = method.evictor.new_state(spec)
        if not isinstance(evicting, EvictingState):
            raise SeergateError(
                f"gate selection cannot be combined with {method.evictor.name!r}: there are no gates for layer "
                f"{spec.layer}; give gates for every layer"
            )
        if type(evicting).attend is not EvictingState.attend:
            raise SeergateError(f"gate selection cannot be combined with {method.evictor.name!r}: {OWN_ATTENTION}")
        self.evicting, self.gating = evicting, method.gate.new_state(spec)
        self.parts, self.reads_all_keys = (self.evicting, self.gating), self.evicting.reads_all_keys
        self.add_per_token("position", torch.int32)

    def _whole(self, step: Step) -> Step:
        """The step with the row lengths that it would have without evictions."""
        seen = [self.total_tokens(row) for row in range(len(step.counts))]
        starts = [total - count for total, count in zip(seen, step.counts, strict=True)]
        if starts == step.starts:
            return step
        return replace(step, starts=starts, lengths=torch.tensor(seen, device=step.lengths.device).clamp(min=1))

    def append(self, step: Step) -> None:
        super().append(step)
        self.evicting.append(step)
        self.add_positions(step)
        self.gating.append(self._whole(step))

    def observe_attention(self, step: Step) -> None:
        self.evicting.observe_attention(step)

    def attend(self, step: Step) -> AttentionOutput | None:
        gate, whole, resident = self.method.gate, self._whole(step), step.max_length
        dense = self.spec.layer in gate.dense_layers or whole.max_length <= gate.covered_tokens
        if dense or not isinstance(self.gating, GateState):
            return None
        blocks_BKT = self.rows["position"][:, :, :resident].long() // gate.block_size
        real_B1T = torch.arange(resident, device=blocks_BKT.device) < step.lengths[:, None, None]
        scores_BKN = self.gating.scores(whole)
        left_BKN = torch.zeros_like(scores_BKN).scatter_add(
            2, blocks_BKT, real_B1T.to(scores_BKN).expand(blocks_BKT.shape)
        )
        picked = gate.choose(scores_BKN.masked_fill(left_BKN == 0, -torch.inf), whole.lengths)
        selection_BKN = torch.zeros(
            *scores_BKN.shape[:2], scores_BKN.shape[2] + 1, dtype=torch.bool, device=real_B1T.device
        )
        selection_BKN.scatter_(2, picked.indices.long() % selection_BKN.shape[2], True)  # padding (-1) goes last
        read_BKT = selection_BKN[..., :-1].gather(2, blocks_BKT) & real_B1T
        counts_BK = read_BKT.sum(2)
        slots = torch.arange(resident, device=read_BKT.device)
        index = torch.where(read_BKT, slots, resident).sort(-1).values[..., : int(counts_BK.max())]
        cache, indices = (step.keys_BKCD, step.values_BKCD), torch.where(index == resident, -1, index)
        output = ops.sparse_decode(step.q_BHSD[:, :, 0], *cache, indices, step.lengths, 1, **step.softmax_options)
        return AttentionOutput(output, counts_BK.double().mean(1).tolist())

    @property
    def compresses_once(self) -> bool:
        return self.evicting.compresses_once

    def max_resident(self) -> int:
        return self.evicting.max_resident()

    def select_kept(self, step: Step) -> Eviction | None:
        return self.evicting.select_kept(step)

    def on_evict(self, eviction: Eviction, capacity: int) -> None:
        super().on_evict(eviction, capacity)
        self.evicting.on_evict(eviction, capacity)


@dataclass(kw_only=True)
class GateOnEvictor(EvictingMethod):
    """Evict with any evictor, and read only residents in the blocks that the gate selects.

    The gate sees every token on arrival, so its blocks are those of the whole text, evicted tokens included, and its
    compressed keys (one vector per block) are never evicted. Blocks without residents are not selected. A partly
    evicted block counts in full in the gate's budget, which is thus an upper bound on the tokens read.

    The evictor decides as it would alone; if that takes the probabilities of all residents (H2O, TOVA, LazyEviction),
    their keys are read for it and counted.

    Attributes:
        evictor: the method that decides which tokens stay; its states must have ordinary attention.
        gate: the method that decides which of them are read.

    Raises:
        ValueError: for an evictor or a gate that cannot be combined.
    """

    name = "gate_on_evictor"
    state = GateOnEvictorState
    evictor: EvictingMethod
    gate: Gate

    def __post_init__(self) -> None:
        named = f"gate selection cannot be combined with {self.evictor.name!r}"
        if not isinstance(self.evictor, EvictingMethod):
            raise ValueError(f"{named}: it evicts nothing")
        if isinstance(self.evictor, GateOnEvictor):
            raise ValueError(f"{named}: it has a gate already; give the evictor itself")
        if getattr(self.evictor, "state", EvictingState).attend is not EvictingState.attend:
            raise ValueError(f"{named}: {OWN_ATTENTION}")
        if self.gate.compat is not None:
            raise ValueError(f'{named} with compat="published", whose code has no eviction; give compat=None')
        if self.gate.anchors:
            raise ValueError(f"{named} with anchors, as every layer evicts for itself; give gates without them")
        if self.gate.dense_below:
            raise ValueError(f"{named} with dense_below, which needs all tokens; drop it")

    @property
    def chunked_prefill(self) -> bool:  # type: ignore[override]
        return self.evictor.chunked_prefill

    @property
    def bank(self) -> Gates:
        """The gates."""
        return self.gate.bank

    @property
    def nominal(self) -> str:
        return f"{self.evictor.nominal}, reads {self.gate.nominal}"

    def describe(self) -> dict[str, Any]:
        return self.evictor.describe() | {f"gate.{key}": value for key, value in self.gate.describe().items()}

    @property
    def calibrated_on(self) -> str | None:
        return self.evictor.calibrated_on
