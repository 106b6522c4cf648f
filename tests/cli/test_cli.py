"""The command as a user meets it: exit codes and output."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from seergate import GateBank, GateConfig
from seergate.cli.console import say_report
from seergate.cli.main import COMMANDS
from seergate.eval.report.write import Report
from seergate.methods import METHODS
from seergate.models.names import gates_for, load_model
from tests.decode.test_passes import SHARED
from tests.support import evaluation as support
from tests.support.models import tiny_model
from tests.support.running import ROOT, output_of, refusal, refused, run_seergate

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
GATES = str(ROOT / "checkpoints" / "tiny-reasoner" / "gates")


def test_help_names_every_command():
    output = output_of("--help")
    assert run_seergate().stdout == output
    assert set(COMMANDS) >= {"demo", "plan", "train", "eval", "report", "sweep", "doctor"}
    for command, module in COMMANDS.items():
        assert re.search(rf"^    {command}\s+{re.escape(module.HELP[0][:20])}", output, re.M), command


@pytest.mark.parametrize("command", [*COMMANDS, "eval show"])
def test_help_of_everything(monkeypatch, command):
    """What it does, its options, and examples that its own parser understands."""
    monkeypatch.setenv("COLUMNS", "200")
    output = output_of(*command.split(), "--help")
    assert f"usage: seergate {command}" in output and "options:" in output
    _, _, examples = output.partition("examples:\n")
    lines = [line.strip() for line in examples.split("\n\n")[0].splitlines()]
    own = [line for line in lines if line.startswith(f"seergate {command}")]
    assert own and len(own) + sum(line.startswith(("deepspeed ", "torchrun ")) for line in lines) == len(lines)
    for option in {word for line in own for word in line.split() if word.startswith("--")}:
        assert re.search(rf"{option}\b", output.replace(examples, "")), option


TRACES = ["traces", "--prompts", "chain_sum", "--out", "rows.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evl"], "did you mean 'eval'?"),
        (["zzz"], "there are demo, plan, prepare, train, "),
        (["eval", "--methd", "dense"], "'--methd' is not an option; did you mean '--method'? (see seergate eval --h"),
        (["eval", "--problems", "many"], "--problems"),
        (["eval", "--budget", "64,x"], "must be integers separated by commas"),
        (["eval", "--method", "qest"], "did you mean 'quest'?"),
        (["eval", "--method", ""], "argument --method: '' holds nothing"),
        (["eval", "--budget", ","], "argument --budget: ',' holds nothing"),
        (["eval", "--threshold", ""], "argument --threshold: '' holds nothing"),
        (["eval", "--task", "chain_sun"], "did you mean 'chain_sum'?"),
        (["eval", "--task", "none.jsonl"], "none.jsonl does not exist"),
        (["eval", "--variables", "2"], "variables is 2"),
        (["eval", "--top-p", "0.9"], "without --temperature"),
        (["report", "/nonexistent/run"], "/nonexistent/run does not exist"),
        (["demo", "--problems", "0"], "problems is 0"),
        (["eval", "foo"], "'foo' is not an option (see seergate eval --help)"),
        (["doctor", "foo"], "'foo' is not an option (see seergate doctor --help)"),
        (["train", "--threads", "2"], "'--threads' is not an option (see seergate train --help)"),
        (["report"], "the following arguments are required: RUN_DIR (see seergate report --help)"),
        (["train", "--max-stepz", "3"], "is not an option; did you mean '--max-steps'? (see seergate train --help)"),
        (["eval", "--method", "quest:blocksize=3"], "method 'quest' has no option 'blocksize'; did you mean 'block_s"),
        (["eval", "--gates", "runs/none"], "there is no directory runs/none, and"),
        (["figure", "6"], "there is no figure '6'; there are 4, 5, 7,"),
        (["figure", "raas-5"], "did you mean 'raas5'? (docs/reproduce.md says what is not reproduced, and why)"),
        (["generate", "--method", "lazy_eviction:window=auto"], "window=auto is not calibrated here, only by"),
        ([*TRACES, "--method", "tri_attention:centres=auto", "--budget", "9"], "centres=auto is not calibrated here"),
        (["train", "--model", "tiny-reasoners", "--dry-run"], "did you mean"),
        (["report", __file__], "is a file; a report is about a directory"),
        (["plan", "--processes", "many"], "(see seergate plan --help)"),
        (["ablate"], "the following arguments are required: STUDY (see seergate ablate --help)"),
    ],
)
def test_mistakes_are_one_sentence(arguments, said, tmp_path):
    extra = ["--out", str(tmp_path / "out")] if arguments[0] in ("eval", "demo") else []
    assert said in refusal(run_seergate(*arguments, *extra))
    assert not (tmp_path / "out").exists()


def test_a_device_that_is_missing_is_told_with_those_that_are_there():
    refused("device is 'cuda:77'; this machine has cpu", load_model, "checkpoints/tiny-reasoner", device="cuda:77")


def test_a_server_has_the_gpu_for_itself(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load_model("checkpoints/tiny-reasoner", engine="vllm").device.type == "cpu"
    refused("'auto'", load_model, "checkpoints/tiny-reasoner")


def test_gates_of_a_model_are_found_beside_it(tmp_path):
    """The shipped model's by its name, too; a directory of that name that holds something else is none."""
    assert gates_for("tiny-reasoner", None) == gates_for("checkpoints/tiny-reasoner", None) is not None
    assert gates_for("tiny-reasoner", "mine") == "mine"
    saved = support.save(tmp_path)
    (tmp_path / "gates").mkdir()
    assert gates_for(str(saved), None) is gates_for("Qwen/Qwen3-8B", None) is None
    GateBank.for_model(load_model(str(saved)), GateConfig(8, 16)).save_pretrained(tmp_path / "gates")
    assert gates_for(str(saved), None) == str(tmp_path / "gates")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--samples", "0"], "samples is 0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--dense-layers", "99"], "dense_layers names [99]; the model has layers 0..1"),
        (["--max-total-tokens", "1"], "which leaves no room for an answer"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--workers", "-1"], "workers is -1"),
        (["--task", "TASK", "--grader", "foo"], "there is no grader 'foo'"),
        (["--method", "gate"], "with --gates; `seergate train` makes"),
        (["--method", "dense,quest,quest:block_size=64", "--match", "read"], "quest-128-block_size=64' mean the same"),
        (["--method", "gate", "--gates", "."], "gate_config.json"),
        (["--method", "gate", "--gates", GATES], "num_layers is 2 in the model and 4 in the gates"),
        (["--out", __file__], "is a file"),
    ],
)
def test_what_cannot_be_run_is_told_before_the_model_is_loaded(weightless, tmp_path, arguments, said):
    task, out = tmp_path / "task.jsonl", tmp_path / "out"
    task.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    given = [str(task) if word == "TASK" else word for word in arguments]
    common = ["eval", "--task", "chain_sum", "--model", str(weightless), "--budget", "128", "--out", str(out)]
    assert said in refusal(run_seergate(*common, "--method", "dense,oracle", *given))
    assert not out.exists()
    assert "could not be loaded" in refusal(run_seergate(*common, "--method", "dense,oracle"))


