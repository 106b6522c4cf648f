"""Adapters that are hostile, damaged, or left by a process that was killed while saving."""

import contextlib
import json
import os
import random
import resource
import shutil
import struct
import tracemalloc
import warnings

import pytest
import torch

from seergate import GateBank, GateConfig, SeergateError
from seergate.cli.main import main
from tests.gates.conftest import CONFIG, GONE, WEIGHTS, same, same_tensors, set_entries
from tests.support.models import tiny_model
from tests.support.running import refused


@pytest.fixture
def banks():
    """Two banks of different shapes."""
    model = tiny_model("qwen3")
    return GateBank.for_model(model, GateConfig(8, 16)), GateBank.for_model(model, GateConfig(16, 8, ("avg", "max")))


@contextlib.contextmanager
def few_bytes(most=1 << 20):
    """Inside, Python allocates no more than this."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak} bytes"


class Bomb:
    """An ordinary unpickler that reads it makes a file."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return open, (self.target, "w")


def test_hostile_files_cost_little_memory_and_run_nothing(banks, tmp_path, monkeypatch):
    gates, target = tmp_path / "gates", tmp_path / "exploded"
    banks[0].save_pretrained(gates)
    path, weights = gates / CONFIG, gates / WEIGHTS
    before, data = path.read_text(), weights.read_bytes()

    def cheaply_refused(message, most=1 << 20):
        with few_bytes(most):
            refused(message, GateBank.from_pretrained, gates)

    with pytest.raises(AssertionError), few_bytes():
        bytes(64 << 20)
    with monkeypatch.context() as patch:
        patch.setattr("seergate.gates.files.hashlib.file_digest", lambda *_: pytest.fail("the file was hashed"))
        weights.write_bytes(data + b"x")
        cheaply_refused("is damaged, or not the file")
    weights.write_bytes(data)
    path.write_text(before.replace("{", '{"files": null, ', 1))
    cheaply_refused("'files' is given again")
    path.write_text("[" * 200_000)
    cheaply_refused("not readable JSON")
    path.write_text(before)
    record = set_entries(path, {"files": GONE})  # the weights' SHA-256
    for name, value in (("num_heads", 2**40), ("head_dim", 10**30), ("layers", list(range(10_000)))):
        path.write_text(json.dumps({**record, "model": {**record["model"], name: value}}))
        cheaply_refused(".", 10_000 << 10 if name == "layers" else 1 << 20)  # a kilobyte for each layer in the file
    path.write_text(json.dumps(record))
    with weights.open("wb") as stream:  # a sparse file with 64 MB of header
        stream.write(struct.pack("<Q", 64 << 20))
        stream.truncate((64 << 20) + 100)
    cheaply_refused("not a readable safetensors file")
    torch.save({"layers.0.k_proj.weight": Bomb(target)}, weights)
    cheaply_refused("not a readable safetensors file")
    assert not target.exists()
    torch.load(weights.rename(gates / "bomb.pt"), weights_only=False)
    assert target.exists(), "an ordinary reader runs it"


def test_a_save_that_is_killed_between_two_files_leaves_no_mixture(banks, tmp_path, monkeypatch):
    """What is left are the old gates, the new ones, or an error; saving again repairs it."""
    old, new = banks
    replace_file, outcomes = os.replace, []
    for fatal in range(5):
        directory, done = tmp_path / str(fatal), []
        old.save_pretrained(directory)

        def deadly(source, target, done=done, fatal=fatal):
            if len(done) == fatal:
                raise KeyboardInterrupt
            done.append(target)
            replace_file(source, target)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", deadly)
            new.save_pretrained(directory)
        try:
            bank = GateBank.from_pretrained(directory)
            outcomes.append("old" if same(bank, old) else "new" if same(bank, new) else "a mixture")
        except SeergateError as error:
            assert "its SHA-256 is another" in str(error)
            outcomes.append("refused")
        new.save_pretrained(directory)
        assert same(GateBank.from_pretrained(directory), new)
    assert outcomes[0] == "old" and outcomes[-1] == "new" and "a mixture" not in outcomes and "refused" in outcomes


