"""What is wrong with a model's files is one sentence, whatever the libraries raise for it."""

import shutil
from pathlib import Path

import pytest
from transformers import Mistral3Config, Qwen3Config

from seergate import GateConfig, SeergateError
from seergate.cli.train import main
from seergate.models.families import gate_geometry
from seergate.models.loading import base_config, load_base, skeleton
from seergate.models.names import is_tiny
from seergate.paths import model_name, shipped
from seergate.pretrained import load_tokenizer
from tests.support.running import refused

TINY = "checkpoints/tiny-reasoner"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny reasoner, to be damaged."""
    return Path(shutil.copytree(shipped(TINY), tmp_path / "model"))


# JSON that is no tokenizer (a bare `Exception` of tokenizers), no JSON, and no object.
@pytest.mark.parametrize("text", ['{"version": "1.0", "model": {"type": "Unheard"}}', "{", "[]", '{"model": null}'])
def test_a_tokenizer_that_is_none(model: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(SeergateError, match=rf"^the tokenizer of {model} could not be loaded: ") as caught:
        load_tokenizer(model)
    assert "\n" not in str(caught.value)
    argv = ["--model", str(model), "--data", "/does/not/exist.jsonl", "--output-dir", str(model / "run")]
    assert main([*argv, "--max-length", "2048"]) == 2
    assert capsys.readouterr().err == f"error: {' '.join(str(caught.value).split())}\n"


@pytest.mark.parametrize("text", ["[]", "{", '"qwen3"', '{"model_type": 3}', '{"model_type": "unheard"}'])
def test_a_configuration_that_is_none(model: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.json").write_text(text)
    for load in (base_config, load_base):
        refused(rf"^the base model {model} could not be loaded: ", load, model)
    assert main(["--model", str(model), "--output-dir", str(model / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"error: the base model {model} could not be loaded: ")


def test_an_adapter_of_peft_is_no_model(model: Path) -> None:
    (model / "config.json").rename(model / "adapter_config.json")
    refused("is a PEFT adapter; merge it into its base model", base_config, model)


def test_query_heads_that_cannot_be_divided_among_kv_heads() -> None:
    def geometry(heads: int, kv_heads: int):
        config = Qwen3Config(num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
        return gate_geometry(skeleton(config), GateConfig(8, 16))

    refused("num_attention_heads is 6 and num_key_value_heads is 4; .* a multiple", geometry, 6, 4)
    refused("num_attention_heads is 4 and num_key_value_heads is 8; .* a multiple", geometry, 4, 8)
    assert (geometry(6, 3).num_kv_heads, geometry(6, 6).num_kv_heads, geometry(6, 1).num_kv_heads) == (3, 6, 1)


def test_a_published_ministral_3_is_refused_as_the_documents_say() -> None:
    message = r"no model can be built from its configuration: .*Mistral3Config"
    refused(message, skeleton, Mistral3Config(text_config={"model_type": "ministral3"}))


@pytest.mark.parametrize("name", ["org/Model-1.5B", "some/Model-1.5B/", ".", "sub/.."])
def test_a_model_is_named_by_its_directory_or_repository(tmp_path, monkeypatch, name):
    (tmp_path / "Model-1.5B/sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "Model-1.5B")
    assert model_name(name) == "Model-1.5B"


def test_the_copy_of_a_checkout_is_the_tiny_reasoner(tmp_path, monkeypatch):
    """As after `pip install .`: the current directory and the package have one each."""
    shutil.copytree(shipped("checkpoints/tiny-reasoner"), tmp_path / "checkpoints/tiny-reasoner")
    monkeypatch.chdir(tmp_path)
    assert is_tiny("tiny-reasoner") and is_tiny("checkpoints/tiny-reasoner") and not is_tiny("checkpoints")
