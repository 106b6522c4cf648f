"""In every family, gates in vLLM give the tokens of transformers, and reading all blocks those of the dense model."""

from typing import Any

import pytest
import torch

import seergate
from tests.serving.vllm.conftest import answers, engine
from tests.serving.vllm.test_blocks import gates
from tests.support.models import prompt, tiny_model
from tests.support.reasoner import reference_tokens

SIZES = {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTHS, NEW = (40, 150, 201), 24


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2"])
def test_tokens_are_those_of_transformers(family: str, tmp_path: Any) -> None:
    model = tiny_model(family, **SIZES, **({"query_pre_attn_scalar": 32} if family == "gemma2" else {}))
    if family == "gemma2":  # its embeddings are tied and scaled up: it would repeat the last token for ever
        model.get_input_embeddings().weight.data.mul_(0.05)
    bank = gates(model, 32, tmp_path / "gates")
    model.save_pretrained(tmp_path / "model")
    prompts = [prompt(length, seed=length)[0].tolist() for length in LENGTHS]

    def served(**rule: Any) -> list[list[int]]:
        served_rule = {"gates": str(tmp_path / "gates"), **rule}
        with engine(tmp_path / "model", served_rule, skip_tokenizer_init=True, max_model_len=512) as llm:
            return answers(llm, prompts, NEW, stop=False)

    dense = reference_tokens(model, prompts, NEW, "dense")
    sparse = reference_tokens(model, prompts, NEW, bank, token_budget=64)
    assert dense != sparse
    assert served(token_budget=64) == sparse
    assert served(threshold=1e-30) == dense  # every block, by way of the page tables


def test_quests_probabilities_have_the_models_cap(tmp_path: Any) -> None:
    """Bounds of 45 to 55 become 10, so all blocks are as probable."""
    model = tiny_model("gemma2", **SIZES, query_pre_attn_scalar=32, attn_logit_softcapping=10.0)
    model.save_pretrained(tmp_path)
    rule, prompts = {"top_p": 0.5, "dense_layers": []}, [prompt(length, seed=length)[0].tolist() for length in LENGTHS]
    with seergate.attached(model, "quest", block_size=32, **rule) as handle:
        for ids in prompts:
            model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
        expected = handle.stats()["density_per_layer"]
    with engine(tmp_path, {"method": "quest", **rule}, skip_tokenizer_init=True, max_model_len=512) as llm:
        answers(llm, prompts, NEW, stop=False)
        (stats,) = llm.collective_rpc("seergate_stats")
    assert [layer["density"] for layer in stats["layers"].values()] == pytest.approx(expected)


def test_layers_in_several_groups_of_the_cache_are_each_counted_once(tmp_path: Any) -> None:
    """Three layers with full attention beside one with a window are three groups, each with a plan of its own."""
    kinds = ["full_attention"] * 3 + ["sliding_attention"]
    model = tiny_model("gemma2", **SIZES, query_pre_attn_scalar=32, num_hidden_layers=4, layer_types=kinds)
    model.save_pretrained(tmp_path)
    rule = {"method": "quest", "token_budget": 64, "dense_layers": []}
    with engine(tmp_path, rule, skip_tokenizer_init=True, max_model_len=512) as llm:
        answers(llm, [prompt(150)[0].tolist()], NEW, stop=False)
        (stats,) = llm.collective_rpc("seergate_stats")
        groups = llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_cache_config.kv_cache_groups
    assert len(groups) == 4 and sorted(stats["layers"]) == [0, 1, 2]
    lengths = [150 + step for step in range(1, NEW)]
    for layer in stats["layers"].values():  # of two KV heads
        assert layer["tokens_held"] == 2 * sum(lengths)
        assert layer["tokens_read"] == 2 * sum(32 + (length - 1) % 32 + 1 for length in lengths)
