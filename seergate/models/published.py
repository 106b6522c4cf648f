"""The published format of SeerAttention-R gates: `config.json` with `seerattn_*`, and `attn_gate_weights.pth`.

Source: microsoft/SeerAttention at aba03e3, `seer_attn/decode_sparse` and `distillation_decode.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from seergate.config import POOLINGS, GateConfig
from seergate.errors import SeergateError, first_line
from seergate.gates import Gates, fetch
from seergate.gates import files as adapter_files
from seergate.gates.files import read_json, write_json, written
from seergate.models.families import gate_geometry
from seergate.models.loading import base_config, skeleton
from seergate.paths import is_hub_id

CONFIG_FILE, WEIGHTS_FILE = "config.json", "attn_gate_weights.pth"

_PREFIX = "model.layers.{layer}.self_attn.attn_gate."
_KEY = re.compile(r"model\.layers\.(\d+)\.self_attn\.attn_gate\.(\w+)\.weight")
_MEMBERS = {
    "attngate_linear_q": "q_proj",
    "attngate_linear_k": "k_proj",
    "attngate_qnorm": "q_norm",
    "attngate_knorm": "k_norm",
}
_Q_POOLINGS = {"Qproj": "proj", "Qavgproj": "avgproj", "Qavg": "avg"}
# defaults of the published configuration classes
_DEFAULTS: dict[str, Any] = {
    "seerattn_k_seq_pooling_type": "Kmaxminavg",
    "seerattn_q_head_pooling_type": "Qproj",
    "seerattn_gate_block_size": 64,
    "seerattn_gate_hidden_size": 128,
    "seerattn_use_rope": True,
}
_RECORD = "published_config"

G = TypeVar("G", bound=Gates)


def load_gates(kind: type[G], source: str | os.PathLike[str], **hub: Any) -> G:
    """Read gates in either format from a directory or the Hub (`seergate.gates.fetch`), as an instance of ``kind``."""
    files = [adapter_files.CONFIG_FILE, adapter_files.WEIGHTS_FILE, CONFIG_FILE, WEIGHTS_FILE]
    directory = fetch(str(source), patterns=files, **hub)
    if (directory / adapter_files.CONFIG_FILE).is_file() or not _is_published(directory):
        return adapter_files.read_adapter(directory, kind, source)
    return read_published(kind, directory, source)


def read_published(kind: type[G], directory: Path, source: str | os.PathLike[str]) -> G:
    """Read gates in the published format.

    The weights are a pickle, which is read by PyTorch's weights-only unpickler. Each layer must have 2 tensors, or 4
    with q/k norm, and no others are allowed. The gates' default is ``compat="published"``, so that they decode like
    the published code. ``source`` is the user's name for the directory. Raises `SeergateError` if a file is missing,
    damaged or inconsistent.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise SeergateError(
                f"{directory} holds no {name}; the published format has {CONFIG_FILE} and {WEIGHTS_FILE}"
            )
    config = _read_config(directory / CONFIG_FILE)
    weights = _read_weights(directory / WEIGHTS_FILE)
    tensors = _rename(weights, directory / WEIGHTS_FILE)
    base = config.get("base_model")
    if base is not None and not isinstance(base, str):
        raise SeergateError(f"{directory / CONFIG_FILE}: base_model is {base!r}; it must be a Hub id or a directory")
    where = str(directory / CONFIG_FILE)
    layers = len({name.split(".")[1] for name in tensors})
    if config.get("num_hidden_layers") != layers:
        stated = config.get("num_hidden_layers")
        raise SeergateError(f"{where}: num_hidden_layers is {stated!r}, but the weights are of {layers} layers")
    gate = _gate_config(config, tensors, where)
    geometry = gate_geometry(_skeleton(config, where), gate)
    geometry = replace(geometry, base_model=base, base_revision=None)
    imported_from = str(source) if is_hub_id(str(source)) else Path(source).resolve().name
    return kind.holding(
        tensors,
        str(source),
        config=gate,
        geometry=geometry,
        training={"imported_from": imported_from, _RECORD: config},
        decode_defaults={"compat": "published"},
    )