def test_families_are_checked_before_the_model_is_loaded(weightless, tmp_path):
    config = json.loads((weightless / "config.json").read_text())
    config |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (weightless / "config.json").write_text(json.dumps(config))
    command = ["eval", "--task", "chain_sum", "--model", str(weightless), "--method", "dense"]
    assert "gpt2" in refusal(run_seergate(*command, "--out", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_a_report_is_refused_before_the_model_is_loaded(weightless, tmp_path, monkeypatch):
    sweep, out = tmp_path / "sweep.yaml", tmp_path / "out"
    sweep.write_text(f"model: {weightless}\ntask: chain_sum\nmethod: [dense]\nout: {out}\n")
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # what `import` then finds
    evaluation = ("eval", "--task", "chain_sum", "--model", str(weightless), "--method", "dense", "--out", str(out))
    for arguments in (evaluation, ("sweep", str(sweep))):
        message = refusal(run_seergate(*arguments))
        assert 'plots need matplotlib; run: pip install "seergate[eval]"' in message and "--no-report" in message
        assert not out.exists()
        assert "could not be loaded" in refusal(run_seergate(*arguments, "--no-report"))
        out.rmdir()
    for arguments in (("figure", "5"), ("demo",)):
        message = refusal(run_seergate(*arguments, "--out", str(out)))
        assert "plots need matplotlib" in message and "--no-report" not in message and not out.exists()


def started(*arguments, stdout=subprocess.DEVNULL, cwd=ROOT, preexec_fn=None):
    command, streams = [sys.executable, "-m", "seergate", *arguments], {"stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, env=ENVIRONMENT, text=True, preexec_fn=preexec_fn, **streams)


@pytest.mark.slow
def test_interrupting_is_130_without_a_traceback(saved, tmp_path):
    process = started(
        *("eval", "--task", "chain_sum", "--model", saved, "--method", "dense", "--problems", "400"),
        *("--batch-size", "1", "--variables", "5", "--out", str(tmp_path)),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background shell ignores it
    )
    path = tmp_path / "dense" / "samples.jsonl"
    deadline = time.monotonic() + 120
    while not path.exists() or not path.read_bytes():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, ["torch", "transformers", "ops torch", "works on", "2 of 2 layers", "4 query heads on 2 KV heads"]),
        ("qwen3-8b", ["36 of 36 layers can be gated"]),
    ],
)
def test_doctor(saved, tmp_path, model, said):
    output = output_of("doctor", "--model", model or saved)
    assert all(word in output for word in said) and "SEERGATE_BACKEND" not in output
    one_head = '{"model_type": "gemma4_text", "attention_k_eq_v": true, "num_global_key_value_heads": 1}'
    (tmp_path / "config.json").write_text(one_head)
    assert "8 query heads on 1 KV heads" in output_of("doctor", "--model", str(tmp_path))
    tiny_model("gemma4_text", **SHARED).config.save_pretrained(tmp_path)
    assert "1 of 4 layers can be gated" in output_of("doctor", "--model", str(tmp_path)), "without those that share"
    (tmp_path / "config.json").write_text('{"model_type": "mistral3"}')
    assert "no model can be built" in refusal(run_seergate("doctor", "--model", str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert "multi-head latent attention" in refusal(run_seergate("doctor", "--model", str(tmp_path)))


def test_an_output_that_cannot_be_made_is_told(saved, tmp_path):
    """Below a file nobody can make a directory, not even an administrator."""
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "deeper" / "out")
    for arguments in (
        ["eval", "--task", "chain_sum", "--model", saved, "--method", "dense"],
        ["calibrate", "lazy_eviction", "--task", "chain_sum", "--model", saved],
        ["demo"],
    ):
        message = refusal(run_seergate(*arguments, "--out", out))
        assert "cannot be made: " in message and "not a directory" in message and "Errno" not in message
        message = refusal(run_seergate(*arguments, "--out", "~/runs/out"))
        assert f"in a directory named ~; write {Path.home()}/runs" in message


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        (9000, [], "the longest prompt, with a token of the answer, has"),
        (9000, ["--max-new-tokens", "16"], "the longest prompt, with a token of the answer, has"),
        (9, ["--max-new-tokens", "100000"], "set max_new_tokens to "),
    ],
)
def test_a_calibration_beyond_the_model_s_positions_is_refused(words, more, said, saved, tmp_path):
    task = tmp_path / "rows.jsonl"
    task.write_text(json.dumps({"prompt": "[a1] " * words + "\\boxed{", "answer": "3"}) + "\n")
    given = ["--task", str(task), "--model", saved, "--out", str(tmp_path / "window.json")]
    message = refusal(run_seergate("calibrate", "lazy_eviction", *given, *more))
    assert said in message and re.search("the model has 4,?096 positions", message)
    assert "--max-total-tokens" not in message


