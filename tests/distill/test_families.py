"""`seergate train` with tiny random models, in `make soak` of every family: two steps, and gates that load again."""

import json
from pathlib import Path

import pytest
import torch

from seergate import GateBank
from seergate.distill import load_train_config
from seergate.distill.estimate import make_plan
from tests.distill.conftest import PLAIN, byte_tokenizer
from tests.support.evaluation import mostly_soak
from tests.support.models import FAMILIES, tiny_model
from tests.support.running import output_of

LENGTHS = (60, 40, 70, 30, 90)
"""Tokens of the samples, one per byte. As many as fit share a pack of 96."""
HYBRIDS = ("qwen3_next", "qwen3_5_text")
KINDS = ("qwen3", "qwen3_moe", "phi3", "olmo2", "cohere2", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss")
"""Norms, experts, fused projections, layers without RoPE, caps, windows, sinks; and a hybrid."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples, and the cache of their tokens: all models here have the same tokenizer."""
    directory = tmp_path_factory.mktemp("shared")
    rows = [{"text": "".join(chr(97 + (i * i + n) % 26) for i in range(n))} for n in LENGTHS]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def save(family: str, directory: Path) -> Path:
    tokenizer = byte_tokenizer(PLAIN)
    tiny_model(family, vocab_size=len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", mostly_soak(sorted(FAMILIES), *KINDS, HYBRIDS[0]))
def test_a_family_trains_from_the_command_line(family: str, shared: Path, tmp_path: Path) -> None:
    options = {"model": save(family, tmp_path / "model"), "output_dir": tmp_path / "run", "max_steps": 2}
    options |= {"data": shared / "rows.jsonl", "token_cache": shared / "tokens", "packs_per_step": 2}
    options |= {"max_length": 96, "block_size": 8, "recall_budgets": 16}
    out = output_of("train", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()))
    assert "step 2/2" in out
    packs = json.loads((tmp_path / "run" / "data.json").read_text())["packs"]
    alone = family in HYBRIDS
    assert packs == (len(LENGTHS) if alone else 4)
    assert ("a pack holds one sample: the linear_attention layers of this " in out) == alone
    bank = GateBank.from_pretrained(tmp_path / "run")
    assert bank.geometry.model_type == family and len(bank) >= 1
    assert all(torch.isfinite(parameter).all() for parameter in bank.parameters())
    bank.distill_loss(tiny_model(family, vocab_size=300), input_ids=torch.arange(60)[None])


def test_the_plan_says_that_a_pack_holds_one_sample(tmp_path: Path) -> None:
    options = {"recipe": "paper", "max_length": 1024, "block_size": 8}
    places = [str(save(family, tmp_path / family)) for family in ("qwen3", "qwen3_next")]
    packed, alone = (make_plan(load_train_config(place, options), device="cpu").text() for place in places)
    assert "a pack holds one sample: the linear_attention layers of this qwen3_next model carry" in alone
    assert "one sample" not in packed
