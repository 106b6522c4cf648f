"""In every family, gates in vLLM give the tokens of transformers, and reading all blocks those of the dense model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import seergate
from seergate import DecodeConfig, GateBank, GateConfig
from tests.serving.vllm.conftest import answers, engine
from tests.support.models import prompt, tiny_model

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
    prompts = [prompt(length, seed=length) for length in LENGTHS]

    def reference_tokens(**rule: Any) -> list[list[int]]:
        with seergate.attached(model, bank, DecodeConfig(**rule)) if rule else nullcontext():
            outputs = [model.generate(ids, max_new_tokens=NEW) for ids in prompts]
        return [output[0, ids.shape[1] :].tolist() for ids, output in zip(prompts, outputs, strict=True)]

    def served(**rule: Any) -> list[list[int]]:
        gates = {"gates": str(tmp_path / "gates"), **rule}
        with engine(tmp_path / "model", gates, skip_tokenizer_init=True, max_model_len=512) as llm:
            return answers(llm, [ids[0].tolist() for ids in prompts], NEW, stop=False)

    dense, sparse = reference_tokens(), reference_tokens(token_budget=64)
    assert dense != sparse
    assert served(token_budget=64) == sparse
    assert served(threshold=1e-30) == dense  # every block, by way of the page tables
