"""seergate.load: a base model and its gates in one call."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from seergate.bank import GateBank
from seergate.config import DecodeConfig
from seergate.errors import SeergateError
from seergate.host import attach
from seergate.host.families import family_of
from seergate.paths import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(
    gates: str | os.PathLike[str],
    *,
    config: DecodeConfig | None = None,
    base_model: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load the gates, the base model they name at the revision they were trained for, and put them together.

    Args:
        gates: adapter directory or Hub repository.
        config: how to decode; instead, its fields may be given as keywords (``token_budget=4096``).
        base_model: directory or Hub id to use instead of the one the adapter names.
        revision: of the adapter.
        token: for the Hub.
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
    if config is not None and given:
        raise SeergateError(f"config is given beside {', '.join(given)}; put all of it into one")
    decode = config or DecodeConfig(**given)
    bank = GateBank.from_pretrained(gates, revision=revision, token=token)
    decode.check_block_size(bank.config.block_size)
    base = base_model or bank.geometry.base_model
    if base is None:
        raise SeergateError(f"{gates} does not say which model its gates are for; pass base_model=")
    pinned = None if base_model is not None else bank.geometry.base_revision
    check_base(base, bank, revision=pinned, token=token)
    model = load_base(base, revision=pinned, token=token, **options)
    attach(model, bank, decode)
    return model


def check_base(name: str | os.PathLike[str], bank: GateBank, **options: Any) -> None:
    """Compare the gates with the base model's configuration, before its weights are read."""
    from transformers import AutoConfig

    config = _reading(name, AutoConfig.from_pretrained, **options).get_text_config()
    family_of(config)
    needed = bank.geometry
    found = replace(
        needed,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
    )
    problems = needed.mismatches(found)
    if problems:
        raise SeergateError(f"these gates are for another model than {name}: {'; '.join(problems)}")


def load_base(name: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """Load a causal language model for inference.

    Args:
        name: directory, Hub id, or a model that ships with seergate (``"checkpoints/tiny-reasoner"``).
        **options: for `AutoModelForCausalLM.from_pretrained`.

    Raises:
        SeergateError: if it cannot be found or read.
    """
    from transformers import AutoModelForCausalLM

    return _reading(name, AutoModelForCausalLM.from_pretrained, **options).eval()


def _reading(name: str | os.PathLike[str], read: Callable[..., Any], **options: Any) -> Any:
    """Call ``from_pretrained`` and say in one sentence what went wrong."""
    options = {key: value for key, value in options.items() if value is not None}
    try:
        return read(resolve_model(name), **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SeergateError(
            f"the base model {name} could not be loaded: {str(error).strip().splitlines()[0]}"
        ) from error
