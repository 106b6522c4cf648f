"""`seergate.load` with device, dtype or quantisation is the same as attaching to a model that was loaded with them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import seergate
from seergate import GateBank, GateConfig, SeergateError
from tests.support.models import prompt, tiny_model


@pytest.fixture
def places(tmp_path):
    """Directories of a base model and of gates for it."""
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    GateBank.for_model(base, GateConfig(8, 16)).save_pretrained(tmp_path / "gates")
    return tmp_path / "base", tmp_path / "gates"


def scores(model) -> torch.Tensor:
    """Logits of each next token, of a sparse decode of twelve tokens."""
    options = {"max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(model.generate(input_ids=prompt(60), **options).logits)


def compare(places, **options) -> tuple[torch.nn.Module, torch.Tensor]:
    """Load both at once and one after the other; the same numbers, and not those of dense decoding."""
    base, gates = places
    loaded = seergate.load(gates, token_budget=16, **options)
    found = scores(loaded)
    assert seergate.handle_of(loaded).stats()["method"] == "gate"
    direct = AutoModelForCausalLM.from_pretrained(base, **options).eval()
    dense = scores(direct)
    with seergate.attached(direct, GateBank.from_pretrained(gates), token_budget=16):
        assert torch.equal(scores(direct), found)
    assert not torch.equal(dense, found), "nothing was skipped"
    return loaded, found


def test_device_map_and_dtype(places):
    model, found = compare(places, device_map={"": "cpu"}, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}
    assert {gate.k_proj.weight.dtype for _, gate in seergate.handle_of(model).method.bank} == {torch.float32}
    single, in_float32 = compare(places, dtype=torch.float32)
    assert {parameter.dtype for parameter in single.parameters()} == {torch.float32}
    assert not torch.equal(found.float(), in_float32)
    with pytest.raises(SeergateError, match="could not be loaded: .*nowhere"):  # so the map does reach transformers
        seergate.load(places[1], token_budget=16, device_map={"": "nowhere"})


def test_quantised_base(places):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    config = TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    model, found = compare(places, quantization_config=config, dtype=torch.bfloat16)
    projection = model.get_decoder().layers[0].self_attn.q_proj.weight
    assert type(projection).__name__ == "Int8Tensor"
    assert not torch.equal(found, compare(places, dtype=torch.bfloat16)[1]), "the base was not quantised"
