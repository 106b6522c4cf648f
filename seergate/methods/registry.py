"""Registry of methods by name: built-in methods, registered ones, and those of plugins."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import MISSING, fields
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from seergate.checks import plain_numbers
from seergate.errors import SeergateError, did_you_mean, first_line
from seergate.methods.base import Method
from seergate.methods.evicting import EvictingMethod
from seergate.methods.gate import Gate
from seergate.methods.gate_on_evictor import SUFFIX, GateOnEvictor

if TYPE_CHECKING:
    from seergate.gates.bank import Gates

ENTRY_POINTS = "seergate.methods"
"""Entry point group in which installed packages offer methods: name of the method = "module:Class"."""
PLUGINS = "SEERGATE_PLUGINS"
"""Environment variable: comma-separated modules that register methods when imported. The command line's ``--plugin``
sets it, so that worker processes know the same methods."""

AnyMethod = TypeVar("AnyMethod", bound=type[Method])


METHODS: dict[str, type[Method]] = {}
"""Name -> class of every known method, in the order in which reports list them."""


def check_class(kind: type[Method]) -> None:
    """Raise `SeergateError` if a method's class has no name, does not say what its states are, or names a default of
    an option without effect.
    """
    if not hasattr(kind, "name"):
        raise SeergateError(f'{kind.__name__} has no name; it must be a class attribute, such as name = "mine"')
    if kind.new_state is Method.new_state and not hasattr(kind, "state"):
        raise SeergateError(f"{kind.__name__} has no states; it must name their class as state, or override new_state")
    for option in fields(kind):
        if option.default is MISSING or not option.init:  # made for each object
            continue
        named = getattr(kind, option.name, option.default)
        if named is not option.default and not hasattr(named, "__set__"):  # slots and properties have it
            raise SeergateError(
                f"{kind.__name__} sets {option.name} to {named!r}, which has no effect; the class must be a "
                f"@dataclass(kw_only=True), and the line must have a type: {option.name}: {option.type} = {named!r}"
            )


def _check(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise SeergateError(f"{kind!r} is no method; it must be a subclass of seergate.methods.Method")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name.replace("_", "a").isalnum():
        raise SeergateError(f"{kind.__name__}.name is {name!r}; it must be of letters, digits and underscores")
    check_class(kind)
    if len(kind.calibrates) > 1:
        raise SeergateError(f"{kind.__name__} calibrates {', '.join(kind.calibrates)}; it may name one option")


def register(kind: AnyMethod) -> AnyMethod:
    """Class decorator that makes a method available by its ``name`` in `attach`, evaluations and the command line.

    Raises:
        SeergateError: if the class is not a valid method, or if another method has its name.
    """
    _check(kind)
    other = METHODS.get(kind.name)
    if other is not None and (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise SeergateError(f"{kind.name!r} is the name of {other.__module__}.{other.__qualname__} already")
    METHODS[kind.name] = kind
    return kind


def load_plugins(*modules: str) -> None:
    """Import these modules and those of `PLUGINS`, which register methods, and add the methods of installed packages.
    Raises `SeergateError` if there is no such module.
    """
    modules += tuple(filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))))
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for module in modules:
        try:
            if module.endswith(".py") or module[:1] in ("", "."):
                raise ModuleNotFoundError(name=module)  # the path of a file
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # another module is missing, which this one needs
            raise SeergateError(
                f"there is no module {module!r} to load as a plugin; name it as in an import, such as my_methods for "
                "a file my_methods.py here"
            ) from error
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name not in METHODS:
            try:
                _register_entry(entry)
            except SeergateError as error:  # of another package, whose other methods and seergate's stay usable
                warnings.warn(str(error), stacklevel=2)


def _register_entry(entry: EntryPoint) -> None:
    """Import and register a method of an installed package. Raises `SeergateError` if that fails."""
    try:
        register(entry.load())
    except Exception as error:  # importing may raise anything
        raise SeergateError(
            f"the method {entry.name!r} of an installed package, {entry.value}, cannot be used: {first_line(error)}"
        ) from error


def method_class(name: str) -> type[Method]:
    """Return the class of a method: `GateOnEvictor` for ``EVICTOR+gate``; for ``NAME+gate`` of a method that shares
    blocks, the class of ``NAME``.

    Raises:
        SeergateError: for an unknown name, with the nearest known one, or if the method cannot have the gate.
    """
    if name.endswith(SUFFIX):
        inner = method_class(name.removesuffix(SUFFIX))
        if name.count("+") == 1 and inner.shares_blocks:
            return inner
        if name.count("+") > 1 or not issubclass(inner, EvictingMethod):
            raise SeergateError(
                f"{name!r} is no method: only a method that evicts or shares blocks can be combined with the gate"
            )
        if inner.from_gates:
            raise SeergateError(f"{name!r} takes two kinds of gates; make a GateOnEvictor of both methods in Python")
        return GateOnEvictor
    if name not in METHODS:
        load_plugins()
    if name in METHODS:
        return METHODS[name]
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        _register_entry(entry)  # raises what `load_plugins` warned of
    raise SeergateError(
        f"there is no method {name!r}; {did_you_mean(name, sorted(METHODS))}; gates are named by a directory that is "
        "here, or a Hub id (org/name)"
    )


def reading_class(name: str) -> type[Method]:
    """Return the class that selects what is read: `Gate` for ``NAME+gate`` of a method that shares blocks, otherwise
    as `method_class`.
    """
    kind = method_class(name)
    return Gate if name.endswith(SUFFIX) and kind.shares_blocks else kind


def keeping_class(name: str) -> type[Method]:
    """Return the class that decides what the cache keeps: for ``EVICTOR+gate``, the class of ``EVICTOR``."""
    return method_class(name.removesuffix(SUFFIX))


def has_gates(name: str) -> bool:
    """True if a method decodes with gates."""
    return name.endswith(SUFFIX) or bool(method_class(name).from_gates)


def option_names(name: str) -> set[str]:
    """Names of the options that `make_method` takes for a method, without ``bank``."""
    kind = keeping_class(name)
    own = kind.option_names()
    if not name.endswith(SUFFIX):
        return own
    return own - {"reads"} | Gate.option_names() if kind.shares_blocks else own | {"read_budget"}


def check_options(name: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise `SeergateError` for an option that is not among ``allowed``."""
    allowed = sorted(allowed)
    for option in sorted(set(given) - set(allowed)):
        hint = did_you_mean(option, allowed) if allowed else "it has none"
        raise SeergateError(f"the method {name!r} has no option {option!r}; {hint}")


