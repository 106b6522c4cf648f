"""Options: presets, overrides, types, and one clear sentence for every mistake."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from seergate.cli.train import given_options, main, resolve, train_parser
from seergate.distill import TrainConfig, load_train_config
from seergate.distill.config import locate_model
from seergate.eval.tasks.chain_sum import make_problems
from seergate.models.names import presets
from seergate.yaml_file import read_yaml
from tests.support.running import ROOT, refused


def test_every_preset_loads_and_names_an_existing_kind_of_model(tmp_path, monkeypatch):
    assert {"qwen3-8b", "r1-distill-llama-8b", "qwq-32b", "tiny-reasoner"} <= set(presets())
    for name in presets():
        config = load_train_config(name.upper())
        assert config.run_dir.name.endswith("-gates")
        assert config == load_train_config(name)
    assert load_train_config("qwen/qwen3-4b") == load_train_config("qwen3-4b")  # a Hub id has its preset
    assert load_train_config("someone/some-model").model == "someone/some-model"
    assert load_train_config().data == "chain_sum"  # of the model that ships
    monkeypatch.chdir(tmp_path)
    assert load_train_config("Qwen3-8B").model == "Qwen/Qwen3-8B"
    (tmp_path / "Qwen3-8B").mkdir()  # a directory wins
    assert load_train_config("Qwen3-8B").model == "Qwen3-8B"


@pytest.mark.parametrize(
    ("model", "suggestion"), [("Qwen3-8", "'qwen3-8b'"), ("tiny-reasonr", "'tiny-reasoner'"), ("zzz", "qwq-32b")]
)
def test_an_unknown_model_gets_a_suggestion(model: str, suggestion: str) -> None:
    refused(f"{model!r}.*{suggestion}", load_train_config, model)


@pytest.mark.parametrize("model", ["", " ", None, [], 5])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    for given in ((None, {"model": model}), *([] if model is None else [(model,)])):
        refused("model is .*; it must be a preset", load_train_config, *given)


def test_several_sources_are_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parsed("--data", "org/a:0.7", "b.jsonl:0.3", "--seed", "1")
    assert config.data == "org/a:0.7,b.jsonl:0.3" and config.seed == 1
    assert load_train_config("tiny-reasoner", {"data": ["org/a:0.7", "b.jsonl:0.3"], "seed": 1}) == config
    assert [(one.data, share) for one, share in config.sources] == [("org/a", 0.7), ("b.jsonl", 0.3)]
    (tmp_path / "a, b.jsonl").touch()
    for one in (str(tmp_path / "a, b.jsonl"), "org/a", "a,b/not yet.jsonl"):
        config = load_train_config("tiny-reasoner", {"data": one})
        assert config.sources == [(config, 1.0)]
    here = tmp_path / "me@host" / "x.jsonl"
    here.parent.mkdir()
    here.touch()
    monkeypatch.chdir(tmp_path)
    for place in (str(here), "./me@host/x.jsonl", "me@host/x.jsonl", "~/me@host/x.jsonl", "/data/me@host/x.jsonl"):
        config = load_train_config("tiny-reasoner", {"data": [f"{place}:1e-5", "org/a@refs/pr/1:2"]})
        for at, revision in ((config, "refs/pr/1"), (config.with_data_revisions([None, "c"]), "c")):
            named = [(one.data, one.data_revision, share) for one, share in at.sources]
            assert named == [(place, None, 1e-5), ("org/a", revision, 2.0)]
    for name in ("run", "run:2", "run:2:3", "T10:30:00"):
        (tmp_path / name).mkdir()
    for one in ("run:2", "run:2:3", "T10:30:00", str(tmp_path / "run:2")):
        config = load_train_config("tiny-reasoner", {"data": one})
        assert config.sources == [(config, 1.0)]
    mixed = load_train_config("tiny-reasoner", {"data": "run:2:0.5,T10:30:00:0.5"}).with_data_revisions([None, None])
    assert [(one.data, share) for one, share in mixed.sources] == [("run:2", 0.5), ("T10:30:00", 0.5)]
    for wrong in ("nowhere:00", "org/a:0.7,org/b", "org/a:0,org/b:1", "org/a:0.5,org/a@v1:0.5"):
        with pytest.raises(ValueError, match="data is .*; it must be one source, or different ones with a positive"):
            load_train_config("tiny-reasoner", {"data": wrong})
    with pytest.raises(ValueError, match="data_revision is 'v1'; it must be left out where data names several"):
        load_train_config("tiny-reasoner", {"data": "org/a:1,org/b:1", "data_revision": "v1"})


def test_command_line_strings_become_the_fields_types() -> None:
    given = {"learning_rate": "2e-4", "max_steps": "5", "k_pooling": "max,avg", "rope": "false", "gate_dim": None}
    config = load_train_config("qwen3-8b", {**given, "recall_budgets": "64, 128"})
    assert (config.learning_rate, config.max_steps, config.rope, config.gate_dim) == (2e-4, 5, False, None)
    assert config.k_pooling == ("max", "avg") and config.recall_budgets == (64, 128)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_steps", 0), ("max_steps", "many"), ("max_steps", 2.5), ("max_steps", True), ("packs_per_step", -1),
        ("max_length", 64), ("block_size", 0), ("block_size", 512), ("gate_dim", 7), ("k_pooling", "median"),
        ("q_pooling", "sum"),
        ("learning_rate", 0), ("learning_rate", "nan"), ("learning_rate", "inf"), ("min_lr", 1.0), ("lr_head_dim", 0),
        ("weight_decay", -0.1), ("max_grad_norm", "nan"),
        ("row_start", 1.0), ("row_start", -0.1), ("reduction", "mean"), ("dtype", "int8"), ("over_length", "split"),
        ("recall_budgets", "0"), ("recall_budgets", "a,b"), ("chain_sum_variables", "5"),
        ("chain_sum_variables", "9,5"), ("chain_sum_variables", "3,5"), ("chain_sum_variables", "8,81"),
        ("gradient_accumulation_steps", 0), ("report_to", "tensorbored"), ("report_to", "none,wandb"),
        ("data_limit", 0), ("data", ""), ("resume", "perhaps"), ("save_steps", -1), ("init_gates", ""),
        ("sink_blocks", -1), ("row_stride", 0), ("row_stride", 1.5), ("output_dir", ""), ("seed", 10**24),
        ("seed", 1e24), ("packs_per_step", 10**9), ("gate_dim", 10**12),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(option: str, value: object) -> None:
    message = rf"^({option} is .*; it must be |argument --{option.replace('_', '-')}\b.*: )"
    with pytest.raises(ValueError, match=message) as caught:
        load_train_config("qwen3-8b", {option: value})
    assert "\n" not in str(caught.value)


def test_the_problems_of_chain_sum_are_as_large_as_its_names_allow() -> None:
    with pytest.raises(ValueError, match=r"chain_sum_variables is \(8, 256\); it must be two integers in 4\.\.80,"):
        load_train_config("tiny-reasoner", {"chain_sum_variables": "8,256"})
    for size in (4, 80):  # what is accepted can be drawn
        config = load_train_config("tiny-reasoner", {"chain_sum_variables": (size, size)})
        assert len(list(make_problems(1, config.chain_sum_variables, 0))) == 1


def test_accumulated_packs_are_each_processes() -> None:
    config = load_train_config("tiny-reasoner", {"gradient_accumulation_steps": 3})
    assert config.in_processes(4) == replace(config, packs_per_step=12, gradient_accumulation_steps=None)
    plain = load_train_config("tiny-reasoner")
    assert plain.in_processes(4) is plain


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = load_train_config("tiny-reasoner", {"k_pooling": "avg", "chat_template": "/some/täglich.jinja"})
    config.save(tmp_path / "c.yaml")
    assert TrainConfig.from_dict(read_yaml(tmp_path / "c.yaml")) == config
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_a_configuration_file_may_merge_and_is_utf8(tmp_path: Path) -> None:
    # Names of one letter are told apart by identity in PyYAML 6.0.4, which merges those of a merged mapping wrongly.
    text = "base: &a {seed: 1}\nouter: {b: &b {<<: *a, seed: 2}}\nc: {<<: *b}\n1: ö\n'1': ü\n"
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    merged = {"base": {"seed": 1}, "outer": {"b": {"seed": 2}}, "c": {"seed": 2}}
    assert read_yaml(tmp_path / "c.yaml") == {**merged, 1: "ö", "1": "ü"}


@pytest.mark.parametrize("text", ["a: [", "- 1", "just words", "a: 1\na: 2", "a: 2024-13-45", "[" * 2000])
def test_a_broken_configuration_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    refused(r"c\.yaml", read_yaml, tmp_path / "c.yaml")
    refused("does not exist", read_yaml, tmp_path / "none.yaml")


def parsed(*argv: str) -> TrainConfig:
    return resolve(vars(train_parser(None, "", ()).parse_args(argv)))


def test_a_mistake_in_a_configuration_file_is_told_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for text, message in (
        ("lr: 1", r"c\.yaml: 'lr' is not an option of training; did you mean 'learning_rate'"),
        ("max_steps: [3\nseed: 1", r"c\.yaml, line 3, column 5 is not YAML: expected ',' or ']'"),
    ):
        file.write_text(f"model: tiny-reasoner\n{text}\n")
        refused(message, parsed, "--config", str(file))


def test_precedence_preset_file_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"max_steps": 7, "learning_rate": "1e-4"}))
    argv = ["--model", "tiny-reasoner", "--config", str(file), "--max-steps", "9", "--no-rope", "--block_size", "32"]
    config = parsed(*argv)
    assert (config.max_steps, config.learning_rate, config.rope, config.block_size) == (9, 1e-4, False, 32)
    assert (config.data, config.data_limit) == ("chain_sum", 1200)  # from the preset
    assert parsed(*argv, "--data", "own.jsonl").data_limit is None, "all rows of other data"
    assert parsed("--model", "qwen3-8b", "--data", "own.jsonl").recipe == "paper"  # the preset's
    assert parsed("--model", "smollm2-135m").recipe == "recommended"
    for scorer in ("msa", "fast_kvzip"):
        assert parsed("--model", "smollm2-135m", "--scorer", scorer).recipe == "paper", "of the preset, for attn_gate"


def test_packs_per_step_have_an_effect_beside_printed_options(capsys, tmp_path: Path) -> None:
    assert main(["--model", "tiny-reasoner", "--gradient-accumulation-steps", "1", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "gradient_accumulation_steps: 1\n" in printed and "packs_per_step" not in printed
    (tmp_path / "run.yaml").write_text(printed)
    again = parsed("--config", str(tmp_path / "run.yaml"))
    assert again.in_processes(1).packs_per_step == 1
    assert parsed("--config", str(tmp_path / "run.yaml"), "--packs-per-step", "4").in_processes(1).packs_per_step == 4


def test_every_option_is_on_the_command_line_with_help():
    """By its name with hyphens; other commands leave them to `train`. A truth value needs no word; `--no-...` comes
    after the option that it switches off.
    """
    parser = train_parser(None, "", ())
    helps = {action.dest: action.help for action in reversed(parser._actions)}
    assert any(action.help == "switch --qk-norm off" for action in parser._actions)
    for item in fields(TrainConfig):
        assert item.metadata["help"] in (helps[item.name] or "")
    text = parser.format_help()  # a stray percent sign would fail here
    assert "--max-steps" in text and "--max_steps" not in text
    assert "--max-steps" not in train_parser(None, "", (), listed=False).format_help()
    names = [name for name, kind in get_type_hints(TrainConfig).items() if kind in (bool, bool | None)]
    assert "shard_base" in names and "rope" in names
    for name in names:
        option = f"--{name.replace('_', '-')}"
        assert vars(parser.parse_args([option]))[name] is True
        assert vars(parser.parse_args([f"{option}=false"]))[name] is False


def test_the_launcher_chooses_deepspeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CROSS_SIZE", raising=False)
    assert parsed().deepspeed is None
    for argument in ("--local_rank=0", "--deepspeed"):
        assert (parsed(argument).deepspeed or "").endswith("zero2.json")
    assert parsed("--deepspeed", "my.json").deepspeed == "my.json"
    assert parsed("--local_rank=0", "--deepspeed", "none").deepspeed is None
    load_train_config().save(tmp_path / "plain.yaml")
    assert parsed("--config", str(tmp_path / "plain.yaml"), "--local_rank=0").deepspeed.endswith("zero2.json")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--max-stepps", "5"], "'--max-stepps' is not an option; did you mean '--max-steps'? (see train.py --help)"),
        (["extra"], "'extra' is not an option (see"),
        (["--reduction", "mean"], "invalid choice: 'mean'"),
        (["--max-steps"], "expected one argument"),
    ],
)
def test_a_wrong_argument_is_one_line(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv, "train.py") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and why in error and error.count("\n") == 1


def test_mistakes_that_would_fail_later_are_refused_before():
    for given, message in (
        ({"model": "checkpoints/none"}, "model directory 'checkpoints/none' does not exist"),
        ({"blocksize": 32}, "'blocksize' is not an option of training; did you mean 'block_size'"),
        ({"push_to_hub": "notanid"}, r"push_to_hub is 'notanid'; it must be a Hub repository \(org/name\)"),
        ({"output_dir": "~/run"}, "output_dir is '~/run'; it must be written out: only a shell replaces ~"),
        ({"chat_template": "nowhere.jinja"}, "chat_template is 'nowhere.jinja'"),
        ({"revision": "v1"}, "revision is 'v1', but .*tiny-reasoner lies on this machine; it must be left out"),
    ):
        with pytest.raises(ValueError, match=message):
            locate_model(load_train_config(None, {"model": "tiny-reasoner"} | given))


def test_a_user_error_is_one_line_and_exit_code_2_before_torch_is_imported() -> None:
    program = (
        "import sys; from seergate.cli.train import main; code = main(['--model', 'Qwn3-8B']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1 and "did you mean 'qwen3-8b'" in done.stderr


def test_sources_of_repeated_options_are_mixed_and_a_second_file_is_refused() -> None:
    given = vars(train_parser(None, "", ()).parse_args(["--data", "a:0.5", "b:0.2", "--data", "c:0.3"]))
    assert given_options(given)["data"] == "a:0.5,b:0.2,c:0.3"
    twice = vars(train_parser(None, "", ()).parse_args(["--config", "a.yaml", "--config", "b.yaml"]))
    refused("--config is given twice", given_options, twice)
