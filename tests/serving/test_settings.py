"""Options of servers, read and compared with the model by all plugins: wrong ones are refused."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from seergate import GateBank, GateConfig
from seergate.methods import Gate, Quest
from seergate.serving.common.checks import check_keys, check_model
from seergate.serving.common.settings import Settings
from tests.support.models import tiny_model
from tests.support.reasoner import GATES, REASONER
from tests.support.running import refused


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
    ],
)
def test_settings_that_make_no_sense(values: Any, sentence: str) -> None:
    refused(sentence, Settings.read, {"seergate": values})


def test_keys_that_are_not_ours() -> None:
    """Those that nearly are may be meant to be."""
    for key in ("Seergate", "SEERGATE", "seer_gate", "seergates", "sergate", "seergate "):
        message = f"the key of seergate's options is '{key}'; it must be 'seergate'"
        refused(message, Settings.read, {"other": 1, key: {"gates": GATES}})
    assert all(Settings.read(config) is None for config in (None, {}, {"other": 1}))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gates": "nowhere"}, "nowhere"),
        ({"gates": GATES, "token_budget": 31}, "token_budget is 31; .* it must be at least 64"),
        ({"gates": GATES, "token_budget": 64, "top_p": 0.5}, "token_budget and top_p are both given"),
        ({"gates": GATES, "dense_layers": 1}, "dense_layers is 1; it must be a tuple of layer indices"),
        ({"gates": GATES, "dense_layers": ["0"]}, r"dense_layers is \['0'\]; it must be a tuple of layer indices"),
        ({"gates": GATES, "dense_layers": [7]}, r"dense_layers holds \[7\]; the model has the layers 0..3"),
        ({"method": "quest", "dense_layers": [7]}, r"dense_layers holds \[7\]; the model has the layers 0..3"),
        ({"gates": GATES, "dense_layers": [0, 1, 2, 3]}, "that leaves no layer to make sparse"),
        ({"gates": GATES, "anchors": 1}, "anchors is 1; it must be a tuple of layer indices"),
        ({"gates": GATES, "anchors": [7]}, r"anchors names \[7\]; the layers with full attention are"),
    ],
)
def test_settings_that_do_not_fit_the_model(values: Any, sentence: str) -> None:
    """Those of the reasoner; its weights are not read."""
    settings = Settings.read({"seergate": values})
    assert settings is not None
    with pytest.raises(ValueError, match=sentence):
        bank = settings.bank()
        check_model(AutoConfig.from_pretrained(REASONER), bank, settings.selector(bank, 32))


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("mistral", {"sliding_window": 64}, "no layer of this mistral model has full attention"),
        ("mistral", {"sliding_window": 4096}, "inside a server it must be null"),
        ("hunyuan_v1_dense", {}, "cached keys are not simply rotated"),
    ],
)
def test_models_that_cannot_be_sparse(family: str, options: Any, sentence: str) -> None:
    refused(sentence, check_model, tiny_model(family, **options).config, None, Quest(dense_layers=()))


def test_gates_of_another_model() -> None:
    bank = GateBank.for_model(tiny_model("qwen3", head_dim=32), GateConfig(block_size=32, gate_dim=32))
    sentence = "these gates are for another model: hidden_size is 128 in the model and 64"
    refused(sentence, check_model, AutoConfig.from_pretrained(REASONER), bank, Gate(bank=bank))


@pytest.mark.parametrize("scorer", ["msa", "indexer", "fast_kvzip"])
def test_gates_without_a_key_per_block(scorer: str) -> None:
    """Those with a key per token, and those that evict."""
    model, config = tiny_model("qwen3"), GateConfig(block_size=32, gate_dim=16)
    check_keys(GateBank.for_model(model, config))
    bank = GateBank.for_model(model, replace(config, scorer=scorer))
    refused(f"these gates have the scorer '{scorer}'; a server's cache keeps all", check_keys, bank)


@pytest.mark.parametrize("rope", [{"rope_theta": 5e3}, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}])
def test_gates_of_a_model_with_another_rope(rope: dict[str, Any]) -> None:
    """As by ``--hf-overrides``."""
    model = tiny_model("qwen3", head_dim=32)
    bank = GateBank.for_model(model, GateConfig(block_size=32, gate_dim=32))
    config = copy.deepcopy(model.config)
    check_model(config, bank, Gate(bank=bank))
    config.rope_parameters = {**config.rope_parameters, "original_max_position_embeddings": 64, **rope}
    refused("gates are for another model: the model's RoPE frequencies", check_model, config, bank, Gate(bank=bank))
