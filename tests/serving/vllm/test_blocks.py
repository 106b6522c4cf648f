"""Blocks of one page and of several, and Quest, against the same inside transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from seergate import GateBank, GateConfig
from tests.serving.vllm.conftest import answers, engine, gated_layers
from tests.support.models import prompt, tiny_model
from tests.support.reasoner import REASONER, questions, reference_tokens

NEW = 80


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3", head_dim=64, hidden_size=128)


@pytest.fixture(scope="module")
def directory(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(path)
    return path


def gates(model: PreTrainedModel, size: int, path: Path) -> GateBank:
    """Wider than at the start of training, so that blocks differ."""
    bank = GateBank.for_model(model, GateConfig(size, gate_dim=model.config.head_dim))
    for layer, gate in bank:
        gate.k_proj.weight.data.normal_(std=0.3, generator=torch.Generator().manual_seed(layer))
    bank.save_pretrained(path)
    return bank


@pytest.mark.parametrize(("size", "page"), [(16, 16), (64, 64), (128, 128), (64, 32), (64, 16)])
def test_blocks_of_one_page_and_of_several(size: int, page: int, model: Any, directory: Path, tmp_path: Path) -> None:
    bank = gates(model, size, tmp_path)
    start = prompt(3 * 32)[0].tolist()  # with pages of 32 and blocks of 64 the shared prefix ends within a block
    prompts = [start + prompt(length, seed=length)[0].tolist() for length in (400, 401, 475)]
    expected = reference_tokens(model, prompts, NEW, bank, token_budget=2 * size)
    options = {"block_size": page, "skip_tokenizer_init": True, "max_model_len": 1024}
    with engine(directory, {"gates": str(tmp_path), "token_budget": 2 * size}, **options) as llm:
        assert [answers(llm, [ids], NEW, stop=False)[0] for ids in prompts] == expected
        assert answers(llm, prompts, NEW, stop=False) == expected


@pytest.mark.parametrize("size", [32, 16])
def test_quest(size: int) -> None:
    """Layer 1 chooses for itself, layer 3 reads what layer 2 chose."""
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32)
    rule = {"token_budget": 128, "dense_layers": (0,), "anchors": (2,)}
    prompts = questions(12, 20)
    expected = reference_tokens(model, prompts, NEW, "quest", block_size=size, **rule)
    with engine(seergate={"method": "quest", **rule}, block_size=size) as llm:
        assert sorted(gated_layers(llm)) == [1, 2, 3]
        assert answers(llm, prompts, NEW, stop=True) == expected


def test_a_chunk_of_one_token_is_still_the_prompt(model: PreTrainedModel, directory: Path, tmp_path: Path) -> None:
    """The last chunk of the prompt looks like a row that decodes; prompts are read densely."""
    bank = gates(model, 32, tmp_path)
    prompts = [prompt(7 * 64 + 1, seed=seed)[0].tolist() for seed in range(3)]
    expected = reference_tokens(model, prompts, NEW, bank, token_budget=64)
    options = {"skip_tokenizer_init": True, "max_model_len": 1024, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with engine(directory, {"gates": str(tmp_path), "token_budget": 64}, **options) as llm:
        assert [answers(llm, [ids], NEW, stop=False)[0] for ids in prompts] == expected
