"""Calibration and recurrence statistics, against what can be worked out."""

import json

import numpy as np
import pytest
import torch

from seergate import methods
from seergate.cli.main import main
from seergate.eval.calibration.query_centres import CentresCalibration
from seergate.eval.calibration.recurrence import measure_recurrence, window_of
from seergate.fingerprint import fingerprint
from seergate.methods.tri_attention import Centres
from tests.support.evictors import model_of
from tests.support.models import prompt
from tests.support.naive import Lazy, Simulation
from tests.support.running import invalid, refused


def test_windows_by_hand():
    mri = np.array([0, 1, 1, 2, 3, 5, 8, 40, 2, 3])
    assert [window_of(mri, share) for share in (0.1, 0.5, 0.8, 0.9, 1.0)] == [1, 2, 5, 8, 40]
    invalid("share is 0", window_of, mri, 0)


def test_intervals_are_those_of_the_definition():
    """From the probabilities of a plain model, recorded by the simulation."""
    model, ids = model_of(4, torch.float64), prompt(12, 3)
    mri = measure_recurrence(model, [ids[0].tolist()], max_new_tokens=31, alpha=0.04)
    generated = model.generate(input_ids=ids, max_new_tokens=31)[0, 12:]
    with Simulation(model, lambda past: None) as simulation, torch.inference_mode():
        simulation.logits(ids, generated[:-1])
    expected = []
    for past in simulation.layers.values():
        for head in range(2):
            for j in range(42):
                birth = max(0, j - 12)
                steps, group = range(max(1, birth + (j >= 12)), 31), past.group(head)
                times = [birth, *(t for t in steps if past.given[11 + t][group, j].max() >= Lazy.alpha)]
                expected.append(max(np.diff(times), default=0))
    assert mri.tolist() == expected and len(set(expected)) > 5


def test_centres_count_every_query(tmp_path):
    model, path = model_of(4), tmp_path / "centres.safetensors"
    prompts = [prompt(20, 1)[0].tolist(), prompt(30, 2)[0].tolist()]
    CentresCalibration().measure(model, prompts, path, {"made": {"model": fingerprint(model)}}, max_new_tokens=5)
    assert Centres.load(path).tokens == 50 + 2 * 4
    refused("no token was generated", measure_recurrence, model, [[3, 4, 5]], max_new_tokens=1)


def test_the_command_takes_prompts_that_ask_for_no_box(tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "which gives", "answer": "7"}')
    arguments = ["calibrate", "lazy_eviction", "--task", str(tmp_path / "mine.jsonl"), "--max-new-tokens", "9"]
    assert main([*arguments, "--out", str(tmp_path / "found")]) == 2
    assert "give another --grader: exact, contains, number" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "found"), "--grader", "exact"]) == 0


@pytest.mark.parametrize("method", ["lazy_eviction", "tri_attention"])
def test_the_command(method, tmp_path, capsys):
    target = tmp_path / "found"
    arguments = ["calibrate", method, "--problems", "2", "--max-new-tokens", "40", "--out", str(target)]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "note: fewer than 500 tokens say little of a model" in output
    if method == "lazy_eviction":
        record = json.loads(target.read_text())
        assert record["made"]["problems"] == 2 and record["made"]["max_new_tokens"] == 40
        assert 1 <= record["window"] <= 40 and f"window {record['window']}: " in output
    else:
        centres = methods.TriAttention(centres=str(target)).found
        assert centres.tokens > 80 and set(centres.made) >= {"model", "contents", "max_new_tokens", "sampling"}
    assert list(tmp_path.iterdir()) == [target]
    before = target.read_bytes()
    other = {"lazy_eviction": "tri_attention", "tri_attention": "lazy_eviction"}[method]
    wrong = tmp_path / "notes.txt"
    wrong.write_text("mine")
    (window := tmp_path / "window.json").write_text('{"window": 3}')
    capsys.readouterr()
    for given, name in ((other, target), (method, wrong), (method, window), (method, tmp_path)):
        assert main(["calibrate", given, "--problems", "2", "--max-new-tokens", "4", "--out", str(name)]) == 2
        output = capsys.readouterr()
        assert str(name) in output.err and output.err.count("\n") == 1 and "answering" not in output.out
    assert target.read_bytes() == before and wrong.read_text() == "mine"
    assert main(["calibrate", method, "--problems", "1", "--max-new-tokens", "40", "--out", str(target)]) == 0
    assert target.read_bytes() != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lazy_eviction", "--alpha", "0"], "alpha is 0.0"),
        (["lazy_eviction", "--share", "2"], "share is 2.0"),
        (["tri_attention", "--problems", "0"], "problems is 0"),
        (["tri_attention", "--task", "chain_sums"], "did you mean 'chain_sum'"),
        (
            ["tri_attention", "--model", "org/other"],
            "task is missing, and chain_sum, the default, is for tiny-reasoner",
        ),
    ],
)
def test_the_command_refuses(arguments, message, capsys):
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err
