"""A model with a method attached, for evaluation harnesses that are not seergate's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seergate.eval.method_text import read_method
from seergate.eval.settings import MethodSpec
from seergate.hf.attach import attach
from seergate.hf.bank import GateBank
from seergate.hf.loading import load_base, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def method_spec(method: str, budget: int | None = None, block_size: int | None = None) -> MethodSpec:
    """The method that a text asks for.

    Args:
        method: as `seergate eval` takes it, such as ``h2o:interval=16``.
        budget: tokens per KV head and step; ``token_budget=`` in the text wins.
        block_size: of methods that select blocks.

    Raises:
        SeergateError: for an unknown method or option, or one that is to be calibrated.
    """
    name, options = read_method(method)
    spec = MethodSpec(name, options.pop("token_budget", budget), block_size, options=options)
    spec.check_calibrated()
    return spec


def attached_model(
    name: str, spec: MethodSpec, gates: str | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, GateBank | None]:
    """The model with the method attached, its tokenizer, and the gates.

    Args:
        name: directory or Hub id of the base model.
        spec: see `method_spec`.
        gates: directory or Hub id, for methods that have some.
        **options: of `seergate.hf.loading.load_base`: ``device``, ``dtype``, ...

    Raises:
        SeergateError: for what cannot be read, a missing budget, or gates that are missing or for another model.
    """
    bank = None if gates is None else GateBank.from_pretrained(gates)
    method = spec.method(bank)
    tokenizer = load_tokenizer(name)
    model = load_base(name, **options)
    attach(model, method, correction=spec.correction)
    return model, tokenizer, bank
