"""Options of servers, read and compared with the model by all plugins: wrong ones are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from seergate import GateBank, GateConfig, SeergateError
from seergate.methods import Gate
from seergate.serving.common.checks import check_model
from seergate.serving.common.settings import Settings
from tests.support.models import tiny_model
from tests.support.reasoner import REASONER

GATES = f"{REASONER}/gates-32"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("gates", "seergate is 'gates'; it must be an object"),
        ({"gate": GATES}, "no key 'gate' under seergate; did you mean 'gates'?"),
        ({"gates": GATES, "lossless": True}, "no key 'lossless' under seergate; there are gates, revision"),
        ({"gates": GATES, "method": "h2o"}, "the method 'h2o' does not run inside a server; it must be one of"),
        ({"method": "oracle"}, "the method 'oracle' does not run inside a server; it must be one of gate, quest"),
        ({}, "seergate.gates is None; it must be a directory or a Hub repository"),
        ({"method": "quest", "gates": GATES}, "must be left out with 'quest'"),
        ({"method": "quest", "revision": "main"}, "seergate.revision is 'main' without gates"),
        ({"gates": GATES, "dense_layers": 1}, "seergate.dense_layers is 1; it must be a list of layers"),
        ({"gates": GATES, "anchors": 1}, "seergate.anchors is 1; it must be a list of layers"),
    ],
)
def test_settings_that_make_no_sense(values: Any, sentence: str) -> None:
    with pytest.raises(SeergateError, match=sentence):
        Settings.read({"seergate": values})


@pytest.mark.parametrize("key", ["Seergate", "SEERGATE", "seer_gate", "seergates", "sergate", "seergate "])
def test_a_key_that_is_nearly_ours_is_refused(key: str) -> None:
    with pytest.raises(SeergateError, match=f"the key of seergate's options is '{key}'; it must be 'seergate'"):
        Settings.read({"other": 1, key: {"gates": GATES}})


@pytest.mark.parametrize("additional_config", [None, {}, {"other": 1}])
def test_no_key_no_settings(additional_config: Any) -> None:
    assert Settings.read(additional_config) is None


@pytest.mark.parametrize("rope", [{"rope_theta": 5e3}, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}])
def test_gates_of_a_model_with_another_rope(rope: dict[str, Any]) -> None:
    """As by ``--hf-overrides``."""
    model = tiny_model("qwen3", head_dim=32)
    bank = GateBank.for_model(model, GateConfig(block_size=32, gate_dim=32))
    config = copy.deepcopy(model.config)
    check_model(config, bank, Gate(bank=bank))
    config.rope_parameters = {**config.rope_parameters, "original_max_position_embeddings": 64, **rope}
    with pytest.raises(SeergateError, match="gates are for another model: the model's RoPE frequencies"):
        check_model(config, bank, Gate(bank=bank))
