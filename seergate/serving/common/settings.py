"""The options of a server's plugin, given under the key "seergate" in the server's configuration."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import Any

from seergate.config import RULE_OPTIONS
from seergate.errors import SeergateError, did_you_mean
from seergate.gates.bank import Gates
from seergate.methods import METHODS, SelectingMethod, has_gates, make_method, method_class

KEY = "seergate"
SERVED_OPTIONS = (*RULE_OPTIONS, "dense_layers", "anchors")
"""Options of a method that can be given inside a server."""


def check_served(method: str, *others: str) -> None:
    """Refuse a method that does not run inside a server. ``others`` are methods that the caller serves itself."""
    if not isinstance(method, str):
        raise SeergateError(f"seergate.method is {method!r}; it must be the name of a method")
    if method not in others and method_class(method).serving_scores is None:
        served = ", ".join((*others, *(name for name in METHODS if METHODS[name].serving_scores is not None)))
        raise SeergateError(f"the method {method!r} does not run inside a server; it must be one of {served}")


@dataclass(frozen=True)
class Settings:
    """The method that selects blocks, and its options.

    Attributes:
        gates: adapter directory or Hub repository; required for methods with gates, refused for others.
        revision: branch, tag or commit of the Hub repository.
        method: a method with `Method.serving_scores`.
        rule: options of the method, some of `SERVED_OPTIONS` (see `DecodeConfig`); others are the gates', or the
            method's own.

    Raises:
        SeergateError: if a value is invalid; names the key, its value and what it must be.
    """

    gates: str | None = None
    revision: str | None = None
    method: str = "gate"
    rule: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_served(self.method)
        if (self.gates is not None) != has_gates(self.method):
            rule = "a directory or a Hub repository" if self.gates is None else f"left out with {self.method!r}"
            raise SeergateError(f"seergate.gates is {self.gates!r}; it must be {rule}")
        for name in ("gates", "revision"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise SeergateError(f"seergate.{name} is {value!r}; it must be a text")
        if self.revision is not None and self.gates is None:
            raise SeergateError(f"seergate.revision is {self.revision!r} without gates; leave it out")

    @classmethod
    def read(cls, additional_config: Any) -> Settings | None:
        """Read the settings under "seergate", such as in vLLM's `additional_config`; ``None`` without this key. A key
        that is nearly this one is refused, since the server would be dense.
        """
        if not isinstance(additional_config, dict):
            return None
        if KEY not in additional_config:
            for name in additional_config:
                if difflib.get_close_matches("".join(filter(str.isalpha, str(name).lower())), [KEY], cutoff=0.8):
                    raise SeergateError(f"the key of seergate's options is {name!r}; it must be {KEY!r}")
            return None
        values = additional_config[KEY]
        if not isinstance(values, dict):
            raise SeergateError(f"seergate is {values!r}; it must be an object such as {{'gates': 'org/name'}}")
        keys = [*(field.name for field in fields(cls) if field.name != "rule"), *SERVED_OPTIONS]
        for name in values:
            if name not in keys:
                raise SeergateError(f"there is no key {name!r} under seergate; {did_you_mean(str(name), keys)}")
        rule = {name: values[name] for name in SERVED_OPTIONS if values.get(name) is not None}
        return cls(**{name: value for name, value in values.items() if name not in SERVED_OPTIONS}, rule=rule)

    def said(self, method: SelectingMethod, layers: int) -> str:
        """A line for the server's log, with the method and the number of layers that select."""
        gates = "" if self.gates is None else f" and the gates {self.gates}"
        return f"seergate: decoding is sparse in {layers} layers, with {method.name} ({method.nominal}){gates}"

    def bank(self) -> Gates | None:
        """Load the gates, on the CPU; ``None`` for a method without gates."""
        if self.gates is None:
            return None
        from seergate.models.gate_bank import GateBank

        return GateBank.from_pretrained(self.gates, revision=self.revision)

    def selector(self, bank: Gates | None, page: int) -> SelectingMethod:
        """Create the method, with the gates ``bank``; without gates, a block is a server page of ``page`` tokens."""
        size = {"block_size": page} if bank is None else {}
        method = make_method(self.method, bank=bank, **self.rule, **size)
        assert isinstance(method, SelectingMethod)
        return method
