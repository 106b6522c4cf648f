"""seergate.load: a base model and its gates in one call."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from seergate.bank import GateBank
from seergate.config import DecodeConfig
from seergate.errors import SeergateError
from seergate.host import attach
from seergate.paths import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(
    gates: str | os.PathLike[str],
    *,
    token_budget: int | None = None,
    threshold: float | None = None,
    top_p: float | None = None,
    config: DecodeConfig | None = None,
    base_model: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    **model_options: Any,
) -> PreTrainedModel:
    """Load the gates, the base model they name at the revision they were trained for, and put them together.

    Args:
        gates: adapter directory or Hub repository.
        token_budget, threshold, top_p: how to decode; see `DecodeConfig`.
        config: the same, as a whole.
        base_model: directory or Hub id to use instead of the one the adapter names.
        revision: of the adapter.
        token: for the Hub.
        **model_options: ``device_map``, ``dtype``, ``quantization_config``, ... for
            `AutoModelForCausalLM.from_pretrained`.

    Returns:
        An ordinary transformers model whose ``generate`` decodes sparsely. ``seergate.handle_of(model)`` has its
        statistics and detaches.

    Raises:
        SeergateError: if gates or base model are missing or do not fit.
    """
    if config is not None and (token_budget, threshold, top_p) != (None, None, None):
        raise SeergateError("config is given beside token_budget, threshold or top_p; put all of it into one")
    decode = config or DecodeConfig(token_budget=token_budget, threshold=threshold, top_p=top_p)
    bank = GateBank.from_pretrained(gates, revision=revision, token=token)
    decode.check_block_size(bank.config.block_size)
    base = base_model or bank.geometry.base_model
    if base is None:
        raise SeergateError(f"{gates} does not say which model its gates are for; pass base_model=")
    pinned = None if base_model is not None else bank.geometry.base_revision
    model = load_base(base, revision=pinned, token=token, **model_options)
    attach(model, bank, decode)
    return model


def load_base(name: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """Load a causal language model for inference.

    Args:
        name: directory, Hub id, or a model that ships with seergate (``"checkpoints/tiny-reasoner"``).
        **options: for `AutoModelForCausalLM.from_pretrained`.

    Raises:
        SeergateError: if it cannot be found or read.
    """
    from transformers import AutoModelForCausalLM

    source = resolve_model(name)
    options = {key: value for key, value in options.items() if value is not None}
    try:
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise SeergateError(f"the base model {name} could not be loaded: {str(error).splitlines()[0]}") from error
    return model.eval()
