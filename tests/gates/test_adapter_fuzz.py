"""Mutations of an adapter directory: a sentence, or exactly the gates that were saved.

Any file is harmed, now and then two at once. They are read by themselves, by `seergate info` and by `seergate.load`,
and saved over. Nothing in them is ever run.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import seergate
from seergate import GateBank, SeergateError
from seergate.cli.main import main
from tests.gates.test_adapter_safety import Bomb, banks, same, same_tensors
from tests.support.models import tiny_model

__all__ = ["banks"]


def flip_bits(path, rng):
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path, rng):
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def remove(path, rng):
    path.unlink()


VALUES = [
    *(None, True, -1, 0, 1, 3, 64, 2**31, 10**30, 10**400, 1e308, float("nan")),
    *("", "x", "\ud800", "../" * 2 + "etc", [], [1, 1], {}, {"a": 1}),
]


def edit_json(path, rng):
    """Change, remove or rename one value anywhere in a JSON file."""
    if path.suffix != ".json":
        return flip_bits(path, rng)
    record = json.loads(path.read_text())
    places = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(record)
    node, key = rng.choice(places)
    action = rng.choice(["set", "set", "set", "delete", "rename"])
    if action == "set":
        node[key] = rng.choice(VALUES)
    elif action == "rename" and isinstance(node, dict):
        node[f"{key}x"] = node.pop(key)
    else:
        del node[key]
    return path.write_text(json.dumps(record))


def edit_header(path, rng):
    """Change the header of a safetensors file, keeping the file's form."""
    if path.suffix != ".safetensors":
        return flip_bits(path, rng)
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    name = rng.choice([key for key in header if key != "__metadata__"])
    action = rng.randrange(4)
    if action == 0:
        header[name]["shape"] = [*header[name]["shape"][::-1], 1]
    elif action == 1:
        header[name]["dtype"] = rng.choice(["F16", "I32", "F64", "BF16", "F8_E4M3"])
    elif action == 2:
        header[f"../{name}"] = header.pop(name)
    else:
        header.pop("__metadata__")
    text = json.dumps(header).encode()
    length = rng.choice([len(text), len(text), 0, 2**40, 2**64 - 1])
    return path.write_bytes(struct.pack("<Q", length) + text + data[8 + size :])


def exchange(path, rng):
    """The same file of the other adapter, or another file of this one."""
    theirs = path.parent.parent / "other" / path.name
    if not theirs.is_file():
        theirs = rng.choice(sorted(path.parent.iterdir()))
    path.write_bytes(theirs.read_bytes())


def exchange_tensors(path, rng):
    """Two tensors of the same shape change places: every shape is right."""
    tensors = load_file(path) if path.suffix == ".safetensors" else {}
    pairs = [(a, b) for a in tensors for b in tensors if a < b and tensors[a].shape == tensors[b].shape]
    if not pairs:
        return flip_bits(path, rng)
    a, b = rng.choice(pairs)
    tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()
    return save_file(tensors, path)


def plant_bomb(path, rng):
    """What runs when a reader unpickles, or builds what YAML names."""
    target = path.parent.parent / "exploded"
    kind = "yaml" if path.name == "README.md" else rng.choice(["pickle", "torch"])
    if kind == "yaml":
        path.write_text(f"---\nbomb: !!python/object/apply:builtins.open [{target}, w]\n---\n\nMine.\n")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(target)))
    else:
        torch.save({"layers.0.k_proj.weight": Bomb(target)}, path)


HARMS = [
    *(flip_bits, flip_bits, truncate, remove, edit_json, edit_json, edit_json),
    *(edit_header, exchange, exchange_tensors, plant_bomb),
]
"""Each takes the path of a sound file, and a source of randomness."""


