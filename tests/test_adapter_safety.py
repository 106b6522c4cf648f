"""Adapters made by an enemy, by a faulty disk, or by a writer that was killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seergate import GateBank, GateConfig, SeergateError
from seergate.gates import layout, saving
from tests.models import tiny_model


@pytest.fixture(scope="module")
def banks():
    """Two banks of different shapes."""
    torch.manual_seed(0)
    model = tiny_model("qwen3")
    return GateBank.for_model(model, GateConfig(8, 16)), GateBank.for_model(model, GateConfig(16, 8, ("avg", "max")))


def same(a: GateBank, b: GateBank) -> bool:
    if (a.config, replace(a.geometry, base_model=None)) != (b.config, replace(b.geometry, base_model=None)):
        return False
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
    )


# ---- chosen attacks


def test_each_difference_between_configuration_and_weights_is_named(banks, tmp_path):
    bank, _ = banks
    bank.save_pretrained(tmp_path)
    path = tmp_path / "gate_config.json"
    original = json.loads(path.read_text())
    for section, field, value in (
        ("gate", "block_size", 16),
        ("gate", "k_pooling", ["min", "max", "avg"]),
        ("model", "model_type", "llama"),
        ("model", "attention_scaling", 2.0),
        ("model", "inv_freq", [0.5] * 8),
        ("model", "hidden_size", 65),
    ):
        record = json.loads(json.dumps(original))
        record[section][field] = value
        path.write_text(json.dumps(record))
        with pytest.raises(SeergateError, match=f"do not belong together: {field} is .* in gate_config.json and"):
            GateBank.from_pretrained(tmp_path)
    record = json.loads(json.dumps(original))
    record["dtype"] = "bfloat16"
    path.write_text(json.dumps(record))
    with pytest.raises(SeergateError, match="dtype is 'bfloat16', but the tensor .* is float32"):
        GateBank.from_pretrained(tmp_path)
    record["dtype"], record["model"]["base_model"] = "float32", "org/renamed"
    path.write_text(json.dumps(record))
    assert GateBank.from_pretrained(tmp_path).geometry.base_model == "org/renamed", "a name may be changed by hand"


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/gate_model.safetensors", "weights.pkl", ""]
)
def test_files_elsewhere_are_not_read(name, banks, tmp_path):
    banks[0].save_pretrained(tmp_path / "gates")
    shutil.copy(tmp_path / "gates" / "gate_model.safetensors", tmp_path / "secret.safetensors")
    path = tmp_path / "gates" / "gate_config.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "files": {name: {}}}))
    with pytest.raises(SeergateError, match="which is no weights file of an adapter"):
        GateBank.from_pretrained(tmp_path / "gates")
    del record["files"]
    path.write_text(json.dumps(record))
    (tmp_path / "gates" / "gate_model.safetensors").unlink()
    index = {"weight_map": {"layers.0.k_proj.weight": name}}
    (tmp_path / "gates" / "gate_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SeergateError, match="which is no weights file of an adapter"):
        GateBank.from_pretrained(tmp_path / "gates")


@contextmanager
def few_bytes(most=1 << 20):
    """Python's own memory never exceeds this inside."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak} bytes"


def test_a_huge_header_and_a_huge_model_cost_nothing(banks, tmp_path):
    banks[0].save_pretrained(tmp_path)
    weights = tmp_path / "gate_model.safetensors"
    data = weights.read_bytes()
    with weights.open("wb") as stream:  # a file with a hole: 64 MB of header, next to nothing on the disk
        stream.write(struct.pack("<Q", 64 << 20))
        stream.truncate((64 << 20) + 100)
    with few_bytes(), pytest.raises(SeergateError, match="its header would have"):
        GateBank.from_pretrained(tmp_path)
    weights.write_bytes(data)
    path = tmp_path / "gate_config.json"
    original = path.read_text()
    for field, value, most in (
        ("num_heads", 2**40, 1 << 20),
        ("head_dim", 10**30, 1 << 20),
        ("layers", list(range(100_000)), 100_000 << 10),  # a kilobyte for each that the file itself names
    ):
        record = json.loads(original)
        record["model"][field] = value
        path.write_text(json.dumps(record))
        with few_bytes(most), pytest.raises(SeergateError):
            GateBank.from_pretrained(tmp_path)
    path.write_text("[" * 200_000)
    with few_bytes(), pytest.raises(SeergateError, match="not readable JSON"):
        GateBank.from_pretrained(tmp_path)
    with pytest.raises(AssertionError), few_bytes():
        bytes(64 << 20)  # the test can tell


def test_a_pickle_under_our_names_is_not_run(banks, tmp_path):
    banks[0].save_pretrained(tmp_path)
    target = tmp_path / "exploded"
    torch.save({"layers.0.k_proj.weight": Bomb(target)}, tmp_path / "gate_model.safetensors")
    with pytest.raises(SeergateError, match="not a readable safetensors file"):
        GateBank.from_pretrained(tmp_path)
    assert not target.exists()


class Bomb:
    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return open, (self.target, "w")


# ---- interrupted saves


class Killed(BaseException):
    """What a signal does, for a test that wants to choose the moment."""


