"""Whether the weights in a model's directory are all there, from the files' headers: before hours of other work."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from seergate.errors import SeergateError, first_line

# In the order in which transformers looks for them.
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OLD_WHOLE, _OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def check_weight_files(directory: Path, named: str | None = None) -> None:
    """Make sure that every file of weights is there and, if it is a `.safetensors` file, as long as its header says.

    Args:
        directory: of a model.
        named: the file of weights, or index, that the model's configuration names instead of the usual one.

    Raises:
        SeergateError: naming the file that is missing or damaged.
    """
    names = (named,) if named else (_WHOLE, _INDEX, _OLD_WHOLE, _OLD_INDEX)
    found = next((directory / name for name in names if (directory / name).is_file()), None)
    if found is None:
        raise SeergateError(f"the model directory {directory} holds no weights; it must hold {names[0]}")
    for name, tensors in (_shards(found) if found.suffix == ".json" else {found.name: set()}).items():
        file = directory / name
        if not file.is_file():
            raise SeergateError(f"the weights {file} are missing, which {found.name} names; download the model again")
        if file.suffix == ".safetensors" and (lost := tensors - _tensors(file)):
            raise SeergateError(
                f"the weights {file} lack {min(lost)}, which {found.name} names; download the model again"
            )


def _shards(index: Path) -> dict[str, set[str]]:
    """File -> the tensors that the index says it holds."""
    shards: dict[str, set[str]] = {}
    try:
        for tensor, name in json.loads(index.read_text())["weight_map"].items():
            shards.setdefault(name, set()).add(tensor)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SeergateError(f"{index} is no index of weights; download the model again") from error
    return shards


def _tensors(file: Path) -> set[str]:
    """The names of a file's tensors; its length is compared with its header on the way."""
    try:
        with safe_open(file, "pt") as opened:
            return set(opened.keys())
    except (OSError, SafetensorError) as error:
        raise SeergateError(
            f"the weights {file} are damaged or incomplete ({first_line(error)}); download the model again"
        ) from error
