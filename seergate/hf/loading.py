"""Loads base models, and base models together with their gates. Everything that needs a base model comes here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from seergate.config import DecodeConfig
from seergate.errors import SeergateError, first_line
from seergate.gates import cached_commit, is_hub_id
from seergate.gates.bank import GateBank
from seergate.hf.attach import attach
from seergate.hf.families import base_commit, family_of, gate_geometry, note_base_commit
from seergate.methods import Gate
from seergate.paths import is_directory, resolve_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from seergate.cache.offload import Offload
    from seergate.reason.paged_layer import Paging


def load(
    gates: str | os.PathLike[str],
    *,
    config: DecodeConfig | None = None,
    base_model: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    paging: Paging | None = None,
    offload: Offload | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load the gates, the base model they name at the revision they were trained for, and put them together.

    Args:
        gates: adapter directory or Hub repository.
        config: how to decode; instead, its fields may be given as keywords (``token_budget=4096``). What the adapter
            itself asks for holds unless a keyword says otherwise; of a ``config``, only ``compat="gates"`` does.
        base_model: directory or Hub id to use instead of the one the adapter names.
        revision, subfolder: of the adapter.
        token, cache_dir, local_files_only: for both, as in `huggingface_hub`.
        force_download: the adapter, even if it was downloaded before.
        paging, offload: where keys and values are kept (see `seergate.attach`).
        **options: fields of `DecodeConfig`, and ``device_map``, ``dtype``, ``quantization_config``, ... for
            `AutoModelForCausalLM.from_pretrained`.

    Returns:
        An ordinary transformers model whose ``generate`` decodes sparsely. ``seergate.handle_of(model)`` has its
        statistics and detaches.

    Raises:
        SeergateError: if gates or base model are missing or do not fit.
        ValueError: for a decode option out of range.
    """
    given = {field.name: options.pop(field.name) for field in fields(DecodeConfig) if field.name in options}
    if config is not None and not isinstance(config, DecodeConfig):
        raise SeergateError(f"config is a {type(config).__name__}; it must be a DecodeConfig")
    known = [field.name for field in fields(DecodeConfig)]
    for name in options:
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise SeergateError(f"there is no decode option {name!r}; did you mean {near[0]!r}?")
    if config is not None and given:
        raise SeergateError(f"config is given beside {', '.join(given)}; put all of it into one")
    if config is None:
        DecodeConfig(**given)  # a mistake shows before anything is downloaded
    hub: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only or None}
    bank = GateBank.from_pretrained(
        gates,
        revision=revision,
        subfolder=subfolder,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        force_download=force_download,
    )
    method = Gate.from_config(bank, config or bank.decode_config(**given))
    base, pinned = _base_of(bank, gates, base_model)
    check_base(base, bank, revision=pinned, **hub)
    model = load_base(base, revision=pinned, **hub, **options)
    attach(model, method, paging=paging, offload=offload)
    return model


def check_base(name: str | os.PathLike[str], bank: GateBank, **options: Any) -> None:
    """Compare the gates with the base model's configuration, before its weights are read.

    Raises:
        SeergateError: naming each field that differs.
    """
    needed = bank.geometry
    found = gate_geometry(skeleton(base_config(name, **options)), bank.config)
    # Frequencies are compared when the gates are attached: a skeleton has no buffers to read them from.
    found = replace(found, inv_freq=needed.inv_freq, attention_scaling=needed.attention_scaling)
    problems = needed.mismatches(found)
    if problems:
        raise SeergateError(f"these gates are for another model than {name}: {'; '.join(problems)}")


def base_config(name: str | os.PathLike[str], **options: Any) -> Any:
    """The configuration of a base model; arguments as in `load_base`."""
    from transformers import AutoConfig

    return _reading("base model", name, AutoConfig.from_pretrained, **options)


def skeleton(config: Any) -> PreTrainedModel:
    """The model that a configuration describes, without memory for its weights.

    Raises:
        SeergateError: if it is no causal language model of a supported family.
    """
    import torch
    from transformers import AutoModelForCausalLM

    family_of(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise SeergateError(f"no model can be built from its configuration: {first_line(error)}") from error


def load_base(
    name: str | os.PathLike[str], *, device: str | torch.device | None = None, **options: Any
) -> PreTrainedModel:
    """Load a causal language model for inference.

    Args:
        name: directory, Hub id, or a model that ships with seergate (``"checkpoints/tiny-reasoner"``).
        device: move it there; for more than one device pass ``device_map``.
        **options: for `AutoModelForCausalLM.from_pretrained`, such as ``revision``, ``dtype`` or ``token``.

    Raises:
        SeergateError: if it cannot be found or read.
    """
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = _reading("base model", name, AutoModelForCausalLM.from_pretrained, **options).eval()
    if is_hub_id(str(name)) and base_commit(model.config) is None:
        # Some releases of transformers do not remember the commit; gates made for this model name it.
        commit = cached_commit(str(name), options.get("revision"), options.get("cache_dir"))
        note_base_commit(model.config, commit)
    if device is None:
        return model
    try:
        return model.to(device)  # type: ignore[arg-type]
    except RuntimeError as error:  # most often, it does not fit
        raise SeergateError(f"the base model {name} cannot be put on {device}: {first_line(error)}") from error


def load_tokenizer(name: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    """Load a base model's tokenizer; arguments as in `load_base`."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _reading("tokenizer of", name, AutoTokenizer.from_pretrained, **options)
    return tokenizer


def _base_of(
    bank: GateBank, gates: str | os.PathLike[str], override: str | os.PathLike[str] | None
) -> tuple[str | os.PathLike[str], str | None]:
    """The base model and the revision to load it at."""
    named, pinned = bank.geometry.base_model, bank.geometry.base_revision
    if override is not None:
        return override, pinned if str(override) == named else None
    if named is None:
        raise SeergateError(f"{gates} does not say which model its gates are for; pass base_model=")
    if not _is_here(named) and not is_hub_id(named):
        raise SeergateError(f"{gates} is for the model in {named}, a directory that is not here; pass base_model=")
    return named, pinned


def _is_here(name: str) -> bool:
    try:
        return is_directory(resolve_model(name))
    except FileNotFoundError:
        return False


def _reading(what: str, name: str | os.PathLike[str], read: Callable[..., Any], **options: Any) -> Any:
    """Call ``from_pretrained`` and say in one sentence what went wrong."""
    if not _is_here(str(name)) and not is_hub_id(str(name)):
        raise SeergateError(f"the {what} {name} could not be loaded: there is no such directory")
    options = {"trust_remote_code": False, **{key: value for key, value in options.items() if value is not None}}
    try:
        return read(resolve_model(name), **options)
    except Exception as error:  # of as many types as libraries are involved; that of tokenizers is a bare `Exception`
        raise SeergateError(f"the {what} {name} could not be loaded: {first_line(error)}") from error
