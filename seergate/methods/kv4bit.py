"""Quantisation of the whole cache to four bits (KIVI, Liu et al., arXiv 2402.02750).

A baseline at equal bytes for evicting methods: nothing is evicted and everything is read, but all except the newest
tokens is quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seergate import ops
from seergate.checks import check_counts
from seergate.errors import SeergateError
from seergate.methods.base import AttentionOutput, LayerSpec, Step
from seergate.methods.evicting import CompressingMethod, CompressingState, Eviction
from seergate.ops.gate_math import wide_dtype

LEVELS = 15
"""The highest code; codes are 0..15."""


class KV4BitState(CompressingState):
    """Quantised tokens in N units of ``group`` tokens each: packed codes, and minima and scales in float16.

    ``keys``, ``values [B, K, N, group, D / 2]`` uint8; ``key_range``, ``value_range [B, K, N, 2, ...]``. Row b's first
    ``total_tokens(b) - residents(b)`` tokens are quantised.
    """

    method: KV4Bit
    reads = ("keys", "values", "key_range", "value_range")

    def __init__(self, spec: LayerSpec, method: KV4Bit) -> None:
        super().__init__(spec, method)
        width = spec.head_dim
        channels = max(n for n in range(1, min(method.group, width) + 1) if width % n == 0)
        self.channels = {"key": None, "value": channels}  # of a token that share a range; None: several tokens do
        per_token = (method.group, width // channels)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(spec.batch, spec.num_kv_heads, 0, *shape, dtype=dtype, device=spec.device)

        self.tokens_per_entry = dict.fromkeys(self.reads, method.group)
        self.rows = {
            "keys": empty((method.group, -(-width // 2)), torch.uint8),
            "values": empty((method.group, -(-width // 2)), torch.uint8),
            "key_range": empty((2, width), torch.float16),
            "value_range": empty((2, *per_token), torch.float16),
        }

    def covered(self, held: Any, seen: Any) -> Any:
        return seen - held

    def stored(self, step: Step) -> list[int]:
        """Number of quantised tokens of each row."""
        return [self.total_tokens(row) - end for row, end in enumerate(step.ends)]

    def attend(self, step: Step) -> AttentionOutput | None:
        """Attention to the quantised tokens and the residents."""
        stored = self.stored(step)
        if not any(stored):
            return None
        groups = -(-max(stored) // self.method.group)
        lengths = [old + end for old, end in zip(stored, step.ends, strict=True)]
        slots = torch.arange(max(lengths), device=step.keys_BKCD.device)
        old = torch.tensor(stored, device=slots.device)[:, None]
        # concatenate each row's quantised tokens and its residents
        index = torch.where(
            slots < old, slots, (slots - old).clamp(max=step.max_length - 1) + groups * self.method.group
        )
        index = index[:, None, :, None].expand(-1, self.spec.num_kv_heads, -1, self.spec.head_dim)
        keys, values = (
            torch.cat((self._widened(name, groups), cache[:, :, : step.max_length]), dim=2).gather(2, index)
            for name, cache in (("key", step.keys_BKCD), ("value", step.values_BKCD))
        )
        ragged = torch.tensor(lengths, device=slots.device) if len(set(lengths)) > 1 else None
        return AttentionOutput(
            ops.dense_decode(step.q_BHSD[:, :, 0], keys, values, ragged, **step.softmax_options), lengths
        )

    def _widened(self, kind: str, groups: int) -> Tensor:
        """The dequantised keys or values ``[B, K, groups * group, D]`` in the cache's dtype."""
        codes, span = self.rows[f"{kind}s"][:, :, :groups], self.rows[f"{kind}_range"][:, :, :groups]
        wide = widened(unpacked(codes, self.spec.head_dim), span, self.channels[kind])
        return wide.to(self.spec.dtype).flatten(2, 3)

    def max_resident(self) -> int:
        return self.method.residual + self.method.group

    def select_kept(self, step: Step) -> Eviction | None:
        """Move whole groups of tokens that are older than ``residual`` from the cache into the state."""
        size, ends = self.method.group, step.ends
        old = {row: (end - self.method.residual) // size * size for row, end in enumerate(ends)}
        old = {row: count for row, count in old.items() if count > 0}
        if not old:
            return None
        stored = self.stored(step)
        for row, count in old.items():
            first, past = stored[row] // size, (stored[row] + count) // size
            for kind, cache in (("key", step.keys_BKCD), ("value", step.values_BKCD)):
                groups = cache[row : row + 1, :, :count].unflatten(2, (-1, size))
                codes, span = rounded(groups, self.channels[kind])
                for name, part in ((f"{kind}s", packed_pairs(codes)), (f"{kind}_range", span)):
                    self.grown(name, past)[row, :, first:past] = part[0]
        lengths = [ends[row] - count for row, count in old.items()]
        starts = torch.tensor(list(old.values()), device=step.lengths.device)[:, None]
        last = torch.tensor([ends[row] - 1 for row in old], device=step.lengths.device)[:, None]
        index = torch.minimum(starts + torch.arange(max(lengths), device=step.lengths.device), last)
        return Eviction(list(old), index[:, None].expand(-1, self.spec.num_kv_heads, -1), lengths)


@dataclass(kw_only=True)
class KV4Bit(CompressingMethod):
    """Keep the newest tokens unquantised and all others in 4 bits per number, with a scale and a minimum per group.

    As in KIVI, keys are quantised per channel over ``group`` consecutive tokens, because some key channels are much
    larger than the rest, and values per token over ``group`` channels. A group is quantised once, when all of its
    tokens are old enough; a prompt is attended to before it is quantised. (The quantised cache of transformers
    quantises the whole cache again every 128 tokens, and has one length for all rows.)

    For the cache a quantised token is an evicted one: it is in this method's state. Attention dequantises the tokens
    of one layer at a time; a fused kernel would do that in registers. Measured against a cache of 32-bit numbers, it
    saves more than it would of the usual 16 bits.

    Attributes:
        group: numbers that share a scale and a minimum in float16: at 32, 4 bits per number become 5.
        residual: minimum number of newest tokens that are not quantised; 128 in KIVI.
    """

    name = "kv4bit"
    state = KV4BitState
    plot_style = ("#661100", "X")
    chunked_prefill = True
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        check_counts(self, group=2, residual=1)

    @property
    def nominal(self) -> str:
        return "all, in 4 bits"


def _grouped(x: Tensor, channels: int | None) -> tuple[Tensor, int]:
    """``x [.., group, D]``, channels split into groups if ``channels`` is given, and the axis that shares a range."""
    return (x, -2) if channels is None else (x.unflatten(-1, (-1, channels)), -1)


def rounded(x_BKNGD: Tensor, channels: int | None) -> tuple[Tensor, Tensor]:
    """Quantise groups of tokens to 16 levels between their minimum and their maximum.

    Args:
        x_BKNGD: ``[B, K, N, group, D]``.
        channels: number of adjacent channels of a token that share a range; ``None`` if all tokens of a channel do.

    Returns:
        Codes 0..15, uint8 ``[B, K, N, group, D]``, and minima and scales, float16 ``[B, K, N, 2, ..]``. Codes are
        chosen for the float16 minimum and scale, so that these add no error of their own.

    Raises:
        SeergateError: on a CPU, if a minimum or a scale is out of float16's range; on other devices logits become NaN.
    """
    x, axis = _grouped(x_BKNGD.to(wide_dtype(x_BKNGD.dtype)), channels)
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    low16, scale16 = low.half(), ((high - low.half().to(x)).clamp(min=0) / LEVELS).half()
    scale = scale16.to(x)
    codes = ((x - low16.to(x)) / torch.where(scale > 0, scale, 1)).round().clamp(0, LEVELS).to(torch.uint8)
    span = torch.stack((low16, scale16), dim=3).squeeze(axis)
    if span.is_cpu and not span.isfinite().all():  # the host would wait for another device
        raise SeergateError(
            f"keys or values of up to {float(x.abs().max()):.3g} are not finite or not in the range of float16, "
            "in which kv4bit stores minima and scales; use another method for this model"
        )
    return codes.reshape(x_BKNGD.shape), span


def widened(codes_BKNGD: Tensor, span: Tensor, channels: int | None) -> Tensor:
    """Inverse of `rounded`, in float32."""
    codes, axis = _grouped(codes_BKNGD.float(), channels)
    low, scale = (part.float().unsqueeze(axis) for part in span.unbind(3))
    return torch.addcmul(low, codes, scale).reshape(codes_BKNGD.shape)


def packed_pairs(codes: Tensor) -> Tensor:
    """Pack two codes per byte along the last axis; an odd width is padded."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpacked(pairs: Tensor, width: int) -> Tensor:
    """Inverse of `packed_pairs`."""
    return torch.stack((pairs & LEVELS, pairs >> 4), dim=-1).flatten(-2)[..., :width]
