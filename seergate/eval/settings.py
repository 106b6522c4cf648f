"""One setting of a sweep: a method and how much it may read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from seergate.config import Rectify, is_retention
from seergate.errors import SeergateError
from seergate.eval.method_text import correction_names, read_method, value_text
from seergate.fingerprint import fingerprint
from seergate.methods import Dense, Method, SelectingMethod, has_gates, make_method, option_names
from seergate.methods.registry import reading_class
from seergate.models.gate_bank import GateBank

AUTO = "auto"
"""Value of an option that is calibrated on the model and the task (`seergate.eval.calibration.calibrator`)."""

Banks = GateBank | Mapping[Any, GateBank] | None
"""Gates of an evaluation: a bank, several by name, or none."""


@dataclass(frozen=True)
class MethodSpec:
    """A method by name, with its options.

    Attributes:
        name: a key of `seergate.methods.METHODS`, ``EVICTOR+gate`` or ``reason_cache+gate``.
        token_budget: the method's; ``None`` for methods that have none (``dense``, ``rpc``, ``kv4bit``).
        block_size: tokens per block, for methods that select or share blocks; gates have their own.
        dense_layers: layers that stay dense, for the methods that select blocks. ``None`` takes the gates' own choice,
            and no layer for other methods, as in the comparison of the SeerAttention-R paper.
        options: further options of the method and of its correction; they override the fields above.
        named_block_size: true if the label names the block size, as in a sweep over several.
        calibrated: measured values of the options that are ``"auto"``.
        own_budget: true if the method's text gives the token budget.
        gates: name of its gates; empty if they have none.

    Raises:
        SeergateError: for an unknown method, or a missing budget.
    """

    name: str
    token_budget: int | None = None
    block_size: int | None = None
    dense_layers: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    named_block_size: bool = False
    calibrated: dict[str, Any] = field(default_factory=dict)
    own_budget: bool = field(default=False, compare=False)
    gates: str = ""

    def __post_init__(self) -> None:
        accepted_options = option_names(self.name)
        if "token_budget" not in accepted_options:
            object.__setattr__(self, "token_budget", None)
        elif self.token_budget is None and not limits_of(self.name) & set(self.options):
            raise SeergateError(f"the method {self.name!r} needs a token budget")
        if "block_size" not in accepted_options and not self.has_gates:
            object.__setattr__(self, "block_size", None)
        self.correction  # noqa: B018  (checks `rectify_every`)

    @property
    def has_gates(self) -> bool:
        """True if the method decodes with gates."""
        return has_gates(self.name)

    @property
    def uncalibrated(self) -> list[str]:
        """Options that are ``"auto"`` and not calibrated yet."""
        return [key for key, value in self.options.items() if value == AUTO and key not in self.calibrated]

    @property
    def label(self) -> str:
        """Name of the setting's directory: ``gate-128``; ``quest-2048-b16-dense0,1``; ``h2o-64-interval=8``;
        ``gate-128-msa``.
        """
        parts = [self.name]
        if self.token_budget is not None:
            parts.append(str(self.token_budget))
        if self.named_block_size and self.block_size is not None:
            parts.append(f"b{self.block_size}")
        if self.dense_layers:
            parts.append("dense" + ",".join(map(str, self.dense_layers)))
        texts = {key: value_text(value).replace("\\", "/") for key, value in sorted(self.options.items())}
        parts += [f"{key}={text.rsplit('/', 1)[-1]}" for key, text in texts.items()]  # of a path, the file's name
        return "-".join(parts if self.gates in ("", self.name) else [*parts, self.gates])

    def bank(self, banks: Banks) -> GateBank | None:
        """The method's gates, chosen by kind, block size and name; ``None`` if there are none."""
        if not isinstance(banks, Mapping):
            return banks
        named = (gates for name, gates in banks.items() if self.gates in ("", str(name)))
        return next((gates for gates in named if self.takes(gates)), None)

    def weights(self, bank: GateBank | None) -> str | None:
        """Fingerprint of the gates that the method decodes with; ``None`` if it uses none."""
        return fingerprint(bank) if self.has_gates and bank is not None else None

    def takes(self, gates: GateBank) -> bool:
        """True if gates fit this method: retention gates by the name of their scorer, others by block size."""
        if gates.config.retention or is_retention(self.name):
            return gates.config.scorer == self.name
        return gates.config.block_size == self.block_size

    def method(self, bank: GateBank | None) -> Method:
        """Make the method. Options override the gates' own (`GateBank.decode_config`).

        Raises:
            SeergateError: if the method needs gates and ``bank`` is ``None``.
        """
        if self.has_gates and bank is None:
            raise SeergateError(
                f"the method {self.name!r} needs gates: give their directory or Hub id (org/name) with --gates; "
                "`seergate train` makes gates for a model"
            )
        accepted_options = option_names(self.name)
        fields: dict[str, Any] = {
            "token_budget": self.token_budget,
            "block_size": None if self.has_gates and not _selects(self.name) else self.block_size,
            "dense_layers": () if self.dense_layers is None and not self.has_gates else self.dense_layers,
        }
        given = {key: value for key, value in fields.items() if key in accepted_options and value is not None}
        options = {**given, **self.options, **self.calibrated}
        options = {key: value for key, value in options.items() if key not in correction_names(self.name)}
        return make_method(self.name, bank=bank if self.has_gates else None, **options)

    @property
    def correction(self) -> Rectify | None:
        """The correction that the options select; ``None`` leaves it to the method."""
        every = self.options.get("rectify_every") if correction_names(self.name) else None
        return None if every is None else Rectify(every)

    def describe(self, bank: GateBank | None) -> dict[str, Any]:
        """All options of the method, defaults included, as plain YAML types; ``nominal`` is the budget in words."""
        method = self.method(bank)
        corrections = {key: value for key, value in self.options.items() if key in correction_names(self.name)}
        return {"name": self.name, "nominal": method.nominal, **method.describe(), **corrections}


