"""TriAttention: score keys by where a head's queries usually point (arXiv 2604.04921)."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from seergate.checks import check_choice, check_counts
from seergate.durable import replacing, save_file
from seergate.errors import SeergateError
from seergate.methods.base import LayerSpec, Rotary, Step
from seergate.methods.evicting import BudgetedMethod, BudgetedState
from seergate.methods.scoring import reduced
from seergate.ops.gate_math import wide_dtype


@dataclass(frozen=True, eq=False)
class Centres:
    """Calibrated statistics of a model's queries before RoPE.

    Attributes:
        mean: per layer ``[H, D]``, the mean query of each head.
        modulus: per layer ``[H, M]``, the mean length of each head's RoPE pairs, then of the dimensions without RoPE.
        tokens: number of queries measured.
        rope: per layer ``[2, P]``, radians per position of each RoPE pair, and RoPE's scale factor on it.
        made: the conditions of the measurement; ``"model"`` is the model's fingerprint. Empty if unknown.
    """

    mean: dict[int, Tensor] = field(repr=False)
    modulus: dict[int, Tensor] = field(repr=False)
    tokens: int
    rope: dict[int, Tensor] = field(repr=False, default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Centres):
            return NotImplemented
        return (self.fingerprint, self.made) == (other.fingerprint, other.made)

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change when the centres do."""
        digest = hashlib.sha256(str(self.tokens).encode())
        for kind in (self.mean, self.modulus):
            for layer, tensor in sorted(kind.items()):
                digest.update(f"{layer} {tuple(tensor.shape)}".encode())
                digest.update(tensor.float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically. Raises `SeergateError` if ``made`` does not name the model."""
        if "model" not in self.made:
            raise SeergateError("these centres do not name their model (made); `seergate calibrate` records it")
        kinds = {"mean": self.mean, "modulus": self.modulus, "rope": self.rope}
        tensors = {
            f"layers.{layer}.{kind}": tensor.float().cpu().contiguous()
            for kind, of in kinds.items()
            for layer, tensor in of.items()
        }
        covers = {"tokens": self.tokens, "made": self.made}
        with replacing(Path(path)) as draft:
            save_file(tensors, draft, {"tri_attention": json.dumps(covers)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Centres:
        """Read what `save` wrote. Raises `SeergateError` if the file does not exist or holds something else."""
        if not Path(path).is_file():
            raise SeergateError(f"{path} is no file; TriAttention needs what seergate calibrate wrote")
        tensors: dict[str, dict[int, Tensor]] = {"mean": {}, "modulus": {}, "rope": {}}
        try:
            with safe_open(path, framework="pt") as file:
                covers = json.loads((file.metadata() or {})["tri_attention"])
                tokens, origin = int(covers["tokens"]), dict(covers["made"])
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    _, layer, kind = name.split(".")
                    tensors[kind][int(layer)] = file.get_tensor(name)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise SeergateError(
                f"{path} does not hold TriAttention's centres; seergate calibrate makes them"
            ) from error
        return cls(tensors["mean"], tensors["modulus"], tokens, tensors["rope"], origin)


class TriAttentionState(BudgetedState):
    """Keeps no tensors per token; holds the layer's rotated mean queries."""

    method: TriAttention

    def __init__(self, spec: LayerSpec, method: TriAttention) -> None:
        super().__init__(spec, method)
        centres, self.pairs = method.found, Pairs(spec.rotary, spec.head_dim, spec.device)
        mean, modulus = centres.mean.get(spec.layer), centres.modulus.get(spec.layer)
        shapes = ((spec.num_heads, spec.head_dim), (spec.num_heads, self.pairs.count))
        if mean is None or modulus is None or (tuple(mean.shape), tuple(modulus.shape)) != shapes:
            raise SeergateError(
                f"the centres have nothing for layer {spec.layer} of {spec.num_heads} heads of width {spec.head_dim}; "
                "they are another model's"
            )
        rope, now = centres.rope.get(spec.layer), self.pairs.rope.cpu()
        if rope is not None and not (rope.shape == now.shape and torch.allclose(rope.cpu(), now, rtol=1e-4)):
            raise SeergateError(
                f"the centres were measured with another RoPE than layer {spec.layer} has now (its theta or scaling); "
                "run seergate calibrate again"
            )
        wide = wide_dtype(spec.dtype)
        mean, modulus = mean.to(spec.device, wide), modulus.to(spec.device, wide)
        offsets = 2 ** torch.arange(int(math.log2(method.offsets)) + 1, device=spec.device)
        self.ahead_HOD = self.pairs.turn(mean, offsets).mean(1, keepdim=True)
        self.spread_HM = modulus - self.pairs.modulus(mean)

    def importance(self, step: Step, row: int) -> Tensor:
        method, spec = self.method, self.spec
        pinned = 0 if method.prompt == "evictable" else self.prompts[row]
        competing = slice(pinned, step.ends[row] - method.recent_tokens)
        keys_KTD = step.keys_BKCD[row, :, competing].to(self.spread_HM.dtype)
        next_position = self.total_tokens(row) + (step.offsets[row] if step.offsets else 0)
        positions = torch.full((1, self.ahead_HOD.shape[1]), next_position, device=spec.device)
        queries_HOD = spec.rotary.rotate(self.ahead_HOD[None], positions)[0]
        score_KGT = tri_scores(queries_HOD, self.spread_HM * self.pairs.scale, keys_KTD, self.pairs)
        centred = score_KGT - score_KGT.mean(-1, keepdim=True)
        standard = centred / centred.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        scores_KT = reduced(standard, method.group_reduction, 1)
        return torch.nn.functional.pad(scores_KT, (pinned, method.recent_tokens))


@dataclass(kw_only=True)
class TriAttention(BudgetedMethod):
    """Keep the tokens with the highest expected attention of a head's average query, averaged over future distances.

    The queries of a head cluster around a mean before RoPE. Rotated to future positions, this mean predicts the logits
    of future queries; ``(mean modulus - modulus of the mean) * |k|``, summed over RoPE's pairs, is added for the
    spread around it. Scores are standardised over the competing tokens, per query head.

    The prompt stays and counts in the budget, as in the authors' runner. The product of the rotated mean with a cached
    key is the paper's sum of cosines, so no key is rotated back and no position is stored. The authors' modes that
    couple the same head number of different layers, or all layers, are not implemented.

    Attributes:
        centres: the calibrated centres, or the file that they were saved to.
        recent_tokens: number of newest tokens that always stay; none in the authors' runner, 128 in their server
            plugin.
        offsets: distances into the future are 1, 2, 4, ... up to this.
        group_reduction: ``"max"`` or ``"mean"`` over the query heads of a group.
    """

    name = "tri_attention"
    state = TriAttentionState
    plot_style = ("#AA4499", "*")
    chunked_prefill = True
    calibrates: ClassVar[Mapping[str, str]] = {"centres": "seergate.eval.calibration.query_centres:CentresCalibration"}
    recent_option = "recent_tokens"
    centres: Centres | str
    token_budget: int = 2048
    interval: int = 128
    prompt: str = "pinned"
    recent_tokens: int = 0
    offsets: int = 65536
    group_reduction: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, offsets=1)
        check_choice(self, group_reduction=("max", "mean"))
        if not isinstance(self.centres, (Centres, str, os.PathLike)):
            raise ValueError(
                f"centres is a {type(self.centres).__name__}; it must be Centres or the path of their file"
            )
        if not isinstance(self.centres, Centres):
            self.centres = Centres.load(self.centres)

    @property
    def found(self) -> Centres:
        """The centres, read from their file if one was given."""
        assert isinstance(self.centres, Centres)
        return self.centres

    @property
    def calibrated_on(self) -> str | None:
        return self.found.made.get("model")

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"centres": f"{self.found.fingerprint}, from {self.found.tokens} tokens"}


