"""`seergate.load`: a base model together with its gates."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from seergate.checks import plain_numbers
from seergate.config import DecodeConfig, Rectify
from seergate.errors import SeergateError
from seergate.models.attach import attach
from seergate.models.gate_bank import GateBank
from seergate.models.loading import base_config, load_base, skeleton
from seergate.models.masks import FLEX
from seergate.models.resolving import check_decode_options, check_given, decode_options, method_of
from seergate.paths import directory_here, is_hub_id, is_local_model
from seergate.pretrained import MODEL_OPTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from seergate.cache.storage import KVBackend


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
    correction: Rectify | None = None,
    storage: KVBackend | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load gates and their base model at the revision that the gates were trained for, and attach the gates.

    Args:
        gates: adapter directory or Hub repository.
        config: decode options. Its fields may be given as keywords instead (``token_budget=4096``), which override the
            gates' own defaults. A ``config`` takes no defaults from the gates, except for ``compat="gates"``.
        base_model: directory, GGUF file or Hub id of the base model; by default, the one that the adapter names.
        revision, subfolder: revision and directory of the adapter.
        token, cache_dir, local_files_only: for adapter and base model, as in `huggingface_hub`.
        force_download: download the adapter even if it is cached.
        correction, storage: see `seergate.attach`.
        **options: fields of `DecodeConfig`, or for retention gates the options of their method; and ``device_map``,
            ``dtype``, ``quantization_config``, ... for `AutoModelForCausalLM.from_pretrained`.

    Returns:
        A transformers model whose ``generate`` decodes sparsely. ``seergate.handle_of(model)`` returns its handle,
        with the statistics and ``detach()``.

    Raises:
        SeergateError: if gates or base model are missing or do not match, or an option is unknown.
        ValueError: if a decode option is out of range.
    """
    if "gguf_file" in options:
        raise SeergateError(f"gguf_file is {options['gguf_file']!r}; name the whole path of the file as base_model=")
    given = plain_numbers({name: options.pop(name) for name in sorted(decode_options() & set(options))})
    check_given(config, given)
    hub: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only or None}
    bank = GateBank.from_pretrained(
        gates, revision=revision, subfolder=subfolder, force_download=force_download, **hub
    )
    method = method_of(bank, config, **given)
    base, pinned = _base_of(bank, gates, base_model)
    try:
        config_of_base = base_config(base, revision=pinned, **hub)
    except SeergateError as error:
        if pinned is None:
            raise
        raise SeergateError(f"{error}; the gates name this commit, base_model= takes a directory instead") from error
    of_model = {*MODEL_OPTIONS, *config_of_base.to_dict()}
    check_decode_options(options, decode_options(bank), of_model)
    of_config = {name: value for name, value in options.items() if name not in MODEL_OPTIONS}
    if of_config:
        config_of_base = base_config(base, revision=pinned, **hub, **of_config)
    if options.get("attn_implementation") == "flex_attention":
        raise SeergateError(FLEX)
    without_weights = skeleton(config_of_base)
    attach(without_weights, method, correction=correction, storage=storage)  # refuses before weights are read
    model = load_base(base, revision=pinned, **hub, **options)
    attach(model, method, correction=correction, storage=storage)
    return model


def _base_of(
    bank: GateBank, gates: str | os.PathLike[str], override: str | os.PathLike[str] | None
) -> tuple[str | os.PathLike[str], str | None]:
    """Return the base model and the revision to load."""
    named, pinned = bank.geometry.base_model, bank.geometry.base_revision
    if override is not None:
        return override, pinned if str(override) == named else None
    if named is None:
        raise SeergateError(f"{gates} does not say which model its gates are for; pass base_model=")
    if directory_here(named) is None and not is_local_model(named) and not is_hub_id(named):
        raise SeergateError(f"{gates} is for the model in {named}, which is not here; pass base_model=")
    return named, pinned