def make_method(name: str, *, bank: Gates | None = None, **options: Any) -> Method:
    """Build a method by name.

    Args:
        name: a key of `METHODS`; ``EVICTOR+gate``, with the evictor's options, ``bank`` and ``read_budget``, the
            gate's token budget; or, for a method that shares blocks, ``NAME+gate``, with ``bank`` and the options of
            both.
        bank: the gates, for methods that have them.
        **options: the method's own options.

    Raises:
        SeergateError: for an unknown name, an unknown or missing option, or missing gates.
        ValueError: for an option out of range.
    """
    kind = method_class(name)
    options = plain_numbers(options)
    check_options(name, options, option_names(name))
    if has_gates(name):
        if bank is None:
            given = "a GateBank, its directory or its Hub id instead of the name, or " if name == Gate.name else ""
            raise SeergateError(
                f"the method {name!r} needs gates: pass {given}bank=GateBank.from_pretrained(...); `seergate train` "
                "makes gates for a model, and 'quest' needs none"
            )
        from seergate.gates.bank import Gates

        if not isinstance(bank, Gates):
            raise SeergateError(f"bank is a {type(bank).__name__}; it must be a GateBank (GateBank.from_pretrained)")
        return _gated(name, kind, bank, options)
    if bank is not None:
        raise SeergateError(f"the method {name!r} has no gates; leave out bank=")
    required = {f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(required - set(options)):
        raise SeergateError(f"the method {name!r} needs {', '.join(f'{option}=' for option in missing)}")
    return kind(**options)


def _gated(name: str, kind: type[Method], bank: Gates, options: dict[str, Any]) -> Method:
    if kind.from_gates:
        return kind.with_gates(bank, **options)
    if kind.shares_blocks:
        reading = {key: options.pop(key) for key in Gate.option_names() & set(options)}
        return kind(reads=Gate.with_gates(bank, **reading), **options)  # type: ignore[call-arg]
    if "read_budget" not in options:
        raise SeergateError(f"the method {name!r} needs read_budget=, how many tokens the gate may read per step")
    gate = Gate.with_gates(bank, token_budget=options.pop("read_budget"))
    evictor = make_method(name.removesuffix(SUFFIX), **options)
    assert isinstance(evictor, EvictingMethod)
    return GateOnEvictor(evictor=evictor, gate=gate)
