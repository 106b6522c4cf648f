"""The language model that ships, and how it was made: the split of its corpus, its tokenizer, its pretraining."""

from __future__ import annotations

import enum
import importlib
import inspect
import itertools
import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from seergate.distill import load_train_config
from seergate.distill.sources import open_source
from seergate.python_text import is_held_out, modules
from tests.running import ROOT, run_seergate

CHECKPOINT = ROOT / "checkpoints" / "python-text"
MODULES = 40


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few modules, and directories that are no part of the corpus."""
    library = tmp_path / "lib"
    text = (ROOT / "train/python_text/pretrain.py").read_text()[:2000]
    for name in [*(f"module{i}.py" for i in range(MODULES)), "package/test/a.py", "site-packages/b.py", "data.txt"]:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name} \N{SNOWMAN}\n{text}")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(library)}.__getitem__)
    return library


@pytest.fixture
def pretrain(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, for contexts of 64 tokens."""
    monkeypatch.syspath_prepend(str(ROOT / "train/python_text"))
    found = importlib.import_module("pretrain")
    for name, value in {"VOCABULARY": 300, "CONTEXT": 64, "LENGTHS": ((0.0, 32), (0.5, 64))}.items():
        monkeypatch.setattr(found, name, value)
    yield found
    del sys.modules["pretrain"]


def test_the_split_follows_from_names(library: Path) -> None:
    held_out, others = modules(held_out=True), modules(held_out=False)
    assert held_out and len(held_out) < len(others) and not held_out.keys() & others.keys()
    assert {*held_out, *others} == {f"module{i}.py" for i in range(MODULES)}
    (library / "module_of_a_later_python.py").write_text("")
    assert held_out.items() <= modules(held_out=True).items()


def test_gates_train_on_nothing_that_is_held_out(library: Path, tmp_path: Path) -> None:
    """As the preset has it, and with a limit; and of a library that has changed, nothing of before."""
    run = load_train_config("python-text")
    texts = [json.loads(row["json"])["text"] for row in open_source(run, tmp_path)]
    assert texts == list(modules(held_out=False).values())
    limited = open_source(replace(run, data_limit=3), tmp_path)
    assert [json.loads(row["json"])["text"] for row in limited] == texts[:3]
    next(path for path in library.glob("*.py") if not is_held_out(path.name)).write_text("# changed\n")
    changed = [json.loads(row["json"])["text"] for row in open_source(run, tmp_path)]
    assert changed == list(modules(held_out=False).values()) != texts


def test_two_steps_of_pretraining(pretrain: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read. What is saved is an ordinary directory, whose tokenizer
    gives every text back.
    """
    out, seconds = tmp_path / "model", itertools.count()
    monkeypatch.setattr(pretrain, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--out", str(out), "--minutes", "0.05", "--tokens", "64"])
    threads = torch.get_num_threads()
    pretrain.main()
    torch.set_num_threads(threads)
    *_, last = map(json.loads, (out / "pretraining.jsonl").read_text().splitlines())
    assert (last["step"], last["tokens"]) == (2, 128) and 5 < last["held_out"] < 6.5  # log(300) is 5.7
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and len(tokenizer) == model.config.vocab_size == 300
    text = "def f(x):\n\treturn 'naïve \N{SNOWMAN}'  # \\ \x00\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_shipped_model_knows_python_that_it_has_not_seen() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(CHECKPOINT), AutoTokenizer.from_pretrained(CHECKPOINT)
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir() if file.is_file()) < 8e6
    assert is_held_out("enum.py")
    ids = tokenizer(inspect.getsource(enum), return_tensors="pt", verbose=False).input_ids[:, 1000:1512]
    with torch.inference_mode():
        loss = model.float()(input_ids=ids, labels=ids).loss.item()
    *_, last = map(json.loads, (CHECKPOINT / "pretraining.jsonl").read_text().splitlines())
    assert loss < last["held_out"] + 1 < 6  # a uniform guess is at 7.6


def test_the_shipped_gates_decode() -> None:
    prompt = "import os\n\n\ndef read(path):\n    with open("
    done = run_seergate(
        *("generate", "--model", "checkpoints/python-text", "--prompt", prompt),
        *("--budget", "16", "--max-new-tokens", "40"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "a step read" in done.stderr
