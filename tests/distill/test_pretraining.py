"""The script that pretrains a model like the tiny reasoner."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from seergate.eval.tasks.chain_sum import make_problem
from tests.support.running import ROOT, run_script


def test_a_lookup_finds_the_token_that_is_said_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for digits that are given, which are said three tokens later."""
    monkeypatch.syspath_prepend(ROOT / "train/recipes/tiny_reasoner")
    from regularizers import Places
    from tokenizer import build_tokenizer

    tokenizer, rng = build_tokenizer(), random.Random(3)
    problems = [make_problem(7, rng) for _ in range(4)]
    rows = [tokenizer(tokenizer.apply_chat_template(p.messages, tokenize=False)).input_ids for p in problems]
    places, ids = Places(tokenizer), torch.tensor(rows)
    places.watch(ids)
    which = tokenizer.convert_tokens_to_ids("which")
    lookups = places.lookups()
    assert [len(row) for row, _, _ in lookups] == [4 * n for n in (7, 4, 7, 8)]
    for row, asks, answers in lookups:
        targets = torch.where(ids[row, asks + 1] == which, ids[row, (asks + 4) % ids.shape[1]], ids[row, asks + 1])
        assert torch.equal(targets, ids[row, answers]) and (answers < asks).all()


@pytest.mark.soak
def test_a_short_pretraining_leaves_a_model(tmp_path: Path) -> None:
    short = ("--minutes", "0.1", "--threads", "1", "--tokens", "2048")
    done = run_script("train/recipes/tiny_reasoner/pretrain.py", "--out", str(tmp_path), *short)
    assert done.returncode == 0, done.stderr
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    shipped = AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints/tiny-reasoner")
    assert len(tokenizer) == model.config.vocab_size
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in shipped.named_parameters()}
