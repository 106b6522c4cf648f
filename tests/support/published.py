"""The published SeerAttention-R format and behaviour, written anew for tests: nothing of seergate is used here.

Source: what microsoft/SeerAttention does at aba03e3 in its decode gate and its decode loop.
Float64, one KV head and one block at a time.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Release:
    """One of the four published sets of gates: the shape of its base model and the size of its file.

    Attributes:
        megabytes: of its tensors (10^6 bytes), as the Hub shows it; the archive around them adds some 50 kB.
    """

    name: str
    model_type: str
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    megabytes: float
    head_dim: int = 128

    def config(self) -> dict[str, Any]:
        """Its `config.json`: the base model's, as transformers 4.51 wrote it, and the gates' entries."""
        own = {"head_dim": self.head_dim} if self.model_type == "qwen3" else {}
        return {
            **{"architectures": [f"{self.model_type.capitalize()}ForCausalLM"], "attention_dropout": 0.0},
            **{"base_model": f"org/{self.name}", "bos_token_id": 151643, "eos_token_id": 151645, "fused_norm": True},
            **{"hidden_act": "silu", "hidden_size": self.hidden, "initializer_range": 0.02},
            **{"intermediate_size": self.intermediate, "max_position_embeddings": 40960},
            **{"max_window_layers": self.layers, "model_type": self.model_type, "num_attention_heads": self.heads},
            **{"num_hidden_layers": self.layers, "num_key_value_heads": self.kv_heads, "rms_norm_eps": 1e-06},
            **{"rope_scaling": None, "rope_theta": 1000000, "seerattn_gate_block_size": 64},
            **{"seerattn_gate_hidden_size": 128, "seerattn_k_seq_pooling_type": "Kmaxminavg"},
            **{"seerattn_loss_slice_ratio": 0.5, "seerattn_q_head_pooling_type": "Qproj"},
            **{"seerattn_sparsity_method": "threshold", "seerattn_threshold": 0.0, "seerattn_use_qk_norm": True},
            **{"seerattn_use_rope": True, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True},
            **{"torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_flash_rope": False},
            **{"use_sliding_window": False, "vocab_size": self.vocabulary},
            **own,
        }

    def tensors(self, qk_norm: bool = True) -> dict[str, Tensor]:
        """Random tensors under the published names."""
        weights = {}
        group, width = self.heads // self.kv_heads, self.head_dim
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}.self_attn.attn_gate."
            weights[prefix + "attngate_linear_q.weight"] = 0.05 * torch.randn(self.kv_heads, group, width, 128)
            weights[prefix + "attngate_linear_k.weight"] = 0.05 * torch.randn(self.kv_heads, 3 * width, 128)
            if qk_norm:
                weights[prefix + "attngate_qnorm.weight"] = 1 + 0.1 * torch.randn(128)
                weights[prefix + "attngate_knorm.weight"] = 1 + 0.1 * torch.randn(128)
        return {name: tensor.bfloat16() for name, tensor in weights.items()}

    def save(self, directory: Path, qk_norm: bool = True) -> dict[str, Tensor]:
        """Write it as its authors would."""
        tensors = self.tensors(qk_norm)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.config() | {"seerattn_use_qk_norm": qk_norm}))
        torch.save(tensors, directory / "attn_gate_weights.pth")
        return tensors


RELEASES = [
    Release("Qwen3-4B", "qwen3", 36, 32, 8, 2560, 9728, 151936, 66.1),
    Release("Qwen3-8B", "qwen3", 36, 32, 8, 4096, 12288, 151936, 66.1),
    Release("Qwen3-14B", "qwen3", 40, 40, 8, 5120, 17408, 151936, 83.9),
    Release("DeepSeek-R1-Distill-Qwen-14B", "qwen2", 48, 40, 8, 5120, 13824, 152064, 100.7),
]


class PublishedGate:
    """The gate of one layer and what it remembers of one sequence; follows the published code step by step.

    Args:
        tensors: of the whole release.
        layer: which one.
        theta: RoPE base.
        block: tokens per block.
    """

    def __init__(self, tensors: dict[str, Tensor], layer: int, theta: float = 1e6, block: int = 64) -> None:
        prefix = f"model.layers.{layer}.self_attn.attn_gate."
        own = {name.removeprefix(prefix): t.double() for name, t in tensors.items() if name.startswith(prefix)}
        self.wq, self.wk = own["attngate_linear_q.weight"], own["attngate_linear_k.weight"]
        self.qnorm, self.knorm = own.get("attngate_qnorm.weight"), own.get("attngate_knorm.weight")
        self.width = self.wk.shape[-1]
        self.inv_freq = 1.0 / theta ** (torch.arange(0, self.width, 2).double() / self.width)
        self.block = block
        self.slots: list[Tensor] = []  # one [kv heads, width] per block; the open one is zero
        self.rest: list[Tensor] = []  # raw keys of the open block, [kv heads, head dim]
        self.length = 0

    def prefill(self, k: Tensor) -> None:
        """See a prompt: raw keys ``[kv heads, tokens, head dim]``."""
        self.length = k.shape[1]
        whole = self.length // self.block
        for b in range(whole):
            self.slots.append(self._compress(k[:, b * self.block : (b + 1) * self.block], b * self.block))
        self.rest = list(k[:, whole * self.block :].unbind(1))
        if self.rest:
            self.slots.append(torch.zeros_like(self.wk[:, 0]))

    def decode(self, q: Tensor, k: Tensor) -> Tensor:
        """See a token: raw ``q [heads, head dim]``, ``k [kv heads, head dim]``; the logit of every block."""
        position = self.length
        self.length += 1
        if not self.rest:
            self.slots.append(torch.zeros_like(self.wk[:, 0]))
        self.rest.append(k.double())
        if self.length % self.block == 0:  # rotated where the newest token is, not where the block begins
            self.slots[-1] = self._compress(torch.stack(self.rest, 1), position)
            self.rest = []
        grouped = q.double().unflatten(0, self.wq.shape[:2])
        query = torch.einsum("kgd,kgde->ke", grouped, self.wq)
        query = self._rotate(self._norm(query, self.qnorm), position)
        return torch.stack([(query * slot).sum(-1) for slot in self.slots], -1) / math.sqrt(self.width)

    def blocks_read(self, logits: Tensor, budget: int | None = None, threshold: float = 0.0) -> list[set[int]]:
        """The blocks that attention reads, per KV head; first and last are added, outside the budget."""
        chosen = []
        probabilities, count = logits.softmax(-1), logits.shape[-1]
        for head in range(logits.shape[0]):
            if budget is None:
                best = {b for b in range(count) if probabilities[head, b] > threshold}
            elif count <= budget // self.block:
                best = set(range(count))
            else:
                best = set(probabilities[head].topk(budget // self.block).indices.tolist())
            chosen.append(best | {0, count - 1})
        return chosen

    def _compress(self, k: Tensor, position: int) -> Tensor:
        k = k.double()
        pooled = torch.cat((k.amax(1), k.amin(1), k.mean(1)), -1)
        return self._rotate(self._norm(torch.einsum("kp,kpe->ke", pooled, self.wk), self.knorm), position)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.width // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        angle = (position * self.inv_freq).repeat(2)
        return x * angle.cos() + turned * angle.sin()
