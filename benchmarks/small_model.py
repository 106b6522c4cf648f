"""The small model of the benchmarks that measure scheduling and memory, not attention."""

from __future__ import annotations

from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512


def make_model(width: int, layers: int) -> Qwen3ForCausalLM:
    """A random model of some width, so that a step costs something."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=width // 8,
        max_position_embeddings=65536,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()
