"""Tiny random models of every architecture family, made from configs: no download, about a second each.

    from tests.support.models import FAMILIES, tiny_model, left_padded
    model = tiny_model("qwen3")

Two layers, hidden size 64 (Llama 96), 2 to 4 query heads per KV head. The weights are drawn ten times wider than
usual: attention of a usual random model is flat, so that leaving out half of the keys would change next to nothing,
and a test that selects the wrong blocks would pass.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from seergate import GateBank, GateConfig
from seergate.gates.geometry import ModelGeometry
from seergate.serving.common.rope import Unrotation
from seergate.serving.common.scoring import GateScores

VOCABULARY = 128
PAD = 0
"""Token id of padding; no prompt made here contains it."""

_COMMON: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096},
    **{"initializer_range": 0.2, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None},
}
_GROUP_OF_4: dict[str, Any] = {"num_attention_heads": 8}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}

# model_type -> what differs from _COMMON. Families with sliding windows get one sliding and one full layer.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": _MOE | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen2": _GROUP_OF_4,
    "llama": {"hidden_size": 96, "num_attention_heads": 6},
    "mistral": {"sliding_window": None},
    "ministral3": {},
    "phi3": {"sliding_window": None},
    "gemma": {},
    "gemma2": _SLIDING | {"query_pre_attn_scalar": 16},
    "gemma3_text": _SLIDING | {"query_pre_attn_scalar": 16},
    "gpt_oss": _GROUP_OF_4 | _SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "olmo3": _SLIDING,
    "glm4": {},
    "smollm3": {"no_rope_layers": [1, 1], "layer_types": ["full_attention", "full_attention"]},
    "granite": {},
    "cohere2": _SLIDING,
    "seed_oss": {},
    "exaone4": _SLIDING,
    "ernie4_5": {},
    "qwen3_next": _MOE | _LINEAR | {"shared_expert_intermediate_size": 32},
    "hunyuan_v1_dense": {},
    "qwen2_moe": _MOE | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    # its full layers have wider and fewer KV heads than its sliding ones, and keys as values
    "gemma4_text": _SLIDING
    | {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY},
    "qwen3_5_text": _LINEAR,
}


def tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa", **config: Any
) -> PreTrainedModel:
    """A random, frozen model in eval mode; equal arguments give equal weights.

    Args:
        family: a key of `FAMILIES` (a `model_type` of transformers).
        seed: of the weights.
        dtype: of the weights.
        attn_implementation: what computes attention where no gate is attached. GPT-OSS has sinks and Gemma2 caps its
            scores, which SDPA cannot do: transformers refuses, so they get "eager" instead of "sdpa".
        **config: any field of the family's config, on top of the tiny ones.
    """
    if family in ("gpt_oss", "gemma2") and attn_implementation == "sdpa":
        attn_implementation = "eager"
    settings = _COMMON | FAMILIES[family] | config
    # Drawn in float32 whatever the dtype, without disturbing the caller's random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **settings), attn_implementation=attn_implementation
        )
    model.generation_config.do_sample = False
    return model.eval().requires_grad_(False).to(dtype)


def geometry(heads: int, kv_heads: int, head_dim: int, inv_freq: Any = (), attention_scaling: float = 1.0) -> Any:
    """The `ModelGeometry` of a model with one layer, for a gate of its own."""
    frequencies = tuple(inv_freq.tolist() if isinstance(inv_freq, torch.Tensor) else inv_freq)
    return ModelGeometry("qwen3", heads, kv_heads, head_dim, (0,), frequencies, attention_scaling)


def gates(model: PreTrainedModel, block_size: int = 8, gate_dim: int = 16, **options: Any) -> GateBank:
    """Gates with random weights, wide enough that selections differ from one another."""
    bank = GateBank.for_model(model, GateConfig(block_size, gate_dim, **options))
    for parameter in bank.parameters():
        parameter.data.normal_()
    return bank


def gate_scores(gate: Any, rotary: Any) -> GateScores:
    """The scores of a gate inside a server, in a layer with vLLM's table of angles ``rotary`` or without RoPE."""
    return GateScores(None, gate.geometry.head_dim, torch.float32, 1.0, 0.0, gate, Unrotation(rotary))


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids ``[1, length]``, without special tokens."""
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A left-padded batch ``[B, L]`` of `prompt` tensors, as keyword arguments of ``model(...)`` and ``generate``."""
    width = max(p.shape[1] for p in prompts)
    ids = torch.full((len(prompts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, p in enumerate(prompts):
        ids[row, width - p.shape[1] :] = p[0]
        mask[row, width - p.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}
