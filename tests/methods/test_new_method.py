"""The recipe of CONTRIBUTING.md for a method, followed: a class, a line in the registry, a row and a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

import seergate
from seergate import methods
from seergate.eval import MethodSpec, RunOptions, evaluate, make_task
from seergate.methods import BudgetedMethod, BudgetedState
from tests.eval import support
from tests.methods import naive
from tests.methods.evictors import EVICTORS, C, Evictor, model_of
from tests.methods.test_evicting import against_simulation
from tests.models import left_padded, prompt


@dataclass(kw_only=True)
class KeepLarge(BudgetedMethod):
    """Keeps the tokens with the longest keys."""

    name: ClassVar[str] = "keep_large"

    def new_state(self, spec):
        return KeepLargeState(spec, self)


class KeepLargeState(BudgetedState):
    def importance(self, step, row):
        return step.keys_BKCD[row, :, : step.ends[row]].norm(dim=-1)


class NaiveKeepLarge(naive.Budgeted):
    def scores(self, past, head):
        return np.sqrt((past.keys[:, head] ** 2).sum(-1))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(methods.METHODS, KeepLarge.name, KeepLarge)
    row = Evictor(lambda m: KeepLarge(token_budget=C), lambda m: NaiveKeepLarge(C), lambda n, t: C + 1)
    monkeypatch.setitem(EVICTORS, KeepLarge.name, row)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("group", [1, 5])
def test_it_is_held_to_its_simulation(group):
    against_simulation(KeepLarge.name, group, 30)


@pytest.mark.usefixtures("registered")
def test_it_decodes_by_name_and_as_an_object():
    model, batch = model_of(4), left_padded([prompt(20, 1), prompt(9, 2)])
    outputs = []
    for method, options in ((KeepLarge.name, {"token_budget": C, "interval": 4}), (KeepLarge(token_budget=C), {})):
        with seergate.attached(model, method, **options) as handle:
            outputs.append(model.generate(**batch, max_new_tokens=40))
            assert handle.stats()["method"] == KeepLarge.name
            assert handle.stats()["density"] < 1
    assert not torch.equal(*outputs), "its options reach it"


@pytest.mark.usefixtures("registered")
def test_it_is_evaluated(tmp_path):
    task, options = make_task("chain_sum", problems=2, variables=5), RunOptions(max_new_tokens=12, batch_size=2)
    spec = MethodSpec(KeepLarge.name, 8)
    assert spec.label == "keep_large-8" and spec.describe(None)["prompt"] == "evictable"
    metrics = evaluate(support.model(), support.tokenizer(), task, spec, tmp_path, options)
    assert metrics["mean_tokens"] == 12 and metrics["density"] < 1
