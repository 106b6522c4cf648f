"""Gates of a tiny model, changes of their files, and what tests ask of saved gates."""

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from seergate import GateBank, GateConfig
from tests.support import evaluation
from tests.support.models import tiny_model

CONFIG, WEIGHTS = "gate_config.json", "gate_model.safetensors"
GONE = object()
"""In `set_entries`: the entry is removed."""


@pytest.fixture
def bank(tmp_path: Path) -> GateBank:
    """Gates that are not saved yet; their base model and its tokenizer are in `base`."""
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    evaluation.tokenizer().save_pretrained(tmp_path / "base")
    return GateBank.for_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), GateConfig(8, 16))


def set_entries(file: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Set entries of a JSON file, such as ``{"model.layers": [0]}``; returns what the file then holds."""
    record = json.loads(file.read_text())
    for name, value in changes.items():
        *outer, last = name.split(".")
        entries = reduce(dict.__getitem__, outer, record)
        entries.pop(last, None)
        entries.update({} if value is GONE else {last: value})
    file.write_text(json.dumps(record))
    return record


def same_tensors(a: GateBank, b: GateBank) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    equal = (ours[k].dtype == theirs[k].dtype and torch.equal(ours[k], theirs[k]) for k in ours)
    return ours.keys() == theirs.keys() and all(equal)


def same(a: GateBank, b: GateBank) -> bool:
    """Whether gates have the same architecture and the same tensors, for the same model."""
    return a.config == b.config and not a.geometry.mismatches(b.geometry) and same_tensors(a, b)


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def example(card: str) -> str:
    """The Python example of a model card."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    return code


def run_example(card: str) -> dict[str, Any]:
    """Run it; returns the names that it defines."""
    names: dict[str, Any] = {}
    exec(compile(example(card), "README.md", "exec"), names)
    return names