def tri_scores(queries_HOD: Tensor, spread_HM: Tensor, keys_KTD: Tensor, pairs: Pairs) -> Tensor:
    """TriAttention's score before standardisation, ``[K, G, T]``: the largest product of a key with a head's queries
    (one per offset), plus the spread times the key's moduli.
    """
    heads = keys_KTD.shape[0]
    products_KGOT = queries_HOD.unflatten(0, (heads, -1)) @ keys_KTD[:, None].transpose(-1, -2)
    return products_KGOT.amax(2) + spread_HM.unflatten(0, (heads, -1)) @ pairs.modulus(keys_KTD).transpose(-1, -2)


class Pairs:
    """Pairs of dimensions that RoPE rotates together, in any layout, found by rotating unit vectors.

    Attributes:
        count: pairs and untouched dimensions together.
        scale: ``[count]``, RoPE's scale factor on each.
    """

    def __init__(self, rotary: Rotary, head_dim: int, device: torch.device) -> None:
        units = torch.eye(head_dim, dtype=torch.float32, device=device)[None, None]
        still, turned = (
            rotary.rotate(units, torch.full((1, head_dim), position, device=device))[0, 0] for position in (0, 1)
        )
        crossed = turned - torch.diag(turned.diagonal())
        self.real = (crossed.amax(1) > 0).nonzero()[:, 0]  # the unit vector turns towards its partner, not away
        self.imaginary = crossed[self.real].argmax(1)
        touched = torch.cat((self.real, self.imaginary))
        self.plain = torch.tensor([d for d in range(head_dim) if d not in touched.tolist()], device=device).long()
        self.count = len(self.real) + len(self.plain)
        self.scale = still.diagonal()[torch.cat((self.real, self.plain))]
        self.frequencies = rotary.frequencies().float().to(device) if len(self.real) else torch.zeros(0, device=device)
        sines = crossed[self.real, self.imaginary] / self.scale[: len(self.real)]
        if not torch.allclose(sines, self.frequencies.sin(), rtol=1e-2, atol=1e-4):
            raise SeergateError("this model's RoPE is laid out in a way that TriAttention does not support")

    @property
    def rope(self) -> Tensor:
        """``[2, P]``: the pairs' frequencies and scales."""
        return torch.stack((self.frequencies, self.scale[: len(self.real)]))

    def modulus(self, x: Tensor) -> Tensor:
        """Lengths of the pairs of ``x [..., D]``, then of the untouched dimensions: ``[..., count]``."""
        pairs = torch.hypot(x[..., self.real], x[..., self.imaginary])
        return torch.cat((pairs, x[..., self.plain].abs()), dim=-1)

    def turn(self, x_HD: Tensor, offsets: Tensor) -> Tensor:
        """``x`` rotated by each offset (in positions), without RoPE's scale: ``[H, O, D]``."""
        angles = offsets.double()[:, None] * self.frequencies.double()
        cos, sin = angles.cos().to(x_HD.dtype), angles.sin().to(x_HD.dtype)
        real, imaginary = x_HD[:, None, self.real], x_HD[:, None, self.imaginary]
        turned = x_HD[:, None].repeat(1, len(offsets), 1)
        turned[..., self.real] = real * cos - imaginary * sin
        turned[..., self.imaginary] = imaginary * cos + real * sin
        return turned