def export_published(bank: Gates, directory: str | os.PathLike[str]) -> Path:
    """Write gates in the published format; raise `SeergateError` if they do not fit it, or to overwrite a model."""
    gate, geometry = bank.config, bank.geometry
    _check_exportable(bank)
    recorded = bank.training_record.get(_RECORD)
    if isinstance(recorded, dict):
        config = dict(recorded)
    elif geometry.base_model is None:
        raise SeergateError("the gates do not say which model they are for")
    else:
        base = base_config(geometry.base_model, revision=geometry.base_revision)
        config = _as_published(base.get_text_config().to_dict())
    config |= {
        "base_model": geometry.base_model,
        "seerattn_k_seq_pooling_type": "K" + "".join(gate.k_pooling),
        "seerattn_q_head_pooling_type": {ours: theirs for theirs, ours in _Q_POOLINGS.items()}[gate.q_pooling],
        "seerattn_gate_block_size": gate.block_size,
        "seerattn_gate_hidden_size": gate.gate_dim,
        "seerattn_use_qk_norm": gate.qk_norm,
        "seerattn_use_rope": gate.rope,
    }
    if problems := geometry.mismatches(gate_geometry(_skeleton(config, str(directory)), gate)):
        raise SeergateError(f"{geometry.base_model} is not what these gates were trained on: {'; '.join(problems)}")
    if config.get("seerattn_sparsity_method") not in ("threshold", "nz_ratio"):  # others are refused there
        config["seerattn_sparsity_method"] = "threshold"
    members = {ours: theirs for theirs, ours in _MEMBERS.items()}
    weights = {}
    for name, tensor in bank.state_dict().items():
        _, layer, member, _ = name.split(".")
        weights[f"{_PREFIX.format(layer=layer)}{members[member]}.weight"] = tensor.detach().cpu().contiguous()
    out = Path(directory)
    if (out / CONFIG_FILE).exists() and not _is_published(out):
        raise SeergateError(f"{out} holds a {CONFIG_FILE} of something else; name another directory")
    with written(out) as scratch:
        try:
            torch.save(weights, scratch / WEIGHTS_FILE)
        except RuntimeError as error:  # a full disk
            raise OSError(error) from error
        write_json(scratch / CONFIG_FILE, config)
    return out


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict) or not any(key.startswith("seerattn_") for key in config):
        raise SeergateError(f"{path} has no seerattn_ entries; these are not gates in the published format")
    if "seerattn_gate_type" in config:
        raise SeergateError(
            f"{path} describes gates for sparse prefill; seergate decodes sparsely and cannot use them"
        )
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Read a dictionary of tensors with PyTorch's weights-only unpickler."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged archives and pickles raise any exception
        raise SeergateError(f"{path} is not a readable file of PyTorch tensors: {first_line(error)}") from error
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        for name, tensor in weights.items()
    ):
        raise SeergateError(f"{path} must hold a dictionary of dense tensors")
    return dict(weights)


