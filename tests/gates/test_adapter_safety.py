"""Adapters made by an enemy, by a faulty disk, or by a writer that was killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
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
from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def banks():
    """Two banks of different shapes."""
    torch.manual_seed(0)
    model = tiny_model("qwen3")
    return GateBank.for_model(model, GateConfig(8, 16)), GateBank.for_model(model, GateConfig(16, 8, ("avg", "max")))


def same(a: GateBank, b: GateBank) -> bool:
    if (a.config, replace(a.geometry, base_model=None)) != (b.config, replace(b.geometry, base_model=None)):
        return False
    return same_tensors(a, b)


def same_tensors(a: GateBank, b: GateBank) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
    )


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
    path, weights = tmp_path / "gate_config.json", tmp_path / "gate_model.safetensors"
    record, data = {k: v for k, v in json.loads(path.read_text()).items() if k != "files"}, weights.read_bytes()
    for field, value, most in (
        ("num_heads", 2**40, 1 << 20),
        ("head_dim", 10**30, 1 << 20),
        ("layers", list(range(10_000)), 10_000 << 10),  # a kilobyte for each that the file itself names
    ):
        path.write_text(json.dumps({**record, "model": {**record["model"], field: value}}))
        with few_bytes(most), pytest.raises(SeergateError):
            GateBank.from_pretrained(tmp_path)
    path.write_text(json.dumps(record))
    with weights.open("wb") as stream:  # a file with a hole: 64 MB of header, next to nothing on the disk
        stream.write(struct.pack("<Q", 64 << 20))
        stream.truncate((64 << 20) + 100)
    with few_bytes(), pytest.raises(SeergateError, match="not a readable safetensors file"):
        GateBank.from_pretrained(tmp_path)
    weights.write_bytes(data)
    path.write_text("[" * 200_000)
    with few_bytes(), pytest.raises(SeergateError, match="not readable JSON"):
        GateBank.from_pretrained(tmp_path)
    with pytest.raises(AssertionError), few_bytes():
        bytes(64 << 20)  # the test can tell


def test_repeated_keys_are_refused_and_weights_of_another_size_are_not_hashed(banks, tmp_path, monkeypatch):
    banks[0].save_pretrained(tmp_path)
    config, weights = tmp_path / "gate_config.json", tmp_path / "gate_model.safetensors"
    before = config.read_text(encoding="utf-8")
    config.write_text(before.replace("{", '{"files": null, ', 1), encoding="utf-8")
    with pytest.raises(SeergateError, match="'files' is given again"):
        GateBank.from_pretrained(tmp_path)
    config.write_text(before, encoding="utf-8")
    weights.write_bytes(weights.read_bytes() + b"x")
    monkeypatch.setattr("seergate.gates.files.hashlib.file_digest", lambda *_: pytest.fail("it was hashed"))
    with pytest.raises(SeergateError, match="is damaged, or not the file"):
        GateBank.from_pretrained(tmp_path)


def test_a_pickle_under_our_names_is_not_run(banks, tmp_path):
    banks[0].save_pretrained(tmp_path)
    path, target = tmp_path / "gate_config.json", tmp_path / "exploded"
    torch.save({"layers.0.k_proj.weight": Bomb(target)}, tmp_path / "gate_model.safetensors")
    with pytest.raises(SeergateError, match="its SHA-256 is another"):
        GateBank.from_pretrained(tmp_path)
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "files"}))
    with pytest.raises(SeergateError, match="not a readable safetensors file"):
        GateBank.from_pretrained(tmp_path)
    assert not target.exists()


class Bomb:
    """Unpickled by an ordinary unpickler it leaves a file behind."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return open, (self.target, "w")


class Killed(BaseException):
    """What a signal does, at a moment that the test chooses."""


def test_a_save_that_is_killed_between_two_files_is_never_taken_for_gates(banks, tmp_path, monkeypatch):
    """The old adapter, the new one, or a sentence; and saving again repairs what was left."""
    old, new = banks
    replace_file, outcomes = os.replace, []
    for fatal in range(5):
        directory, done = tmp_path / str(fatal), []
        old.save_pretrained(directory)

        def deadly(source, target, done=done, fatal=fatal):
            if len(done) == fatal:
                raise Killed
            done.append(target)
            replace_file(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", deadly)
            with contextlib.suppress(Killed):
                new.save_pretrained(directory)
        try:
            found = GateBank.from_pretrained(directory)
            outcomes.append("old" if same(found, old) else "new" if same(found, new) else "a mixture")
        except SeergateError as error:
            assert "its SHA-256 is another" in str(error)
            outcomes.append("refused")
        new.save_pretrained(directory)
        assert same(GateBank.from_pretrained(directory), new)
    assert outcomes[0] == "old" and outcomes[-1] == "new" and "a mixture" not in outcomes and "refused" in outcomes


@pytest.mark.soak
def test_killed_for_real(banks, tmp_path):
    """SIGKILL at random moments of a process that does nothing but save the same gates: whole at every moment."""
    code = (
        "import sys, seergate\n"
        "bank = seergate.GateBank.from_pretrained(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "while True: bank.save_pretrained(sys.argv[2])\n"
    )
    out, rng = tmp_path / "out", random.Random(1)
    for place in (tmp_path / "a", out):
        banks[0].save_pretrained(place)
    for _ in range(12):
        command = [sys.executable, "-c", code, str(tmp_path / "a"), str(out)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.05, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert same(GateBank.from_pretrained(out), banks[0])


def test_a_full_disk_leaves_the_old_adapter(banks, tmp_path):
    old, new = banks
    old.save_pretrained(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # what the kernel then says is as final as a full disk
    try:
        with pytest.raises(SeergateError, match="cannot be written to .*File too large"):
            new.save_pretrained(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert same(GateBank.from_pretrained(tmp_path), old)
    assert not list(tmp_path.glob(".saving-*"))


def test_places_that_cannot_be_written_to(banks, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("/proc/foo", tmp_path / "file" / "below"):
        with pytest.raises(SeergateError, match="cannot be written to"):
            banks[0].save_pretrained(place)
    with pytest.raises(SeergateError, match="is a file"):
        banks[0].save_pretrained(tmp_path / "file")


def test_gates_that_could_not_be_read_back_are_not_saved(banks, tmp_path):
    bank = banks[0].derived()
    bank.gate(1).k_proj.weight.data[0, 0, 0] = torch.nan
    with pytest.raises(SeergateError, match=r"layers\.1\.k_proj\.weight holds values that are not finite"):
        bank.save_pretrained(tmp_path / "gates")
    assert not Path(tmp_path / "gates").exists()