def test_what_cannot_be_saved_leaves_the_old_adapter(banks, tmp_path):
    old, new = banks
    old.save_pretrained(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # like a full disk
    try:
        refused("cannot be written to .*File too large", new.save_pretrained, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for place in ("/proc/foo", tmp_path / CONFIG / "below"):
        refused("cannot be written to", old.save_pretrained, place)
    new.gate(1).k_proj.weight.data[0, 0, 0] = torch.nan
    refused(r"layers\.1\.k_proj\.weight holds values that are not finite", new.save_pretrained, tmp_path)
    assert same(GateBank.from_pretrained(tmp_path), old) and not list(tmp_path.glob(".saving-*"))


VALUES = [
    *(None, True, -1, 0, 1, 3, 64, 2**31, 10**30, 10**400, 1e308, float("nan")),
    *("", "x", "\ud800", "../../etc", [], [1, 1], {}, {"a": 1}),
]


def flip_bits(path, rng):
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def places(node):
    """All places of a JSON value, as (dictionary or list, key)."""
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from places(node[key])


def edit_json(path, rng):
    """Change, remove or rename an entry of a JSON file, or of the header of a safetensors file."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0] if path.suffix == ".safetensors" else 0
    if path.suffix not in (".json", ".safetensors"):
        return flip_bits(path, rng)
    record = json.loads(data[8:start] if start else data)
    node, key = rng.choice(list(places(record)))
    old, action = node.pop(key), rng.choice(["set", "set", "set", "delete", "rename"])
    if action != "delete" and isinstance(node, dict):
        node[f"../{key}" if action == "rename" else key] = old if action == "rename" else rng.choice(VALUES)
    elif action != "delete":
        node.insert(key, rng.choice(VALUES))
    text = json.dumps(record).encode()
    size = struct.pack("<Q", rng.choice([len(text), len(text), 0, 2**40, 2**64 - 1])) if start else b""
    return path.write_bytes(size + text + (data[start:] if start else b""))


def truncate(path, rng):
    path.unlink() if rng.random() < 0.5 else path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


HARMS = [flip_bits, flip_bits, truncate, truncate, *[edit_json] * 4]


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.soak)])
def test_mutations(count, banks, tmp_path, capsys):
    """A file is changed at random: an error, or exactly the gates that were saved, also by `seergate info`."""
    bank, _ = banks
    bank.training_record, bank.licence = {"config": {"data": "org/data"}, "kl_last_step": 0.5}, {"license": "mit"}
    bank.results = ({"task": "t", "method": "dense", "accuracy": 0.5, "standard_error": 0.1, "samples": 8},)
    for name in ("original", "unsummed"):
        bank.save_pretrained(tmp_path / name)
    set_entries(tmp_path / "unsummed" / CONFIG, {"files": GONE})
    warnings.simplefilter("ignore", UserWarning)
    accepted, refused, rng, mutant = 0, 0, random.Random(count), tmp_path / "mutant"
    for number in range(count):
        shutil.rmtree(mutant, ignore_errors=True)
        origin = rng.choice(["original", "unsummed"])
        shutil.copytree(tmp_path / origin, mutant)
        path = mutant / rng.choice([CONFIG, CONFIG, WEIGHTS, rng.choice(sorted(mutant.iterdir())).name])
        harm = rng.choice(HARMS)
        harm(path, rng)
        what = f"mutation {number} of {origin}: {harm.__name__} of {path.name}"
        try:
            gates = GateBank.from_pretrained(mutant)
            accepted += 1
            # Tensors that no SHA-256 protects may have changed; a record that fits the tensors is believed.
            assert (origin == "unsummed" and path.name == WEIGHTS) or same_tensors(gates, bank), what
            assert path.name == CONFIG or (gates.config, gates.geometry) == (bank.config, bank.geometry), what
        except SeergateError as error:
            gates, refused = None, refused + 1
            assert str(error).strip(), what
        if number % 5 == 0:
            capsys.readouterr()
            code = main(["info", str(mutant), *rng.choice([[], ["--json"]])])
            error = capsys.readouterr().err
            assert code == (2 if gates is None else 0) or "surrogates" in error, what
            assert code == 0 or (error.startswith("error: ") and error.count("\n") == 1), what
    assert refused > 0.4 * count and accepted > 0.1 * count, (refused, accepted)