def victims(directory, rng):
    """One file, now and then two: mostly the configuration or the weights, else any."""
    everything = sorted(directory.iterdir())
    vital = [path for path in everything if path.name == "gate_config.json" or path.suffix == ".safetensors"]
    count = 2 if rng.random() < 0.2 else 1
    config = directory / "gate_config.json"
    first = rng.choice([config, rng.choice(vital)]) if rng.random() < 0.75 else rng.choice(everything)
    return [first, *rng.sample([path for path in everything if path != first], count - 1)]


@pytest.fixture
def places(banks, tmp_path):
    """Two originals, the first one also without the SHA-256 of its weights, and their banks."""
    for bank, name in zip(banks, ("original", "other"), strict=True):
        bank.training_record = {
            "config": {"data": "org/data", "learning_rate": 0.001, "max_length": 64},
            "kl_last_step": 0.5,
        }
        bank.results = ({"task": "t", "method": "dense", "accuracy": 0.5, "standard_error": 0.1, "samples": 8},)
        bank.licence = {"license": "mit"}
        bank.save_pretrained(tmp_path / name)
    shutil.copytree(tmp_path / "original", tmp_path / "unsummed")
    config = tmp_path / "unsummed" / "gate_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "files"}))
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    return tmp_path, *banks


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.soak)])
def test_mutations(count, places, capsys):
    """Whatever is done to the files: a sentence, or exactly the gates that were saved."""
    root, bank, other = places
    accepted, refused, rng = 0, 0, random.Random(count)
    mutant, before = root / "mutant", sorted(path.name for path in root.iterdir())
    for number in range(count):
        shutil.rmtree(mutant, ignore_errors=True)
        origin = rng.choice(["original", "unsummed"])
        shutil.copytree(root / origin, mutant)
        what = f"mutation {number} of {origin}:"
        for path in victims(mutant, rng):
            harm = rng.choice(HARMS)
            harm(path, rng)
            what += f" {harm.__name__} of {path.name}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = check(mutant, bank, other, what)
            if number % 5 == 0:
                capsys.readouterr()
                code = main(["info", str(mutant), *rng.choice([[], ["--json"]])])
                output = capsys.readouterr()
                assert code == (2 if found is None else 0) or "surrogates" in output.err, what
                assert code == 0 or (output.err.startswith("error: ") and output.err.count("\n") == 1), what
            if number % 20 == 0 or (found is not None and accepted % 10 == 0):
                try:
                    seergate.load(mutant, token_budget=16, base_model=root / "base")
                    assert found is not None, what
                except SeergateError as error:
                    assert found is None or "for another model" in str(error) or "RoPE" in str(error), what
            if "README.md" in what and number % 2:
                bank.save_pretrained(mutant)
                assert same(GateBank.from_pretrained(mutant), bank), what
        accepted, refused = accepted + (found is not None), refused + (found is None)
    assert refused > 0.4 * count and accepted > 0.1 * count, (refused, accepted)
    shutil.rmtree(mutant, ignore_errors=True)
    assert sorted(path.name for path in root.iterdir()) == before, "something was run, or written elsewhere"


def check(mutant, bank, other, what):
    """Read it; the gates, or ``None`` if they were refused."""
    try:
        found = GateBank.from_pretrained(mutant)
    except SeergateError as error:
        assert str(error).strip(), what
        return None
    changed = ".safetensors" in what and "unsummed" in what
    assert changed or any(same_tensors(found, one) for one in (bank, other)), f"{what} changed the gates"
    # What a configuration says of its gates is believed, as long as their tensors have the shapes that it describes.
    if "gate_config.json" not in what:
        assert (found.config, found.geometry.layers) == (bank.config, bank.geometry.layers), what
    return found


def test_the_bombs_would_go_off(tmp_path):
    """The canary lives: an ordinary reader of pickles does run them."""
    target = tmp_path / "exploded"
    (tmp_path / "gates").mkdir()
    plant_bomb(tmp_path / "gates" / "config.json", random.Random(0))
    data = (tmp_path / "gates" / "config.json").read_bytes()
    torch.load(tmp_path / "gates" / "config.json", weights_only=False) if data[:2] == b"PK" else pickle.loads(data)
    assert target.exists()
