"""How the frozen model is kept: without its head, in fewer bits, partly on disk; and an upload that fails."""

import importlib.util
import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import seergate
from seergate import GateBank, GateConfig
from seergate.distill import TrainConfig, base_model, load_train_config, run_distillation
from seergate.distill.base_model import compile_elementwise, load_frozen, with_run_rope
from seergate.distill.distributed import DistributedState
from seergate.distill.estimate import make_plan
from seergate.distill.losses.teacher_forward import distill_step
from seergate.models.loading import base_config, load_base
from tests.distill.conftest import Recorder, assert_identical, state, trained, weights
from tests.support.models import prompt, tiny_model
from tests.support.running import invalid, output_of, refused

ALONE = DistributedState(0, 1, 0, torch.device("cpu"))


def test_the_head_of_the_model_is_let_go(config, monkeypatch):
    """Nothing is compiled on a processor."""
    monkeypatch.setattr(base_model, "compile_elementwise", None)
    model = load_frozen(config.model, config, ALONE)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
    assert "lm_head.weight" not in model.state_dict() and "model.embed_tokens.weight" in model.state_dict()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3_text"])  # queries are caught at a norm, at a linear map
def test_compiled_norms_give_the_same_and_hooks_still_catch(family: str) -> None:
    """On CUDA, with inductor. The hooks are others in each pack; its length is another, too."""
    model = tiny_model(family)
    bank = GateBank.for_model(model, GateConfig(8, 16))
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def outcomes(*lengths: int) -> list[torch.Tensor]:
        tensors = []
        for n in lengths:
            outcome = distill_step(bank, model, prompt(n), torch.tensor([0, n // 3, n], dtype=torch.int32))
            tensors += [outcome.loss, *torch.autograd.grad(outcome.loss, list(bank.parameters()))]
        return tensors

    want = outcomes(95, 64, 41)
    compile_elementwise(model, backend)
    got = outcomes(95)
    first = len(graphs)
    got += outcomes(64, 41)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert 2 <= first == len(graphs) <= 4  # whatever the number of layers: norms of two or three shapes, and MLPs


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
DYNAMIC = {"max_length": 2049, "rope_scaling": '{"rope_type": "dynamic", "factor": 4.0}'}


def test_gates_learn_from_stretched_rope_and_fit_no_other(config: TrainConfig) -> None:
    config = replace(config, max_steps=1, eval_packs=0)
    plain = GateBank.from_pretrained(run_distillation(config))
    stretched = replace(config, output_dir=f"{config.output_dir}-yarn", rope_scaling=json.dumps(YARN))
    bank = GateBank.from_pretrained(run_distillation(stretched))
    assert bank.geometry.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    own, yarn = plain.geometry.inv_freq, bank.geometry.inv_freq
    assert yarn[0] == pytest.approx(own[0]) and yarn[-1] == pytest.approx(own[-1] / 4)
    message = "RoPE frequencies are not those that the gates were trained with"
    refused(message, seergate.attach, load_base(config.model), bank, token_budget=64)
    theta = base_config(config.model).rope_parameters["rope_theta"]
    stretch = {"rope_theta": theta, **YARN}
    seergate.attach(load_base(config.model, rope_parameters=stretch), bank, token_budget=64)
    refused("these gates are for another model", seergate.load, stretched.output_dir)
    seergate.load(stretched.output_dir, rope_parameters=stretch)
    read = load_train_config(config.model, {"rope_scaling": YARN})  # as a YAML file says it
    assert read.rope_parameters == YARN


def test_packs_are_as_long_as_the_model_has_positions(config: TrainConfig) -> None:
    recipe = replace(config, max_length=32768, recall_budgets=(32, 2048, 4096), max_steps=1)
    assert make_plan(recipe).config.max_length == 2048
    stretched = replace(recipe, rope_scaling=json.dumps(YARN))
    assert make_plan(stretched).config.max_length == 8192
    assert make_plan(replace(recipe, max_length=256)).config.max_length == 256
    out, heard = trained(recipe)
    assert GateBank.from_pretrained(out).training_record["config"]["max_length"] == 2048
    assert heard.steps[0].recall.keys() == {32}, "a budget that covers a pack says nothing"
    assert "\nmax_length: 2048\n" in output_of("train", "--model", config.model, "--dry-run")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_length": 2049}, "model has 2048 positions; set --max-length to that at most, or .* --rope-scaling"),
        ({"max_length": 8193, "rope_scaling": json.dumps(YARN)}, "max_length is 8193, but the model has 8192 pos"),
        (DYNAMIC, "max_length is 2049, but the model's dynamic RoPE has other frequencies beyond 2048 tokens"),
        ({"rope_scaling": '{"rope_type": "yarn"}'}, r"rope_scaling is {.*}: .*Missing required keys"),
        ({"rope_scaling": '{"rope_type": "yran", "factor": 4}'}, r"rope_scaling is {.*}: did you mean 'yarn'"),
        ({"rope_scaling": '{"rope_type": "linear", "factor": 0.1}'}, "its factor must be a number of at least 1"),
    ],
)
def test_positions_that_the_model_has_not_are_refused_before_data(config, options, why):
    config = replace(config, data="/does/not/exist.jsonl", **options)
    for start in (run_distillation, make_plan):
        refused(why, start, config)


def test_scaled_rope_turns_no_more_of_a_head_than_the_models_own(config: TrainConfig) -> None:
    shape = tiny_model("glm4").config
    own = shape.rope_parameters["partial_rotary_factor"]
    halved = replace(config, max_length=64, rope_scaling='{"rope_type": "linear", "factor": 2.0}')
    scaled = with_run_rope(shape, halved)
    assert own < 1 and scaled.rope_parameters["partial_rotary_factor"] == own


@pytest.mark.parametrize(
    ("options", "why"),
    [
        *(({"rope_scaling": x}, 'it must be a JSON object with "rope_type"') for x in ("{", "4.0", '{"factor": 4.0}')),
        ({"scorer": "trim_kv", "gate_dim": None, "quantize": "bnb-4bit"}, "it must be none, torchao-int8 or bnb-8bit"),
        ({"quantize": "bnb-4bit", "base_memory_gb": 1.0}, "it must be left out when quantize is bnb-4bit"),
        ({"quantize": "bnb-4bit", "shard_base": True}, "it must be left out with base_memory_gb or quantize"),
    ],
)
def test_options_that_contradict_one_another_are_refused(config, options, why):
    invalid(f"^{list(options)[-1]} is .*; {why}", replace, config, **options)


def test_layers_on_disk_train_the_same_gates(config: TrainConfig, tmp_path: Path) -> None:
    whole = run_distillation(replace(config, output_dir=str(tmp_path / "whole")))
    small = replace(config, base_memory_gb=100e-6)  # the embedding and one of the two layers
    places = {str(p) for p in load_frozen(small.model, small, ALONE).hf_device_map.values()}
    assert places == {"cpu", "disk"}, places
    assert_identical(weights(run_distillation(small)), weights(whole))


@pytest.mark.parametrize(
    ("kind", "scorer"),
    [("bnb-4bit", "attn_gate"), *itertools.product(("bnb-8bit", "torchao-int8"), ("attn_gate", "trim_kv"))],
)
def test_a_quantised_model_teaches_almost_the_same(config, model_dir, tmp_path, kind, scorer):
    wide = tmp_path / "wide"  # quantisers take blocks of 64 weights
    shape = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "initializer_range": 0.1}
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(model_dir, **shape)).save_pretrained(wide)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(wide)
    gates: dict[str, Any] = {"scorer": scorer, "gate_dim": None} if scorer == "trim_kv" else {}
    config = replace(config, model=str(wide), quantize=kind, max_steps=4, **gates)
    package = "torchao" if kind == "torchao-int8" else "bitsandbytes"
    if importlib.util.find_spec(package) is None:
        early = replace(config, data="/does/not/exist.jsonl")
        return refused(f"quantize is '{kind}', which needs {package}", run_distillation, early)
    _, plain = trained(config, quantize="none", output_dir=str(tmp_path / "plain"))
    out, quantised = trained(config)
    assert quantised.steps[0].kl != plain.steps[0].kl
    assert quantised.steps[-1].kl == pytest.approx(plain.steps[-1].kl, rel=0.1)
    assert quantised.steps[0].grad_norm == pytest.approx(plain.steps[0].grad_norm, rel=0.2)
    assert {x.dtype for x in weights(out).values()} == {torch.bfloat16}


