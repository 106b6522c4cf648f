"""Five hundred mutations of an adapter directory: a sentence, or exactly the gates that were saved."""

from __future__ import annotations

import json
import random
import shutil
import struct
import warnings

from safetensors.torch import load_file, save_file

from seergate import GateBank, SeergateError
from tests.test_adapter_safety import banks, same

__all__ = ["banks"]

MUTATIONS = 500


def flip_bits(path, rng):
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_in_header(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(min(len(data), 1200))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path, rng):
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def insert(path, rng):
    data = path.read_bytes()
    at = rng.randrange(len(data))
    path.write_bytes(data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:])


def cut_out(path, rng):
    data = path.read_bytes()
    at = rng.randrange(len(data))
    path.write_bytes(data[:at] + data[at + rng.randrange(1, 40) :])


def remove(path, rng):
    path.unlink()


def zero(path, rng):
    path.write_bytes(bytes(len(path.read_bytes())))


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2,
    3,
    7,
    64,
    2**31,
    10**30,
    1e308,
    float("nan"),
    "",
    "x",
    "/".join(("..", "..", "etc")),
    [],
    [1, 1],
    {},
    {"a": 1},
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
    action = rng.randrange(5)
    if action == 0:
        header[name]["shape"] = [*header[name]["shape"][::-1], 1]
    elif action == 1:
        header[name]["dtype"] = rng.choice(["F16", "I32", "F64", "BF16", "F8_E4M3"])
    elif action == 2:
        header[f"../{name}"] = header.pop(name)
    elif action == 3:
        header.pop("__metadata__")
    else:
        header["__metadata__"]["identity"] = rng.choice(
            ["", "[]", "{}", '{"gate": {"block_size": 64}, "model": {}}', "\0"]
        )
    text = json.dumps(header).encode()
    return path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def lie_about_header(path, rng):
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", rng.choice([0, 1, 2**20, 2**40, 2**63, 2**64 - 1])) + data[8:])


def exchange(path, rng):
    """The same file of the other adapter."""
    shutil.copy(path.parent.parent / "other" / path.name, path)


def exchange_tensors(path, rng):
    """Two tensors of the same shape change places: every shape is right."""
    if path.suffix != ".safetensors":
        return flip_bits(path, rng)
    tensors = load_file(path)
    a, b = "layers.0.k_proj.weight", "layers.1.k_proj.weight"
    tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()
    return save_file(tensors, path)


HARMS = [
    flip_bits,
    flip_bits,
    flip_in_header,
    truncate,
    insert,
    cut_out,
    remove,
    zero,
    edit_json,
    edit_json,
    edit_json,
    edit_header,
    lie_about_header,
    exchange,
    exchange_tensors,
]


def test_mutations(banks, tmp_path):
    """Whatever is done to the files: a sentence, or exactly the gates that were saved."""
    bank, other = banks
    bank.save_pretrained(tmp_path / "original")
    other.save_pretrained(tmp_path / "other")
    accepted, refused, rng = 0, 0, random.Random(0)
    for number in range(MUTATIONS):
        shutil.rmtree(tmp_path / "mutant", ignore_errors=True)
        shutil.copytree(tmp_path / "original", tmp_path / "mutant")
        name = rng.choice(["gate_config.json", "gate_model.safetensors"])
        harm = rng.choice(HARMS)
        harm(tmp_path / "mutant" / name, rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                found = GateBank.from_pretrained(tmp_path / "mutant")
            except SeergateError as error:
                assert str(error).strip()
                refused += 1
                continue
        accepted += 1
        assert same(found, bank), f"mutation {number}: {harm.__name__} of {name} was accepted and changed the gates"
    assert refused > 0.6 * MUTATIONS and accepted > 0, (refused, accepted)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mutant", "original", "other"]
