"""In every family, gates in vLLM give the tokens of transformers, and reading all blocks those of the dense model."""

from typing import Any

import pytest
import torch

from seergate import GateBank, GateConfig
from tests.serving.vllm.conftest import answers, engine
from tests.support.models import prompt, tiny_model
from tests.support.reasoner import reference_tokens

SIZES = {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mistral": {},
    "gemma2": {"query_pre_attn_scalar": 32},
}
LENGTHS, NEW = (40, 150, 201), 24


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Any) -> None:
    model = tiny_model(family, **{**SIZES, **FAMILIES[family]})
    if family == "gemma2":  # its embeddings are tied and scaled up: it would repeat the last token for ever
        model.get_input_embeddings().weight.data.mul_(0.05)
    bank = GateBank.for_model(model, GateConfig(block_size=32, gate_dim=32))
    for layer, gate in bank:  # wider than at the start of training, so that blocks differ
        gate.k_proj.weight.data.normal_(std=0.3, generator=torch.Generator().manual_seed(layer))
    model.save_pretrained(tmp_path / "model")
    bank.save_pretrained(tmp_path / "gates")
    prompts = [prompt(length, seed=length)[0].tolist() for length in LENGTHS]

    def served(**rule: Any) -> list[list[int]]:
        gates = {"gates": str(tmp_path / "gates"), **rule}
        with engine(tmp_path / "model", gates, skip_tokenizer_init=True, max_model_len=512) as llm:
            return answers(llm, prompts, NEW, stop=False)

    dense = reference_tokens(model, prompts, NEW, "dense")
    sparse = reference_tokens(model, prompts, NEW, bank, token_budget=64)
    assert dense != sparse
    assert served(token_budget=64) == sparse
    assert served(threshold=1e-30) == dense  # every block, by way of the page tables