def test_a_bfloat16_model_gets_gates_trained_in_float32_and_saved_in_bfloat16(config: TrainConfig) -> None:
    out, heard = trained(config, dtype="bfloat16", max_steps=12)
    assert {x.dtype for x in weights(out).values()} == {torch.bfloat16}
    assert {x.dtype for x in state(out).values()} == {torch.float32}
    assert heard.steps[-1].kl < heard.steps[0].kl


def test_an_upload_that_fails_loses_nothing(config: TrainConfig) -> None:
    config = replace(config, push_to_hub="nobody/gates", max_steps=2)  # the tests have no network
    refused(r"saved in .*run, but not uploaded to nobody/gates", run_distillation, config)
    assert weights(config.run_dir)
    heard = Recorder()
    refused("not uploaded", run_distillation, config, [heard])
    assert heard.steps == []  # nothing is trained again
    assert heard.messages[-1].startswith(f"note: the base model is {config.model}, which is not on the Hub; ")
    run_distillation(replace(config, push_to_hub=None), [heard])


def test_training_begins_with_the_gates_it_is_given(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(config, max_steps=3, eval_packs=0)
    given = run_distillation(config)
    again = replace(config, init_gates=str(given), output_dir=str(tmp_path / "again"))
    still = replace(again, learning_rate=1e-30, min_lr=0.0, warmup_steps=0)
    assert_identical(weights(run_distillation(still)), weights(given))
    out, heard = trained(again, resume=False)
    _, fresh = trained(config, output_dir=str(tmp_path / "fresh"))
    bank = GateBank.from_pretrained(out)
    assert heard.steps[0].kl < fresh.steps[0].kl and not math.isclose(heard.steps[-1].kl, fresh.steps[-1].kl)
    assert bank.training_record["config"]["init_gates"] == str(given)
    assert f"| init gates | {given} |" in (tmp_path / "again" / "README.md").read_text() and not bank.licence

    bank.licence, bank.decode_defaults = {"license": "cc-by-nc-4.0"}, {"dense_layers": [1]}
    bank.save_pretrained(given)  # other weights under the name of before
    refused("was made with init_gates_fingerprint=", run_distillation, again)
    second = GateBank.from_pretrained(run_distillation(replace(again, resume=False)))
    assert (second.licence, second.decode_defaults) == (bank.licence, bank.decode_defaults)


def test_other_gates_to_begin_with_are_refused_before_data(config: TrainConfig, tmp_path: Path) -> None:
    given = str(run_distillation(replace(config, max_steps=1, eval_packs=0)))
    other = tmp_path / "other"
    stranger = tiny_model("qwen3", num_key_value_heads=4, head_dim=16)
    GateBank.for_model(stranger, config.gates(16)).save_pretrained(other)
    config = replace(config, output_dir=str(tmp_path / "again"), data="/does/not/exist.jsonl")
    for options, why in (
        ({"block_size": 32, "init_gates": given}, f"init_gates '{given}' have block_size=16, this run 32"),
        ({"scorer": "msa", "init_gates": given}, f"init_gates '{given}' have scorer='attn_gate', this run 'msa'"),
        ({"init_gates": str(other)}, "init_gates '.*other' are for another model: hidden_size is 32 in the model and"),
        ({"init_gates": str(tmp_path / "none")}, "there is no directory .*none"),
    ):
        refused(why, run_distillation, replace(config, **options))


def test_files_of_the_user_in_the_output_directory_are_not_replaced(config: TrainConfig, tmp_path: Path) -> None:
    inside = replace(config, output_dir=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    for name in ("", "run", "run/data.json"):
        where = replace(inside, data=str(tmp_path / name))
        (tmp_path / "run/data.json").write_text("[]")
        refused("where this run writes files of its own", run_distillation, where)
    assert (tmp_path / "run/data.json").read_text() == "[]"
    run_distillation(replace(inside, max_steps=1))
    shutil.rmtree(tmp_path / "run/checkpoints")
    refused("holds gates, and no checkpoint to continue from; --no-resume", run_distillation, inside)
    run_distillation(replace(inside, max_steps=1, resume=False))


def test_best_is_not_replaced_unless_it_holds_gates(config: TrainConfig, tmp_path: Path) -> None:
    best = Path(shutil.copytree(config.model, tmp_path / "run/best"))
    config = replace(config, output_dir=str(tmp_path / "run"), max_steps=1)
    refused("best has chat_template.jinja and would be replaced by gates", run_distillation, config)
    for place in (best, best.parent):
        refused("init_gates lies in output_dir", run_distillation, replace(config, init_gates=str(place)))
    assert (best / "model.safetensors").is_file()
    shutil.rmtree(best)
    run_distillation(config)
    best.mkdir(exist_ok=True)
    (best / "LICENSE").touch()
    run_distillation(config)  # resumes, and replaces nothing
    assert (best / "LICENSE").is_file()


def test_a_quantised_checkpoint_is_not_compiled(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(base_model, "compile_elementwise", compiled.append)
    monkeypatch.setattr(base_model, "choose", lambda device: "triton")
    on_gpu = SimpleNamespace(**vars(ALONE) | {"device": SimpleNamespace(type="cuda")})
    monkeypatch.setattr(base_model, "_load_options", lambda config, world: {})
    load_frozen(config.model, config, on_gpu)
    monkeypatch.setattr(base_model, "own_format", lambda shape: ("awq", 4))
    load_frozen(config.model, config, on_gpu)
    assert len(compiled) == 1