STEPS = ["replace", "rename", "fsync", "rmdir", "unlink"]


@pytest.mark.parametrize("sizes", [("5GB", "5GB"), (4000, "5GB"), ("5GB", 4000), (4000, 3000)])
def test_killed_at_every_step(sizes, banks, tmp_path, monkeypatch):
    """A save that stops at any of its steps leaves the old adapter or the new one, for readers and for later saves."""
    old, new = banks
    before, after = sizes
    outcomes, moment = [], 0
    while True:
        directory = tmp_path / str(moment)
        old.save_pretrained(directory, max_shard_size=before)
        with monkeypatch.context() as patch:
            steps = count_steps(patch, moment)
            try:
                new.save_pretrained(directory, max_shard_size=after)
                finished = True
            except Killed:
                finished = False
        assert steps
        found = GateBank.from_pretrained(directory)
        assert same(found, old) or same(found, new)
        outcomes.append(same(found, new))
        old.save_pretrained(directory, max_shard_size=before)
        assert same(GateBank.from_pretrained(directory), old), "saving again repairs what was left"
        weights = {path.name for path in directory.glob("*.safetensors")}
        assert weights == set(json.loads((directory / "gate_config.json").read_text())["files"])
        assert not (directory / layout.PENDING).exists()
        if finished:
            break
        moment += 1
    assert moment > 8 and outcomes == sorted(outcomes), "from some step on it is the new one"


def count_steps(patch, fatal):
    """Make the ``fatal``-th step of the file system a kill; cleaning up is not done by the dead."""
    steps = []

    def deadly(function):
        def wrapper(*args, **kwargs):
            if len(steps) >= fatal:
                steps.append(function.__name__)
                raise Killed
            steps.append(function.__name__)
            return function(*args, **kwargs)

        return wrapper

    for name in STEPS:
        patch.setattr(os, name, deadly(getattr(os, name)))
    patch.setattr(saving.shutil, "rmtree", lambda *args, **kwargs: None)
    return steps


@pytest.mark.slow
def test_killed_for_real(banks, tmp_path):
    """SIGKILL at random moments of a process that does nothing but save."""
    for place, bank in zip(("a", "b"), banks, strict=True):
        bank.save_pretrained(tmp_path / place)
    code = (
        "import sys, seergate\n"
        "a, b, out = sys.argv[1:]\n"
        "banks = [seergate.GateBank.from_pretrained(place) for place in (a, b)]\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    for bank in banks: bank.save_pretrained(out, max_shard_size=5000)\n"
    )
    out, rng = tmp_path / "out", random.Random(1)
    banks[0].save_pretrained(out)
    for _ in range(6):
        arguments = [str(tmp_path / "a"), str(tmp_path / "b"), str(out)]
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.05, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = GateBank.from_pretrained(out)
        assert same(found, banks[0]) or same(found, banks[1])


@pytest.mark.slow
def test_two_writers(banks, tmp_path):
    """As when every process of a launcher saves to the same place."""
    for place, bank in zip(("a", "b"), banks, strict=True):
        bank.save_pretrained(tmp_path / place)
    code = (
        "import sys, seergate\n"
        "bank = seergate.GateBank.from_pretrained(sys.argv[1])\n"
        "for _ in range(40): bank.save_pretrained(sys.argv[2])\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / place), str(tmp_path / "out")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in ("a", "b")
    ]
    for process in processes:
        assert process.communicate(timeout=120)[1] == "" and process.returncode == 0
    found = GateBank.from_pretrained(tmp_path / "out")
    assert same(found, banks[0]) or same(found, banks[1])


def test_what_a_killed_writer_left_long_ago_is_removed(banks, tmp_path):
    for name, age in (("old", 7200), ("new", 60)):
        scratch = tmp_path / f"{layout.SCRATCH}{name}"
        scratch.mkdir()
        os.utime(scratch, (time.time() - age,) * 2)
    banks[0].save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob(f"{layout.SCRATCH}*")] == [f"{layout.SCRATCH}new"]


def test_a_full_disk_leaves_the_old_adapter(banks, tmp_path, monkeypatch):
    old, new = banks
    old.save_pretrained(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_file", full)
    with pytest.raises(SeergateError, match="cannot be written to .*: No space left on device"):
        new.save_pretrained(tmp_path)
    assert same(GateBank.from_pretrained(tmp_path), old)
    assert not list(tmp_path.glob(f"{layout.SCRATCH}*"))


def test_places_that_cannot_be_written_to(banks, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("/proc/foo", tmp_path / "file" / "below"):
        with pytest.raises(SeergateError, match="cannot be written to"):
            banks[0].save_pretrained(place)
    with pytest.raises(SeergateError, match="is a file"):
        banks[0].save_pretrained(tmp_path / "file")


def test_gates_that_could_not_be_read_back_are_not_saved(banks, tmp_path):
    bank = GateBank.from_adapter(banks[0].to_adapter())
    bank.gate(1).k_proj.weight.data[0, 0, 0] = torch.nan
    with pytest.raises(SeergateError, match=r"layers\.1\.k_proj\.weight holds values that are not finite"):
        bank.save_pretrained(tmp_path / "gates")
    assert not Path(tmp_path / "gates").exists()
