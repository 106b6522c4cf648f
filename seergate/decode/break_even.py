"""From which length on choosing blocks pays on this machine: what ``dense_below="auto"`` becomes when it is attached.

Both kinds of step are timed once per machine and shape (`step_times`). The outcome is kept in a small file in the
user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from seergate.config import is_int
from seergate.decode.step_times import Times, step_times
from seergate.errors import SeergateError
from seergate.hf import families
from seergate.hf.rope import Rotary
from seergate.methods.base import LayerSpec, Method
from seergate.methods.selecting import SelectingMethod, SelectingState
from seergate.ops.backend import choose


def break_even(times: Times) -> int:
    """Up to which length a dense step is faster: 0 if it nowhere is. Between the longest length at which it is and the
    next one the difference counts as linear; of what is longer than all of them nothing is known, and nothing said.
    """
    lost = [i for i, (_, dense, sparse) in enumerate(times) if sparse >= dense]
    if not lost:
        return 0
    length, dense, sparse = times[lost[-1]]
    if lost[-1] == len(times) - 1:
        return length
    longer, its_dense, its_sparse = times[lost[-1] + 1]
    loss, gain = sparse - dense, its_dense - its_sparse
    return length + int((longer - length) * loss / (loss + gain))


def resolved(
    method: Method, model: PreTrainedModel, modules: Sequence[tuple[int, nn.Module]], ordinary_cache: bool
) -> Method:
    """The method, with a number in the place of ``dense_below="auto"``; the same object for the same number.

    Args:
        method: any.
        model: what it is being attached to.
        modules: its layers that can be gated.
        ordinary_cache: whether the cache is neither paged nor offloaded: those are not timed.

    Raises:
        SeergateError: for another cache.
    """
    if not isinstance(method, SelectingMethod) or method.dense_below != "auto":
        return method
    if not ordinary_cache:
        raise SeergateError(
            'dense_below is "auto", which times ordinary caches; give a number of tokens with a paged or offloaded one'
        )
    number = _resolve(replace(method, dense_below=0), model, modules)
    known: dict[int, Method] = vars(method).setdefault("_resolved", {})  # a cache goes on with the same object only
    return known.setdefault(number, replace(method, dense_below=number))


def _resolve(method: SelectingMethod, model: PreTrainedModel, modules: Sequence[tuple[int, nn.Module]]) -> int:
    """By the first layer that selects; 0 if none does."""
    config = families.text_config(model)
    for layer, attention in modules:
        module: Any = attention
        device = next((w.device for w in module.parameters() if w.device.type != "meta"), model.device)
        heads, kind = int(config.num_attention_heads), families.rope_kind(config, attention)
        rotary = Rotary(families.decoder_of(model), attention, families.layer_type(config, layer), kind)
        kv_heads = heads // int(module.num_key_value_groups)
        spec = LayerSpec(layer, 1, heads, kv_heads, int(module.head_dim), model.dtype, device, rotary)
        if layer in method.rule.dense_layers or not isinstance(method.new_state(spec), SelectingState):
            continue
        extras = {"sinks": getattr(module, "sinks", None), "softcap": getattr(module, "attn_logit_softcapping", None)}
        longest = int(getattr(config, "max_position_embeddings", 1 << 20))
        about = facts(method, spec, extras, longest)
        return remembered(about, partial(step_times, method, spec, extras, longest))
    return 0


def facts(method: SelectingMethod, spec: LayerSpec, extras: dict[str, Any], longest: int) -> dict[str, Any]:
    """All that the outcome depends on, as plain JSON types: machine, versions, shape and options."""
    from seergate import __version__

    device, bank = spec.device, getattr(method, "bank", None)
    return {
        "machine": [platform.node(), platform.machine(), os.cpu_count()],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": [__version__, torch.__version__],
        "backend": choose(device),
        "shape": [spec.num_heads, spec.num_kv_heads, spec.head_dim, str(spec.dtype), longest],
        "extras": sorted(name for name, value in extras.items() if value is not None),
        "method": repr(method),
        "gate": None if bank is None else [bank.config.to_dict(), str(next(bank.parameters()).dtype)],
    }


def remembered(about: dict[str, Any], measured: Callable[[], Times]) -> int:
    """The break-even length that was measured under these `facts`, now or by an earlier process. A file that cannot be
    read, or written, only costs another measurement.
    """
    path = _place(about)
    found = _kept(path, about)
    if found is None:
        times = measured()
        found = _kept(path, about)  # another process may have been quicker: then both go by the same
    if found is None:
        found = break_even(times)
        _keep(path, {"dense_below": found, "about": about, "tokens_dense_sparse_seconds": times})
    return found


def _place(about: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # whoever runs this has no home
        cache = Path(tempfile.gettempdir())
    return cache / "seergate" / "break_even" / f"{name}.json"


def _kept(path: Path, about: dict[str, Any]) -> int | None:
    try:
        record = json.loads(path.read_text())
        number = record["dense_below"]
        return number if record["about"] == about and is_int(number) and number >= 0 else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _keep(path: Path, record: dict[str, Any]) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(record, indent=1))
        os.replace(draft, path)
