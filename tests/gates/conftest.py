"""Gates of a tiny model, changes of their files, and what tests ask of saved gates."""

import json
import re
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from seergate import GateBank, GateConfig
from seergate.models import families
from seergate.models.packed_forward import TeacherCall, intercepted_attention
from seergate.ops import reference
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


def attention_calls(model: PreTrainedModel, parts: Iterable[Tensor]) -> dict[int, list[TeacherCall]]:
    """Layer -> what its attention gets in each of these sequences, in a model whose attention is the reference's."""
    hooked = dict(families.full_attention_modules(model))
    calls: dict[int, list[TeacherCall]] = {layer: [] for layer in hooked}

    def attend(call: TeacherCall) -> Tensor:
        calls[call.layer].append(call)
        q, k, v = (x[0].transpose(0, 1) for x in (call.query_BHSD, call.key_BKSD, call.value_BKSD))
        return reference.packed_attention(q, k, v, torch.tensor([0, len(q)]).int(), call.sm_scale)[0][None]

    with intercepted_attention(model, hooked, attend), torch.no_grad():
        for part in parts:
            model(input_ids=part, use_cache=False)
    return calls


def queries_and_keys(calls: list[TeacherCall], gate: Any = None) -> tuple[Tensor, Tensor]:
    """Those of all sequences, as the reference takes them: a layer's after RoPE, or a gate's of what is before it."""
    queries, keys = [], []
    for call in calls:
        q, k, at = call.query_BHSD, call.key_BKSD, torch.arange(call.query_BHSD.shape[2])
        if gate is not None:
            q, k = gate.queries(call.q_pre_BHSD, at), gate.keys(gate.pool(call.k_pre_BKSD), at[:: gate.entry_tokens])
        queries.append(q[0].transpose(0, 1))
        keys.append(k[0].transpose(0, 1))
    return torch.cat(queries), torch.cat(keys)


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
