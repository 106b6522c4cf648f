"""One setting of a sweep: a method and how much it may read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seergate.bank import GateBank
from seergate.config import DecodeConfig
from seergate.errors import SeergateError
from seergate.methods import Dense, Gate, Method, SelectingMethod, make_method, method_class


@dataclass(frozen=True)
class MethodSpec:
    """A method by name, with its options.

    Attributes:
        name: a key of `seergate.methods.METHODS`.
        token_budget: tokens per KV head and step; ``None`` only for ``dense``.
        block_size: tokens per block, for the methods that select blocks; gates have their own.
        dense_layers: layers that stay dense, for the methods that select blocks. None by default, as in the comparison
            of the SeerAttention-R paper; Quest's own default would leave the first two layers dense.
        options: further options of the method.
        named_block_size: whether the label shall name the block size, as in a sweep over several.

    Raises:
        SeergateError: for an unknown method, or a missing budget.
    """

    name: str
    token_budget: int | None = None
    block_size: int | None = None
    dense_layers: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    named_block_size: bool = False

    def __post_init__(self) -> None:
        method_class(self.name)
        if self.name == Dense.name:
            object.__setattr__(self, "token_budget", None)
            object.__setattr__(self, "block_size", None)
        elif self.token_budget is None and not {"threshold", "top_p"} & set(self.options):
            raise SeergateError(f"the method {self.name!r} needs a token budget")

    @property
    def label(self) -> str:
        """Name of the setting's directory: ``gate-128``; ``quest-2048-b16-dense0,1``; ``dense``."""
        parts = [self.name]
        if self.token_budget is not None:
            parts.append(str(self.token_budget))
        if self.named_block_size and self.block_size is not None:
            parts.append(f"b{self.block_size}")
        if self.dense_layers:
            parts.append("dense" + ",".join(map(str, self.dense_layers)))
        parts += [f"{key}={value}" for key, value in sorted(self.options.items())]
        return "-".join(parts)

    def method(self, bank: GateBank | None) -> Method:
        """The method itself.

        Args:
            bank: the gates, for the method ``gate``.

        Raises:
            SeergateError: if gates are needed and there are none.
            ValueError: for an option out of range.
        """
        if self.name == Gate.name:
            if bank is None:
                raise SeergateError("the method 'gate' needs gates: the directory or Hub repository of an adapter")
            decode = DecodeConfig(token_budget=self.token_budget, dense_layers=self.dense_layers, **self.options)
            return Gate.from_config(bank, decode)
        known = method_class(self.name).__dataclass_fields__
        options = dict(self.options)
        if "dense_layers" in known:
            options["dense_layers"] = self.dense_layers
        if self.token_budget is not None:
            options["token_budget"] = self.token_budget
        if self.block_size is not None and "block_size" in known:
            options["block_size"] = self.block_size
        return make_method(self.name, **options)

    def describe(self, bank: GateBank | None) -> dict[str, Any]:
        """Everything that decides what the method does, defaults included, as plain YAML types."""
        method = self.method(bank)
        values = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(method).items()
            if key in method.__dataclass_fields__ and not isinstance(value, GateBank)
        }
        return {"name": self.name, **values}


def grid(
    methods: list[str],
    budgets: list[int],
    block_size: int | list[int] | None,
    dense_layers: tuple[int, ...] | list[tuple[int, ...]] = (),
    thresholds: list[float] | None = None,
) -> list[MethodSpec]:
    """Every method at every budget and threshold, ``dense`` once and first (the others are compared with it).

    Args:
        methods: names.
        budgets: token budgets.
        block_size: one, or several; methods that do not select blocks run once for all of them.
        dense_layers: one choice of layers that stay dense, or several (a list of tuples).
        thresholds: for methods that select blocks, instead of a budget.

    Raises:
        SeergateError: for an unknown method, or if there are no budgets for one that needs them.
    """
    names = sorted(dict.fromkeys(methods), key=lambda name: name != Dense.name)
    sizes = block_size if isinstance(block_size, list) else [block_size]
    hybrids = dense_layers if isinstance(dense_layers, list) else [dense_layers]
    specs = []
    for name in names:
        if name == Dense.name:
            specs.append(MethodSpec(name))
            continue
        selects = issubclass(method_class(name), SelectingMethod)
        limits: list[dict[str, Any]] = [{"token_budget": budget} for budget in sorted(dict.fromkeys(budgets))]
        if selects:
            limits += [{"options": {"threshold": value}} for value in sorted(dict.fromkeys(thresholds or []))]
        if not limits:
            raise SeergateError(f"the method {name!r} needs a token budget")
        for size in sizes if selects else sizes[:1]:
            for layers in hybrids if selects else hybrids[:1]:
                specs += [
                    MethodSpec(
                        name,
                        block_size=size,
                        dense_layers=layers,
                        named_block_size=len(sizes) > 1 and selects,
                        **limit,
                    )
                    for limit in limits
                ]
    return specs
