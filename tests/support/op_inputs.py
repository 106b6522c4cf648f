"""Inputs and comparisons for the tests of the ops."""

import itertools
import math
import os
from dataclasses import dataclass

import hypothesis
import pytest
import torch
from torch import Tensor

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
WIDE = torch.float32 if INTERPRETING else torch.float64
"""Default dtype of inputs; a kernel leaves float64 to torch."""
EXACT = 2e-6 if INTERPRETING else 1e-5
"""Relative error of kernels on fp32. The interpreter's products are exact; a GPU makes each of three in TF32, and its
exponentials are approximate."""


def grid(quick, *axes):
    """Every combination of the axes, for `parametrize`; those not among the ``quick`` ones run in a soak only."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.soak) for case in itertools.product(*axes)]


def examples(count):
    """So many of hypothesis' examples; in Triton's interpreter, where an op takes a hundred times as long, a sixth."""
    return hypothesis.settings(max_examples=count // 6 if INTERPRETING else count)


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over norm of ``want``, in float64."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def decode_inputs(batch=2, kv_heads=2, group=2, capacity=48, dim=16, value_dim=None, dtype=WIDE):
    """Random queries ``[B, H, d]`` and a cache of keys and values ``[B, Hkv, S, d]``."""
    q = torch.randn(batch, kv_heads * group, dim).to(dtype) * 2
    k = torch.randn(batch, kv_heads, capacity, dim).to(dtype)
    v = torch.randn(batch, kv_heads, capacity, value_dim or dim).to(dtype)
    return q, k, v


def poison(x: Tensor, lengths: Tensor, indices: Tensor | None = None, block_size: int = 1) -> Tensor:
    """NaN wherever ``x [B, Hkv, S, d]`` must not be read."""
    x, position = x.clone(), torch.arange(x.shape[2])
    read = (position < lengths[:, None, None]).expand(x.shape[:3])
    if indices is not None:
        read = read & (position // block_size == indices[..., None]).any(2)
    x[~read] = math.nan
    return x


def in_pages(x: Tensor, page: int, table: Tensor, pages: int) -> Tensor:
    """``x [B, Hkv, S, d]`` in pages ``[pages, Hkv, page, d]``, NaN elsewhere."""
    out = x.new_full((pages, x.shape[1], page, x.shape[3]), math.nan)
    padded = torch.nn.functional.pad(x, (0, 0, 0, table.shape[1] * page - x.shape[2]), value=math.nan)
    out[table.long()] = padded.unflatten(2, (-1, page)).transpose(1, 2)
    return out


LAYOUTS = ("contiguous", "heads last", "slice of a buffer", "odd strides")


def in_layout(x: Tensor, layout: str) -> Tensor:
    """The same numbers in one of the `LAYOUTS`, with NaN between them."""
    batch, heads, capacity, dim = x.shape
    if layout == "heads last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slice of a buffer":
        buffer = x.new_full((batch + 1, heads + 1, capacity + 9, dim), math.nan)
        buffer[1:, :-1, 3 : 3 + capacity] = x
        return buffer[1:, :-1, 3 : 3 + capacity]
    if layout == "odd strides":
        return torch.stack((x, torch.full_like(x, math.nan)), dim=-1)[..., 0]
    return x


@dataclass
class Pack:
    """A pack of segments with random teacher and gate vectors."""

    q: Tensor
    k: Tensor
    qg: Tensor
    kg: Tensor
    cu: Tensor
    block_size: int

    @classmethod
    def random(
        cls, lengths, block_size=8, kv_heads=2, group=2, dim=16, gate_dim=12, dtype=torch.float64, spread=2.0, seed=0
    ):
        rng = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

        tokens, blocks = sum(lengths), sum(-(-length // block_size) for length in lengths)
        q, k = randn(tokens, kv_heads * group, dim) * spread, randn(tokens, kv_heads, dim)
        qg, kg = randn(tokens, kv_heads, gate_dim) * spread, randn(blocks, kv_heads, gate_dim)
        return cls(q, k, qg, kg, cu_seqlens(lengths), block_size)

    def to(self, dtype: torch.dtype) -> "Pack":
        tensors = (x.detach().to(dtype, copy=True) for x in (self.q, self.k, self.qg, self.kg))
        return Pack(*tensors, self.cu, self.block_size)

    def run(self, op, **options):
        """Loss, stats, and the gradients of qg and kg."""
        qg, kg = self.qg.clone().requires_grad_(), self.kg.clone().requires_grad_()
        loss, stats = op(self.q, self.k, qg, kg, self.cu, self.block_size, **options)
        loss.backward()
        return loss.detach(), stats, qg.grad, kg.grad
