"""Weights that are missing or damaged are noticed before the data is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from seergate.distill import TrainConfig, run_distillation
from seergate.distill.weight_files import check_weight_files
from seergate.errors import SeergateError
from tests.distill.test_trainer import config, model_dir  # noqa: F401 (fixtures)


@pytest.fixture(scope="module")
def sharded(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The same model in several files."""
    directory = tmp_path_factory.mktemp("sharded")
    shutil.copytree(model_dir, directory, dirs_exist_ok=True)
    (directory / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    return directory


def a_shard(directory: Path) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[1]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def lose_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    tensors.pop(min(tensors))
    save_file({**tensors, "other": torch.zeros(1)}, file, metadata={"format": "pt"})


def refused_before_the_data_is_looked_for(config: TrainConfig, model: Path, why: str) -> None:  # noqa: F811
    """In one sentence that names the model."""
    with pytest.raises(SeergateError, match=why) as caught:
        run_distillation(replace(config, model=str(model), data="/does/not/exist.jsonl"))
    assert "\n" not in str(caught.value) and str(model) in str(caught.value)


WHOLE: list[tuple[Callable[[Path], object], str]] = [
    (Path.unlink, "holds no weights; it must hold model.safetensors"),
    (cut, "model.safetensors are damaged or incomplete"),
    (lengthen, "model.safetensors are damaged or incomplete"),
    (lambda file: file.write_bytes(b""), "model.safetensors are damaged or incomplete"),
    (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), "are damaged or incomplete"),
]
SHARDS: list[tuple[Callable[[Path], object], str]] = [
    (lambda d: a_shard(d).unlink(), "are missing, which model.safetensors.index.json names"),
    (lambda d: cut(a_shard(d)), "are damaged or incomplete"),
    (lambda d: lose_a_tensor(a_shard(d)), r"lack .*, which model.safetensors.index.json names"),
    (lambda d: (d / "model.safetensors.index.json").write_text("{"), "is no index of weights"),
    (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": []}'), "is no index of weights"),
]


@pytest.mark.parametrize(("damage", "why"), WHOLE)
def test_a_file_that_is_missing_or_damaged(
    config: TrainConfig,  # noqa: F811
    model_dir: Path,  # noqa: F811
    tmp_path: Path,
    damage: Callable[[Path], object],
    why: str,
) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "model")
    damage(copy / "model.safetensors")
    refused_before_the_data_is_looked_for(config, copy, why)


@pytest.mark.parametrize(("damage", "why"), SHARDS)
def test_a_shard_that_is_missing_or_damaged(
    config: TrainConfig,  # noqa: F811
    sharded: Path,
    tmp_path: Path,
    damage: Callable[[Path], object],
    why: str,
) -> None:
    copy = shutil.copytree(sharded, tmp_path / "model")
    damage(copy)
    refused_before_the_data_is_looked_for(config, copy, why)


def test_whole_models_pass_in_every_form(model_dir: Path, sharded: Path, tmp_path: Path) -> None:  # noqa: F811
    check_weight_files(model_dir)
    check_weight_files(sharded)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    check_weight_files(tmp_path)
    index = {"weight_map": dict.fromkeys(model.state_dict(), "pytorch_model.bin")}
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-1.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(
        SeergateError, match=r"pytorch_model.bin are missing, which pytorch_model.bin.index.json names"
    ):
        check_weight_files(tmp_path)
    (tmp_path / "pytorch_model-1.bin").rename(tmp_path / "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "old.bin")
    shutil.copy(model_dir / "model.safetensors", tmp_path / "named.safetensors")
    check_weight_files(tmp_path, "named.safetensors")
    with pytest.raises(SeergateError, match=r"holds no weights; it must hold other.safetensors"):
        check_weight_files(tmp_path, "other.safetensors")
