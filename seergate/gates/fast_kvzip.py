"""The gate of Fast KVzip (Kim, Han, Yun, arXiv 2601.17668), from the authors' code (``Weight`` in ``optim.py``).

A token attends, with G small queries per KV head, to its own small key and to 16 learned base keys; its score is the
probability that is left to its own key, mean over the G queries. The authors add the bias twice where they train and
once where they decode; here it is added once. The base keys of a head begin as zeros, as theirs do. They get the same
gradients then and stay equal: together they are one learned key that counts 16 times.

Shape suffixes: see `seergate.gates.retention`; N base keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from seergate.config import GateConfig
from seergate.gates.retention import RetentionGate, linear, wide_linear
from seergate.gates.scorer import GateRMSNorm
from seergate.ops.gate_math import rms_norm

BASE_KEYS = 16


class FastKVzipGate(RetentionGate):
    """``score = mean over the group of sigmoid(q . k / sqrt(E) + b - log(sum over n of exp(q . base_n / sqrt(E))))``,
    in (0, 1).
    """

    def __init__(self, config: GateConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        heads, width = self.num_kv_heads, config.gate_dim
        self.q_proj = linear(self.hidden_size, heads * self.group_size * width, bias=True)
        self.k_proj = linear(self.hidden_size, heads * width, bias=False)
        self.q_norm, self.k_norm = GateRMSNorm(width), GateRMSNorm(width)
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
