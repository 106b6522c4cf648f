"""Gates of a tiny model whose directory is known, and what tests ask of saved gates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from seergate import GateBank, GateConfig
from tests.support.models import tiny_model

CONFIG, WEIGHTS = "gate_config.json", "gate_model.safetensors"


@pytest.fixture
def bank(tmp_path: Path) -> GateBank:
    """Gates that are not saved yet; their base model is in `base`."""
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    return GateBank.for_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), GateConfig(8, 16))


def same_tensors(a: GateBank, b: GateBank) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    equal = (ours[k].dtype == theirs[k].dtype and torch.equal(ours[k], theirs[k]) for k in ours)
    return ours.keys() == theirs.keys() and all(equal)


def same(a: GateBank, b: GateBank) -> bool:
    """Whether gates have the same architecture and the same tensors, for the same model."""
    return a.config == b.config and not a.geometry.mismatches(b.geometry) and same_tensors(a, b)


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def run_example(card: str) -> dict[str, Any]:
    """Run the Python example of a model card; returns the names that it defines."""
    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    exec(compile(code, "README.md", "exec"), names)
    return names
