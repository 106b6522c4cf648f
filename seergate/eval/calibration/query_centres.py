"""Calibration of TriAttention: the mean query of each head (arXiv 2604.04921)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seergate.errors import SeergateError
from seergate.eval.calibration.calibrator import Calibration, Prompts, answers
from seergate.inference_mode import without_gradients
from seergate.methods.base import LayerSpec, LayerState, Method, Step
from seergate.methods.tri_attention import Centres, Pairs
from seergate.models.attach import attached


class QueryCentresState(LayerState):
    """Adds the new queries to its method's sums."""

    method: QueryCentres

    def __init__(self, spec: LayerSpec, method: QueryCentres) -> None:
        super().__init__(spec, method)
        self.pairs = Pairs(spec.rotary, spec.head_dim, spec.device)
        method.rope[spec.layer] = self.pairs.rope

    @without_gradients
    def append(self, step: Step) -> None:
        q_HSD = torch.cat([step.q_pre_BHSD[row, :, :count] for row, count in enumerate(step.counts)], dim=1).double()
        total, moduli, count = self.method.sums.get(self.spec.layer, (0, 0, 0))
        self.method.sums[self.spec.layer] = (
            total + q_HSD.sum(1),
            moduli + self.pairs.modulus(q_HSD).sum(1),
            count + q_HSD.shape[1],
        )


@dataclass(kw_only=True, eq=False)
class QueryCentres(Method):
    """Calibration of `TriAttention`: dense attention that sums up the queries. Not a method to decode with.

    Attributes:
        sums: per layer, the sum of queries, the sum of moduli, and their number; in float64.
        rope: see `Centres`.
    """

    name = "query_centres"
    state = QueryCentresState
    sums: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict, init=False, repr=False)
    rope: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def centres(self) -> Centres:
        """Return the means so far. Raises `SeergateError` if no query was recorded."""
        if not self.sums:
            raise SeergateError("no query was recorded, so there is nothing to average")
        mean = {layer: (total / count).float() for layer, (total, _, count) in self.sums.items()}
        modulus = {layer: (total / count).float() for layer, (_, total, count) in self.sums.items()}
        return Centres(mean, modulus, min(count for _, _, count in self.sums.values()), dict(self.rope))


@dataclass(frozen=True)
class CentresCalibration(Calibration):
    """Calibrates TriAttention's centres: the mean queries of a model over prompts, about 32 thousand tokens in all in
    the authors' runs, and the beginnings of its answers.
    """

    @property
    def file_name(self) -> str:
        return "tri_attention.safetensors"

    def made(self, path: Path) -> dict[str, Any] | None:
        try:
            return Centres.load(path).made
        except SeergateError:
            return None

    @torch.inference_mode()
    def measure(
        self, model: PreTrainedModel, prompts: Prompts, path: Path, about: Mapping[str, Any], **how: Any
    ) -> list[str]:
        recorder = QueryCentres()
        with attached(model, recorder):
            for _ in answers(model, prompts, **how):
                pass
        centres = replace(recorder.centres(), made=about["made"])
        centres.save(path)
        return [f"centres of {len(centres.mean)} layers from {centres.tokens} tokens: {path}"]
