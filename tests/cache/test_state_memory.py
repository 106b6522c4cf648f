"""What the gate remembers beside keys and values is as small as the paper says (section 3.2)."""

import torch
from transformers import DynamicCache

import seergate
from seergate import GateBank, GateConfig
from seergate.cache.forward import PROMPT, ForwardContext
from seergate.decode.step import make_step
from tests.support.models import prompt, tiny_model

TOKENS = 32768


def test_compressed_keys_and_pooling_state_take_less_than_a_percent_of_keys_and_values():
    """At block 64 in bfloat16, as allocated; the handle reports it."""
    shape = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 65536}
    model = tiny_model("qwen3", dtype=torch.bfloat16, **shape)
    bank = GateBank.for_model(model, GateConfig(64)).to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with seergate.attached(model, bank, token_budget=2048) as handle:
        for binding in handle.bindings:  # a prompt's own attention over so many tokens would take minutes
            layer = binding.cache_layer(cache)
            queries, keys, values = torch.randn(3, 1, 1, TOKENS, 128, dtype=torch.bfloat16)
            queries = queries.expand(-1, 4, -1, -1)
            context = ForwardContext(PROMPT)
            context.take(queries, keys)
            layer.store(context, keys, values)
            layer.state.append(make_step(layer, context, queries, {}))
        model(input_ids=prompt(1), past_key_values=cache)
        stats = handle.stats()
    kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert stats["state_bytes"] == sum(tensor.nbytes for layer in cache.layers for tensor in layer.state.rows.values())
    assert stats["resident_bytes_peak"] == kv_bytes + stats["state_bytes"]
    assert kv_bytes >= 2 * 2 * TOKENS * 128 * 2
    compressed = sum(layer.state.rows["kg"].nbytes for layer in cache.layers)
    assert TOKENS // 64 * 128 * 2 * 2 <= compressed < 0.01 * kv_bytes
    assert stats["state_bytes"] < 0.01 * kv_bytes
