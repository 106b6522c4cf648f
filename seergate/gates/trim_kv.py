"""The retention gate of TRIM-KV (Bui et al., arXiv 2512.03324), from the authors' code (``RetentionGate``).

It gives a token its retention ``beta`` in (0, 1), as a logarithm; a token of age n is worth ``beta ** n``.
The authors take the model's own activation, here it is always SiLU (that of Qwen3, Llama and Phi-3, their models).

Shape suffixes: see `seergate.gates.retention`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from seergate.config import GateConfig
from seergate.gates.retention import RetentionGate, linear, wide_linear

KEEPS_EVERYTHING = 10.0
"""The first value of the bias: beta is 0.99995, so that training begins near the plain model."""


class TrimKVGate(RetentionGate):
    """``log beta = log sigmoid(W2 silu(W1 x + b1) + b2)``."""

    def __init__(self, config: GateConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.linear1 = linear(self.hidden_size, config.gate_dim, bias=True)
        self.linear2 = linear(config.gate_dim, self.num_kv_heads, bias=True)
        nn.init.constant_(self.linear2.bias, KEEPS_EVERYTHING)

    def forward(self, hidden_BSW: Tensor) -> Tensor:
        inner_BSE = nn.functional.silu(wide_linear(self.linear1, hidden_BSW))
        return nn.functional.logsigmoid(wide_linear(self.linear2, inner_BSE)).transpose(1, 2)
