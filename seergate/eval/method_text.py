"""Methods as text, on the command line and in sweep files: ``NAME`` or ``NAME:OPTION=VALUE:OPTION=VALUE``.

    quest:block_size=16:dense_layers=0+1
    lazy_eviction:window=32:use_h2=false
    tri_attention:centres=runs/centres.safetensors

Such a text needs no quotes in a shell or in YAML, and has no comma, so that commas can separate several methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seergate.errors import SeergateError
from seergate.methods import SelectingMethod, method_class, option_names
from seergate.methods.registry import check_options

WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
LISTS = ("dense_layers", "anchors")
"""Options that hold whole numbers, written with ``+`` between them."""


def read_method(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a method's name and its options.

    Values are whole numbers, numbers, ``true``, ``false``, ``none``, and otherwise text.

    Raises:
        SeergateError: for an unknown method or option, an option given twice, or one without a value.
    """
    name, options = read_options("method", text, LISTS)
    check_options(name, options, option_names(name) | correction_names(name))
    return name, options


def read_options(kind: str, text: str, lists: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Parse a name and its options, without checking that they exist.

    Args:
        kind: ``"method"`` or ``"task"``, for errors.
        text: ``NAME:OPTION=VALUE:OPTION=VALUE``.
        lists: options that hold whole numbers, written with ``+`` between them.
    """
    name, *parts = text.split(":")
    options = dict[str, Any]()
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise SeergateError(
                f"the {kind} {text!r} has the option {part!r}; it must be OPTION=VALUE, as in {name}:OPTION=VALUE"
            )
        if key in options:
            raise SeergateError(f"the {kind} {text!r} has the option {key!r} twice")
        options[key] = _list(key, value) if key in lists else _value(value)
    return name, options


def correction_names(name: str) -> set[str]:
    """The options that select the correction `Rectify` and are not the method's own."""
    selects = issubclass(method_class(name), SelectingMethod)
    return {"rectify_every"} - option_names(name) if selects else set()


def _value(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _list(key: str, text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(part) for part in text.split("+"))
    except ValueError:
        raise SeergateError(f"{key} is {text!r}; it must be whole numbers with + between them, or none") from None


def value_text(value: Any) -> str:
    """The text of a value."""
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    words = {repr(word): text for text, word in WORDS.items()}
    return words.get(repr(value), str(value))
