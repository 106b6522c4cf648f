"""Inputs and comparisons for the tests of the ops."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import hypothesis
import pytest
import torch
from torch import Tensor

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
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
        cls,
        lengths: list[int],
        *,
        block_size: int = 8,
        kv_heads: int = 2,
        group: int = 2,
        dim: int = 16,
        gate_dim: int = 12,
        dtype: torch.dtype = torch.float64,
        spread: float = 2.0,
        seed: int = 0,
    ) -> Pack:
        rng = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

        tokens, blocks = sum(lengths), sum(-(-length // block_size) for length in lengths)
        return cls(
            randn(tokens, kv_heads * group, dim) * spread,
            randn(tokens, kv_heads, dim),
            randn(tokens, kv_heads, gate_dim) * spread,
            randn(blocks, kv_heads, gate_dim),
            cu_seqlens(lengths),
            block_size,
        )

    def to(self, dtype: torch.dtype) -> Pack:
        tensors = (x.detach().to(dtype, copy=True) for x in (self.q, self.k, self.qg, self.kg))
        return Pack(*tensors, self.cu, self.block_size)

    def run(self, op, **options):
        """Loss, stats, and the gradients of qg and kg."""
        qg, kg = self.qg.clone().requires_grad_(), self.kg.clone().requires_grad_()
        loss, stats = op(self.q, self.k, qg, kg, self.cu, self.block_size, **options)
        loss.backward()
        return loss.detach(), stats, qg.grad, kg.grad