def with_each(specs: Sequence[MethodSpec], banks: Banks) -> list[MethodSpec]:
    """Repeat every setting that decodes with gates for each bank that fits it, and name its gates. If only one bank
    fits and its key is an int (a block size in YAML), the gates stay unnamed.
    """
    if not isinstance(banks, Mapping):
        return list(specs)
    for name in banks:
        if not re.fullmatch(r"\w[\w.-]*", str(name)):
            raise SeergateError(f"gates are named {name!r}; a name must be of letters, digits and _ . -")
    expanded = list[MethodSpec]()
    for spec in specs:
        names = [name for name, gates in banks.items() if spec.has_gates and spec.takes(gates)]
        named = len(names) > 1 or any(isinstance(name, str) for name in names)
        expanded += [replace(spec, gates=str(name)) for name in names] if named else [spec]
    return expanded


def limits_of(name: str) -> set[str]:
    """The options of a method that limit what it reads or holds."""
    return set(reading_class(name).limits) & option_names(name)


def _each(name: str, option: str, values: Sequence[float]) -> list[dict[str, Any]]:
    """One option per distinct value, ascending; empty if the option does not limit the method."""
    return [{option: value} for value in sorted(set(values))] if option in limits_of(name) else []


def _selects(name: str) -> bool:
    """True if the method's decode steps select the blocks that they read."""
    return issubclass(reading_class(name), SelectingMethod)


def grid(
    methods: list[str],
    budgets: list[int],
    block_size: int | list[int] | None,
    dense_layers: tuple[int, ...] | list[tuple[int, ...] | None] | None = None,
    thresholds: list[float] | None = None,
    default_budgets: Sequence[int] = (),
) -> list[MethodSpec]:
    """Every method at every budget and threshold, ``dense`` once and first (the others are compared with it).

    Methods without a budget run once, and so do methods whose text gives a limit. Methods that take no threshold run
    with budgets only.

    Args:
        methods: texts that `read_method` parses.
        block_size: one or several block sizes, for methods that select blocks or have gates. Other methods run once,
            with their own block or page size if they have one (RaaS, ReasonCache).
        dense_layers: one choice of layers that stay dense, or several (a list of tuples).
        thresholds: thresholds for methods that select blocks by one, in addition to or instead of budgets.
        default_budgets: token budgets for methods that would have neither budgets nor thresholds.
    """
    texts = sorted(dict.fromkeys(methods), key=lambda text: text != Dense.name)
    sizes = list(dict.fromkeys(block_size if isinstance(block_size, list) else [block_size]))
    hybrids = list(dict.fromkeys(dense_layers if isinstance(dense_layers, list) else [dense_layers]))
    specs = []
    for text in texts:
        name, options = read_method(text)
        selects, own_size = _selects(name), "block_size" in options
        limits = list[dict[str, Any]]()
        if not limits_of(name) & set(options):
            limits = _each(name, "token_budget", budgets) + _each(name, "threshold", thresholds or [])
            limits = limits or _each(name, "token_budget", default_budgets)
        for size, layers, limit in product(
            sizes if selects and not own_size else sizes[:1],
            hybrids if selects and "dense_layers" not in options else [None],
            limits or [{}],
        ):
            given = options | limit
            specs.append(
                MethodSpec(
                    name,
                    token_budget=given.pop("token_budget", None),
                    block_size=size if selects or has_gates(name) else None,
                    dense_layers=layers,
                    options=given,
                    named_block_size=len(sizes) > 1 and selects and not own_size,
                    own_budget="token_budget" in options,
                )
            )
    return specs


def method_spec(
    method: str, budget: int | None = None, block_size: int | None = None, default_budget: int | None = None
) -> MethodSpec:
    """The setting of a single method, as `grid` makes it; a `SeergateError` if an option is ``"auto"``.

    Args:
        budget: token budget; one in the method's text takes precedence, any other limit there is an error.
        block_size: tokens per block, for methods that select blocks.
        default_budget: token budget for methods without any other limit.
    """
    budgets, defaults = ([] if value is None else [value] for value in (budget, default_budget))
    (spec,) = grid([method], budgets, block_size, default_budgets=defaults)
    if budget is not None and spec.token_budget is None and spec.name != "dense":
        why = (
            "already sets how much is read: leave one of them out" if limits_of(spec.name) else "takes no token budget"
        )
        raise SeergateError(f"budget is {budget}; {method!r} {why}")
    if block_size is not None and spec.block_size is None and "block_size" in option_names(spec.name):
        raise SeergateError(f"block_size is {block_size}; write {spec.name}:block_size={block_size}")
    if spec.uncalibrated:
        raise SeergateError(
            f"{spec.name}:{spec.uncalibrated[0]}=auto is not calibrated here, only by `seergate eval`; give a value, "
            "such as `seergate calibrate` measures"
        )
    return spec
