"""Gates that are defined and registered here train, are saved and loaded, and decode; no other file names them."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import seergate
from seergate import GateBank, GateConfig, methods
from seergate.cli.main import main
from seergate.config import SCORERS, ScorerKind
from seergate.distill import load_train_config, run_distillation
from seergate.gates.retention import RetentionGate, linear, wide_linear
from seergate.gates.scorer import HeadwiseLinear, TokenScorer
from seergate.methods.retention import RetentionMethod, RetentionState
from seergate.ops.gate_math import projected_queries
from tests.distill.conftest import model_directory, run_config  # noqa: F401 (fixtures)
from tests.support.models import prompt


class Bare(TokenScorer):
    """Linear maps of queries and keys, without norm and without RoPE."""

    def __init__(self, gates, geometry):
        super().__init__(gates, geometry)
        self.q_proj = HeadwiseLinear(self.num_kv_heads, self.group_size, self.head_dim, gates.gate_dim)

    def queries(self, q_BHSD, positions):
        return projected_queries(q_BHSD, self.q_proj.weight)

    def key_end(self, keys_B1TE, positions):
        return keys_B1TE

    def token_scores(self, queries_BKSE, keys_B1TE):
        return self.products(queries_BKSE, keys_B1TE)


class Worth(RetentionGate):
    """A linear map of the hidden state."""

    def __init__(self, gates, geometry):
        super().__init__(gates, geometry)
        self.linear = linear(self.hidden_size, self.num_kv_heads, bias=True)

    def forward(self, hidden_BSW):
        return wide_linear(self.linear, hidden_BSW).sigmoid().transpose(1, 2)


class WorthState(RetentionState):
    def importance(self, step, row):
        return self.known(step, row)[0]


@dataclass(kw_only=True, eq=False)
class KeepWorthy(RetentionMethod):
    """Keeps what `Worth` scores best."""

    name: ClassVar[str] = "worth"
    state: ClassVar[type[RetentionState]] = WorthState


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(SCORERS, "bare", ScorerKind(Bare))
    worth = ScorerKind(Worth, "seergate.distill.losses.retention_loss:ImportanceLoss", retention=True, gate_dim=4)
    monkeypatch.setitem(SCORERS, "worth", worth)
    monkeypatch.setitem(methods.METHODS, "worth", KeepWorthy)


@pytest.mark.parametrize(("scorer", "kind", "method"), [("bare", Bare, "gate"), ("worth", Worth, "worth")])
def test_a_new_scorer_is_trained_saved_loaded_and_decoded(registered, config, scorer, kind, method, capsys):
    small = {"scorer": scorer, "max_steps": 3, "save_steps": 2, "eval_steps": 3}
    run = load_train_config(config.model, config.to_dict() | small)
    directory = run_distillation(run)
    bank = GateBank.from_pretrained(directory)
    assert bank.config.scorer == scorer and {type(gate) for gate in bank.layers.values()} == {kind}
    assert bank.training_record["config"]["scorer"] == scorer
    fresh = GateBank.for_model(seergate.load(directory, token_budget=64), bank.config)
    assert not any(torch.equal(a, b) for a, b in zip(bank.parameters(), fresh.parameters(), strict=True))

    model = seergate.load(directory, token_budget=32)
    model.generate(input_ids=prompt(120), max_new_tokens=40, min_new_tokens=40)
    stats = seergate.handle_of(model).stats()
    assert stats["method"] == method and 0 < stats["density"] < 1
    assert ("Retention gates that evict" in (directory / "README.md").read_text()) == (scorer == "worth")
    assert main(["info", str(directory)]) == 0 and f"scorer               {scorer}" in capsys.readouterr().out


def test_what_the_kind_does_not_have_is_refused(registered):
    assert GateConfig(scorer="bare").gate_dim == 128 and GateConfig(scorer="worth").gate_dim == 4
    for options, message in (
        ({"scorer": "bare", "q_pooling": "avg"}, "q_pooling is 'avg'; with scorer 'bare' it must be left out"),
        ({"scorer": "worth", "sink_blocks": 1}, "sink_blocks is 1; with scorer 'worth' it must be left out"),
        ({"scorer": "other"}, "scorer is 'other'; it must be one of .*'trim_kv', 'bare', 'worth'"),
    ):
        with pytest.raises(ValueError, match=message):
            GateConfig(**options)