def _rename(weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in weights.items():
        if ".attn_gate.mask_linear_" in name:
            raise SeergateError(f"{path} holds gates for sparse prefill ({name}); seergate cannot use them")
        match = _KEY.fullmatch(name)
        if match is None or match[2] not in _MEMBERS:
            raise SeergateError(f"{path}: the tensor {name!r} belongs to no gate of the published format")
        tensors[f"layers.{int(match[1])}.{_MEMBERS[match[2]]}.weight"] = tensor
    if not tensors:
        raise SeergateError(f"{path} holds no tensors")
    return tensors


def _gate_config(config: dict[str, Any], tensors: dict[str, Tensor], where: str) -> GateConfig:
    """Return the gates' architecture; q/k norm is detected from the tensors (published code ignores its entry)."""
    values = {**_DEFAULTS, **{key: value for key, value in config.items() if key in _DEFAULTS}}
    q_pooling = values["seerattn_q_head_pooling_type"]
    if q_pooling not in _Q_POOLINGS:
        raise SeergateError(
            f"{where}: seerattn_q_head_pooling_type is {q_pooling!r}; it must be one of {', '.join(_Q_POOLINGS)}"
        )
    k_pooling = str(values["seerattn_k_seq_pooling_type"])
    kinds = re.findall("|".join(POOLINGS), k_pooling)
    if k_pooling != "K" + "".join(kinds) or not kinds:
        raise SeergateError(f"{where}: seerattn_k_seq_pooling_type is {k_pooling!r}; it must be like 'Kmaxminavg'")
    qk_norm = any(name.endswith("_norm.weight") for name in tensors)
    stated = config.get("seerattn_use_qk_norm")
    if isinstance(stated, bool) and stated != qk_norm:
        tensors_say = "have" if qk_norm else "lack"
        raise SeergateError(f"{where}: seerattn_use_qk_norm is {stated}, but the weights {tensors_say} norms")
    try:
        return GateConfig(
            block_size=values["seerattn_gate_block_size"],
            gate_dim=values["seerattn_gate_hidden_size"],
            k_pooling=tuple(kinds),
            q_pooling=_Q_POOLINGS[q_pooling],
            qk_norm=qk_norm,
            rope=values["seerattn_use_rope"],
        )
    except ValueError as error:
        raise SeergateError(f"{where}: {error}") from error


def _skeleton(config: dict[str, Any], where: str) -> Any:
    """Build the base model without weights from its configuration, which the published format includes."""
    from transformers import AutoConfig

    dropped = {"model_type", "base_model", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version"}
    dropped |= {"_attn_implementation_autoset", "_name_or_path", "use_flash_rope", "fused_norm"}
    kept = {key: value for key, value in config.items() if key not in dropped and not key.startswith("seerattn_")}
    scaling, theta = kept.pop("rope_scaling", None) or {}, kept.pop("rope_theta", None)
    if scaling or theta is not None:  # as transformers 5 has it
        kind = scaling.get("type", "default")  # the older name of "rope_type"
        kept["rope_parameters"] = {"rope_type": kind, **scaling} | ({} if theta is None else {"rope_theta": theta})
    try:
        return skeleton(AutoConfig.for_model(config.get("model_type"), **kept))
    except SeergateError as error:
        raise SeergateError(f"{where}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise SeergateError(f"{where}: no model can be built from it: {first_line(error)}") from error


def _check_exportable(bank: Gates) -> None:
    gate, geometry, dense = bank.config, bank.geometry, bank.decode_defaults.get("dense_layers")
    q_poolings, layers = _Q_POOLINGS.values(), len(geometry.layers)
    in_order = tuple(kind for kind in POOLINGS if kind in gate.k_pooling)
    needs = (
        (gate.scorer == "attn_gate", f"scorer is {gate.scorer!r} (they have attn_gate)"),
        (gate.q_pooling in q_poolings, f"q_pooling is {gate.q_pooling!r} (they have {', '.join(q_poolings)})"),
        (
            geometry.model_type in ("qwen2", "qwen3"),
            f"model_type is {geometry.model_type!r} (they have qwen2 and qwen3)",
        ),
        (gate.block_size in (16, 32, 64), f"block_size is {gate.block_size} (they have 16, 32 and 64)"),
        (gate.k_pooling == in_order, f"k_pooling is {gate.k_pooling} (they have the order max, min, avg)"),
        (
            gate.gate_dim == geometry.head_dim,
            f"gate_dim is {gate.gate_dim} (their decoding needs the head dimension, {geometry.head_dim})",
        ),
        (geometry.num_layers in (None, layers), f"only {layers} of {geometry.num_layers} layers have gates"),
        (gate.sink_blocks == 0, f"sink_blocks is {gate.sink_blocks} (they have none)"),
        (not dense, f"dense_layers is {dense} by default (the format cannot hold it)"),
    )
    if problems := [problem for holds, problem in needs if not holds]:
        raise SeergateError(f"the published code cannot use these gates: {'; '.join(problems)}")


def _as_published(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a base model's configuration to that of transformers 4, to which the published code is pinned."""
    rope = config.pop("rope_parameters", None) or {}
    theta = rope.pop("rope_theta", None)
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    config["torch_dtype"] = config.pop("dtype", None)
    if theta is not None:
        config["rope_theta"] = theta
        config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    return config


def _is_published(directory: Path) -> bool:
    """Return whether a directory holds gates in the published format, even if they are damaged."""
    try:
        _read_config(directory / CONFIG_FILE)
    except SeergateError:
        return (directory / WEIGHTS_FILE).is_file()
    return True