@pytest.mark.slow
def test_an_output_that_nobody_reads_ends_the_command_with_141(saved, tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = ["eval", "--model", saved, "--task", "chain_sum", "--method", "dense", "--problems", "2"]
    process = started(*command, "--variables", "5", "--out", str(tmp_path), stdout=write)
    os.close(write)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGPIPE == 141
    message = "stopped, as nothing reads the output any more (broken pipe); what was finished is kept\n"
    assert stderr.endswith(message) and "Traceback" not in stderr


SHORT = ["--max-steps", "20", "--max-length", "512", "--packs-per-step", "1", "--eval-packs", "0"]
ROWS, FEW = ["--data-limit", "60"], ["--max-new-tokens", "8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "limit", "said"),
    [
        (["methods"], None, "error: the output or a file cannot be written: no space left on device; what was"),
        (["eval", "--problems", "1", "--method", "dense", *FEW, "--out", "o"], 900, "error: o/dense/"),
        (["train", *SHORT, *ROWS, "--token-cache", "t", "--output-dir", "o"], 9000, "error: o/tensorboard"),
        (["prepare", *ROWS, "--token-cache", "t", "--output-dir", "o"], 9000, "error: t cannot be written: file too"),
    ],
    ids=["output", "eval", "train", "prepare"],
)
def test_a_full_disk_is_told(arguments, limit, said, tmp_path):
    """A limit on the size of files is met in the same places as the end of a disk."""
    if arguments[0] == "train":  # its data are there
        data = ["--token-cache", str(tmp_path / "t"), "--output-dir", str(tmp_path / "prepared")]
        assert run_seergate("prepare", "--model", "tiny-reasoner", *ROWS, *data).returncode == 0
    model = [] if arguments == ["methods"] else ["--model", "tiny-reasoner"]
    with open("/dev/full" if limit is None else os.devnull, "w") as out:
        few_bytes = limit and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        process = started(*arguments, *model, stdout=out, cwd=tmp_path, preexec_fn=few_bytes)
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 2 and "Traceback" not in stderr, stderr
    assert said in stderr and "what was finished before is kept" in stderr


def test_methods_are_listed_with_their_options():
    assert [line.split(":")[0] for line in output_of("methods").splitlines() if line[0] != " "] == list(METHODS)
    output = output_of("methods", "quest")
    assert "block_size=16" in output and "dense_layers=0+1" in output
    assert output.startswith("quest: Score a page by") and "h2o" not in output
    assert "did you mean 'quest'" in refusal(run_seergate("methods", "qest"))
    both = run_seergate("methods", "snapkv+gate").stdout
    assert "window=32" in both and "read_budget=?" in both
    shared = output_of("methods", "reason_cache+gate")
    assert "?" not in shared, "no option is required"
    assert r"border=\n[ \t\r]*\n," in " ".join(shared.split()), "no path"


def test_shipped_files_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = ["sweep", "configs/sweeps/methods.yaml"]
    assert "problems is 0" in refusal(run_seergate(*sweep, "--problems", "0")), "the file is read"
    push = ["push", "checkpoints/tiny-reasoner/gates", "me/gates", "--dry-run"]
    assert "not uploaded: README.md" in output_of(*push)
    assert "must be a path inside the repository" in refusal(run_seergate(*push, "--subfolder", "../x"))
    assert "a pull request goes to main" in refusal(run_seergate(*push, "--create-pr", "--revision", "v1"))
    assert "the configuration file configs/none.yaml does not exist" in refusal(
        run_seergate("sweep", "configs/none.yaml")
    )


@pytest.mark.parametrize("name", ["README.md", "gate_config.json"])
def test_push_follows_no_link(tmp_path, name):
    shutil.copytree(GATES, gates := tmp_path / "gates")
    (gates / name).rename(tmp_path / "private")
    (gates / name).symlink_to(tmp_path / "private")
    for dry in ([], ["--dry-run"]):
        assert f"{gates / name} is a link" in refusal(run_seergate("push", str(gates), "me/gates", *dry))
    if name == "README.md":
        (tmp_path / "private").write_text("my secret")
        GateBank.from_pretrained(gates).save_pretrained(gates)
        assert "my secret" not in (gates / name).read_text() and (tmp_path / "private").read_text() == "my secret"


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file, below which not even an administrator makes a directory")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    error = refusal(run_seergate("prepare", "--model", "tiny-reasoner", "--output-dir", str(tmp_path / "out")))
    assert f"the output {tmp_path}/home/.cache/seergate/tokens cannot be made" in error


@pytest.mark.slow
@pytest.mark.parametrize("scorer", ["attn_gate", "fast_kvzip"])
def test_training_names_the_command_that_evaluates_its_gates(tmp_path, scorer):
    out = tmp_path / "my gates"
    small = ["--max-steps", "1", "--packs-per-step", "1", "--max-length", "512", "--eval-packs", "0"]
    given = [*small, "--token-cache", str(tmp_path / "tokens"), "--output-dir", str(out)]
    output = output_of("train", "--model", "tiny-reasoner", "--scorer", scorer, *given)
    program, *command = shlex.split(output.splitlines()[-1].removeprefix("next: "))
    assert program == "seergate"
    less = ["--problems", "1", "--variables", "4", "--budget", "64", "--no-report", "--out"]
    assert f"gates: {out}\n" in output_of(*command, *less, str(tmp_path / "runs"))
    output = output_of("eval", "--model", "tiny-reasoner", *less, str(tmp_path / "shipped"))
    assert f"gates: {GATES}, beside the model (others: --gates)\n" in output


def test_a_report_without_findings_says_so(capsys):
    say_report(Report(Path("report.md"), Path("report.html")))
    output = capsys.readouterr().out
    assert "no dense run" in output and "What the report shows" not in output


def test_only_train_lists_its_many_options_unless_asked():
    listed = {name: "--learning-rate" in run_seergate(name, "--help").stdout for name in ("train", "plan", "prepare")}
    assert listed == {"train": True, "plan": False, "prepare": False}
