"""Who says what went wrong: each failure is read once, whichever process it happened to."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from seergate.cli import train as command
from seergate.cli.console import guarded
from seergate.distill.distributed import CommonError, init_distributed
from seergate.models.gate_bank import GateBank
from seergate.models.loading import load_base
from tests.support.pairs import ROOT, pair
from tests.support.running import run_seergate


@pytest.fixture
def rank(monkeypatch):
    """Makes this process one of eight on each of two machines."""

    def be(rank: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", "16")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 8))

    monkeypatch.setattr(command, "SILENT_SECONDS", 0)
    return be


@pytest.mark.parametrize("argv", [["--model", "Qwn3-8B"], ["--max-steps", "many"], ["--max-stepps", "5"]])
def test_a_bad_option_is_told_once_by_each_machine(rank, capsys, monkeypatch, argv):
    texts = []
    for number in (0, 3, 8, 15):
        rank(number)
        assert command.main(argv) == 2
        texts.append(capsys.readouterr().err)
    assert texts[0].startswith("error: ") and texts[0].count("\n") == 1
    assert texts == [texts[0], "", f"[rank 8] {texts[0]}", ""]
    monkeypatch.setenv("WORLD_SIZE", "")  # and a LOCAL_RANK that is left of another run
    monkeypatch.delenv("RANK")
    assert command.main(argv) == 2 and capsys.readouterr().err == texts[0]
    assert init_distributed().size == 1


def test_a_process_without_a_gpu_says_so_itself(rank, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    rank(3)
    assert command.main(["--model", "tiny-reasoner", "--output-dir", str(tmp_path / "run")]) == 2
    message = "[rank 3] error: process 3 of this machine has no GPU: there are 3; start as many processes\n"
    assert capsys.readouterr().err == message


def test_what_all_have_found_together_is_told_by_the_main_process(rank, capsys, monkeypatch):
    def fail(*_: object) -> None:
        raise CommonError("they differ")

    monkeypatch.setattr("seergate.distill.ablation.compare", fail)
    for number, text in ((0, "error: they differ\n"), (1, ""), (8, "")):
        rank(number)
        assert guarded(fail, command.print_error) == 2
        assert capsys.readouterr().err == text
        assert run_seergate("ablate", "block-size").stderr == text


def test_gpu_memory_is_kept_in_one_piece_unless_the_user_says_how(monkeypatch):
    for name, given, expected in (
        ("PYTORCH_ALLOC_CONF", "backend:native", None),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native", "backend:native"),
        ("", "", "expandable_segments:True"),
    ):
        for each in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            monkeypatch.setenv(each, given) if each == name else monkeypatch.delenv(each, raising=False)
        command.prepare_process()
        assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected


def test_of_the_systems_errors_those_about_files_are_the_users(rank, capsys):
    def fail(error: OSError) -> None:
        raise error

    rank(0)
    for error in (FileNotFoundError("no such model"), IsADirectoryError(21, "a directory", "rows.jsonl")):
        assert guarded(partial(fail, error), command.print_error) == 2
        assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(OSError, match="the network is down"):
        guarded(partial(fail, OSError("the network is down")), command.print_error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "text"),
    [
        pytest.param("config.json", "[rank 1] the base model model could not be loaded", marks=pytest.mark.soak),
        pytest.param("model.safetensors", "error: the processes see different weights", marks=pytest.mark.soak),
        ("gates", "error: the processes see different weights; model and init_gates must"),
        pytest.param("rows.jsonl", "error: the processes see different data", marks=pytest.mark.soak),
    ],
)
def test_what_fails_on_the_second_machine_only_is_told_by_the_main_process(config, model_dir, tmp_path, broken, text):
    places = tmp_path / "first", tmp_path / "second"
    gates = GateBank.for_model(load_base(str(model_dir)), config.gates(16))
    for place in places:
        shutil.copytree(model_dir, place / "model")
        gates.save_pretrained(place / "model" / "gates")
        (place / "model" / "rows.jsonl").write_text(json.dumps({"text": "some text to learn from " * 20}))
    file = places[1] / "model" / broken
    if broken == "gates":
        torch.manual_seed(1)
        GateBank.for_model(load_base(str(model_dir)), config.gates(16)).save_pretrained(file)
    else:  # the last byte of a configuration is a line end, which nothing needs
        there = file.read_bytes()
        file.write_bytes(there[:-2] if broken != "rows.jsonl" else there.replace(b"some", b"more"))
    file = tmp_path / "run.yaml"
    options = {"model": "model", "data": "model/rows.jsonl", "max_steps": 2, "init_gates": "model/gates"}
    options["token_cache"] = "/proc/self/cwd/tokens"  # of each process, as on a disk of its machine
    replace(config, **options).save(file)
    command = [str(ROOT / "train.py"), "--model", "model", "--config", str(file)]
    main, other = pair(command, places=places, machines=2)
    assert (main.returncode, other.returncode) == (2, 2), (main, other)
    assert text in main.stderr and main.stderr.count("error:") == 1 and "Traceback" not in main.stderr
    assert "error:" not in other.stderr and "Traceback" not in other.stderr
