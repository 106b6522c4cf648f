"""Retention gates: a score per token and KV head, computed from the input of the attention module.

Shape suffixes: B batch, S tokens, W width of the model, H query heads, K KV heads, G query heads per KV head
(H = G * K), E gate dimension, N base keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from seergate.config import GateConfig
from seergate.gates.geometry import ModelGeometry
from seergate.gates.scorer import INIT_STD, group_size
from seergate.ops.gate_math import rms_norm

BASE_KEYS = 16
"""Number of base keys per KV head in Fast KVzip's gate."""
KEEPS_EVERYTHING = 10.0
"""Initial bias of TRIM-KV's gate: beta is 0.99995, so training starts close to the original model."""


class RetentionGate(nn.Module, ABC):
    """Scores each token once, when it enters the KV cache; computes in float32 or wider."""

    def __init__(self, config: GateConfig, geometry: ModelGeometry) -> None:
        super().__init__()
        if geometry.hidden_size is None or geometry.hidden_size < 1:
            raise ValueError(f"hidden_size is {geometry.hidden_size}; retention gates need the width of their model")
        self.config, self.hidden_size, self.num_kv_heads = config, geometry.hidden_size, geometry.num_kv_heads
        self.group_size = group_size(geometry)

    @abstractmethod
    def forward(self, hidden_BSW: Tensor) -> Tensor:
        """Scores ``[B, K, S]`` of tokens, from the input of the model's attention module."""


def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A linear map with weights from Normal(0, 0.02) and a bias of 0, if it has one."""
    layer = nn.Linear(inputs, outputs, bias, dtype=torch.float32)
    nn.init.normal_(layer.weight, std=INIT_STD)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def wide_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer in float32 or wider."""
    wide = torch.promote_types(torch.promote_types(x.dtype, layer.weight.dtype), torch.float32)
    bias = None if layer.bias is None else layer.bias.to(wide)
    with torch.autocast(x.device.type, enabled=False):
        return nn.functional.linear(x.to(wide), layer.weight.to(wide), bias)


class FastKVzipGate(RetentionGate):
    """The gate of Fast KVzip (Kim, Han, Yun, arXiv 2601.17668), from the authors' code (``Weight`` in ``optim.py``):
    ``score = mean over the group of sigmoid(q . k / sqrt(E) + b - log(sum over n of exp(q . base_n / sqrt(E))))``.

    A token attends, with G small queries per KV head, to its own small key and to 16 learned base keys. Its score, in
    (0, 1), is the probability of its own key, averaged over the G queries. The authors add the bias twice in training
    and once in decoding; here it is added once. As in their code, the base keys of a head start at zero. They then get
    equal gradients and stay equal, so that they act as one learned key that counts 16 times.
    """

    def __init__(self, config: GateConfig, geometry: ModelGeometry) -> None:
        super().__init__(config, geometry)
        heads, width = self.num_kv_heads, config.gate_dim
        self.q_proj = linear(self.hidden_size, heads * self.group_size * width, bias=True)
        self.k_proj = linear(self.hidden_size, heads * width, bias=False)
        self.q_norm = nn.RMSNorm(width, dtype=torch.float32)
        self.k_norm = nn.RMSNorm(width, dtype=torch.float32)
        self.base_keys = nn.Parameter(torch.zeros(heads, BASE_KEYS, width, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(heads, self.group_size, dtype=torch.float32))

    def forward(self, hidden_BSW: Tensor) -> Tensor:
        heads, width = self.num_kv_heads, self.config.gate_dim
        q_BSKGE = wide_linear(self.q_proj, hidden_BSW).unflatten(2, (heads, self.group_size, width))
        k_BSKE = wide_linear(self.k_proj, hidden_BSW).unflatten(2, (heads, width))
        wide = q_BSKGE.dtype
        with torch.autocast(hidden_BSW.device.type, enabled=False):
            q_BSKGE = rms_norm(q_BSKGE, self.q_norm.weight.to(wide)) / math.sqrt(width)
            k_BSKE = rms_norm(k_BSKE, self.k_norm.weight.to(wide))
            own_BSKG = (q_BSKGE @ k_BSKE[..., None])[..., 0] + self.bias.to(wide)
            base_BSKGN = q_BSKGE @ self.base_keys.to(wide).transpose(1, 2)
            return (own_BSKG - base_BSKGN.logsumexp(-1)).sigmoid().mean(-1).transpose(1, 2)


class TrimKVGate(RetentionGate):
    """The gate of TRIM-KV (Bui et al., arXiv 2512.03324), from the authors' code (``RetentionGate``):
    ``log beta = log sigmoid(W2 silu(W1 x + b1) + b2)``.

    The score is the log of a token's retention ``beta`` in (0, 1); a token of age n has the weight ``beta ** n``. The
    authors use the model's activation; here it is always SiLU, the activation of their models (Qwen3, Llama, Phi-3).
    """

    def __init__(self, config: GateConfig, geometry: ModelGeometry) -> None:
        super().__init__(config, geometry)
        self.linear1 = linear(self.hidden_size, config.gate_dim, bias=True)
        self.linear2 = linear(config.gate_dim, self.num_kv_heads, bias=True)
        nn.init.constant_(self.linear2.bias, KEEPS_EVERYTHING)

    def forward(self, hidden_BSW: Tensor) -> Tensor:
        inner_BSE = nn.functional.silu(wide_linear(self.linear1, hidden_BSW))
        return nn.functional.logsigmoid(wide_linear(self.linear2, inner_BSE)).transpose(1, 2)
