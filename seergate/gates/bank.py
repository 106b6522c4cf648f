"""Gates: one gate per gated layer of a model, and everything that is saved with them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor, nn

from seergate.checks import is_int, is_number
from seergate.config import RULE_OPTIONS, RULES, SCORERS, DecodeConfig, GateConfig, class_of
from seergate.errors import SeergateError, first_line
from seergate.gates.differences import GatesDiff, TensorDiff
from seergate.gates.retention import RetentionGate
from seergate.gates.scorer import Scorer
from seergate.geometry import ModelGeometry

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Gates(nn.Module):
    """The gates of one model as data; users have the subclass `seergate.GateBank`, which knows models and files.

    The state dict is that of the adapter: ``layers.{i}.`` and the names of the scorer, such as ``q_proj.weight``. The
    base model is never part of it.

    Args:
        config: the architecture, the same for all layers.
        geometry: the model that the gates are for.
        training: how they were trained, as JSON types; the attribute is ``training_record``.
        decode_defaults: fields of `DecodeConfig` to decode with by default, such as ``{"compat": "published"}``.
        results: measured results, one mapping each: ``task``, ``method``, ``token_budget``, ``accuracy`` (0..1),
            ``standard_error``, ``samples``; other keys are kept.
        licence: ``license`` and, for one without an identifier, ``license_name`` and ``license_link``.

    Attributes:
        source: the directory or Hub id that they were loaded from, or empty.
    """

    def __init__(
        self,
        config: GateConfig,
        geometry: ModelGeometry,
        training: Mapping[str, Any] | None = None,
        *,
        decode_defaults: Mapping[str, Any] | None = None,
        results: Sequence[dict[str, Any]] = (),
        licence: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.geometry = config, geometry
        self.training_record = dict(training or {})
        self.decode_defaults = dict(decode_defaults or {})
        self.results = tuple(results)
        self.licence = dict(licence or {})
        self.source = ""
        self.layers = nn.ModuleDict({str(layer): make_gate(config, geometry) for layer in geometry.layers})

    def gate(self, layer: int) -> Scorer:
        """The gate of one layer of the model."""
        gate = self.layers[str(layer)]
        assert isinstance(gate, Scorer)
        return gate

    def retention_gate(self, layer: int) -> RetentionGate:
        """The gate of one layer, of gates that score tokens for eviction (``config.retention``)."""
        gate = self.layers[str(layer)]
        assert isinstance(gate, RetentionGate)
        return gate

    def __iter__(self) -> Iterator[tuple[int, Scorer]]:
        """Pairs of layer index and gate, ascending."""
        return ((layer, self.gate(layer)) for layer in self.geometry.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return next(self.parameters()).dtype

    def decode_config(self, **given: Any) -> DecodeConfig:
        """The decode configuration of these gates: their `decode_defaults`, overruled by ``given``.

        A rule that is given (one of `seergate.config.RULES`) takes the place of theirs.
        """
        replaced = RULE_OPTIONS if RULES.keys() & given.keys() else ()
        kept = {name: value for name, value in self.decode_defaults.items() if name not in replaced}
        return DecodeConfig(**{**kept, **given})

    def record(self) -> dict[str, Any]:
        """Everything but the weights: the arguments of the constructor."""
        return {
            "config": self.config,
            "geometry": self.geometry,
            "training": self.training_record,
            "decode_defaults": self.decode_defaults,
            "results": self.results,
            "licence": self.licence,
        }

    @classmethod
    def holding(cls, tensors: Mapping[str, Tensor], source: str, **record: Any) -> Self:
        """Gates with copies of these weights, on the CPU and all in one dtype, the widest of them, and this record.

        Raises:
            SeergateError: naming the ``source``, and the first result that cannot be, or the first tensor that is
                missing, left over, of the wrong shape, not floating-point or not finite.
        """
        _check_results(record.get("results", ()), source)
        _check_tensors(tensors, _expected_shapes(record["config"], record["geometry"], source), source)
        with torch.device("meta"):
            bank = cls(**record)
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
        copies = {
            name: tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        bank.load_state_dict(copies, assign=True)
        return bank

    def derived(self, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> Self:
        """A copy on the CPU, with other weights or with other parts of the record."""
        weights = self.state_dict() if tensors is None else tensors
        return self.holding(weights, "these gates", **{**self.record(), **changes})

    def cast(self, dtype: torch.dtype) -> Self:
        """A copy in another precision; refused if gates cannot have it, or a number is not finite in it."""
        return self.derived({name: tensor.to(dtype) for name, tensor in self.state_dict().items()})

    def subset(self, layers: Iterable[int]) -> Self:
        """The gates of some layers, without results; the model's other layers stay dense.

        Raises:
            SeergateError: for a layer that has no gate, or none at all.
        """
        wanted = sorted(set(layers))
        absent = [layer for layer in wanted if not is_int(layer) or layer not in self.geometry.layers]
        if absent or not wanted:
            raise SeergateError(f"layers is {absent or wanted}; it must name some of {list(self.geometry.layers)}")
        tensors = {name: x for name, x in self.state_dict().items() if int(name.split(".")[1]) in wanted}
        return self.derived(tensors, geometry=replace(self.geometry, layers=tuple(wanted)), results=())

    def with_anchors(self, anchors: Sequence[int], **training: Any) -> Self:
        """The gates of the anchors alone, which choose for the layers above them wherever the gates are loaded;
        ``training`` is added to the record of how they were made.
        """
        defaults = {**self.decode_defaults, "anchors": list(anchors)}
        return self.subset(anchors).derived(decode_defaults=defaults, training={**self.training_record, **training})

    @classmethod
    def average(cls, banks: Sequence[Self], weights: Sequence[float] | None = None) -> Self:
        """The weighted mean of gates for the same model, tensor by tensor, computed in fp32 or wider.

        Args:
            banks: two or more of the same architecture, for the same base model.
            weights: one number each; divided by their sum. Equal by default.

        Returns:
            Gates in the dtypes of the first ones, without results: those of the parts do not hold for the mean.

        Raises:
            SeergateError: if they do not belong together, naming each field that differs.
            ValueError: for bad weights.
        """
        if len(banks) < 2:
            raise SeergateError(f"{len(banks)} adapters are given; an average needs two or more")
        given = [1.0] * len(banks) if weights is None else [float(weight) for weight in weights]
        if len(given) != len(banks) or not all(map(math.isfinite, given)) or sum(given) <= 0:
            raise ValueError(f"weights is {weights!r}; it must be {len(banks)} numbers with a positive sum")
        shares = [weight / sum(given) for weight in given]
        first, states = banks[0], [bank.state_dict() for bank in banks]
        for number, other in enumerate(banks[1:], start=2):
            if problems := _architecture_fields(first, other):
                raise SeergateError(f"gates {number} cannot be averaged with the first: {'; '.join(problems)}")
        tensors = {}
        for name, tensor in states[0].items():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            parts = [state[name].to(tensor.device, wide) * share for state, share in zip(states, shares, strict=True)]
            tensors[name] = torch.stack(parts).sum(0).to(tensor.dtype)
        training = {"average_of": [bank.training_record for bank in banks], "weights": shares}
        return first.derived(tensors, training=training, results=())

    def diff(self, other: Gates) -> GatesDiff:
        """Differences from other gates, whatever they are for, field by field and tensor by tensor."""
        found = _architecture_fields(self, other)
        named = {"dtype": "dtype", "training": "training_record", "decode": "decode_defaults"}
        for name, attribute in (named | {"results": "results", "licence": "licence"}).items():
            own, its = getattr(self, attribute), getattr(other, attribute)
            if own != its:
                found.append(f"{name} differs" if name in ("training", "results") else f"{name} is {own} and {its}")
        ours, theirs = self.state_dict(), other.state_dict()
        shared = [name for name, tensor in ours.items() if name in theirs and theirs[name].shape == tensor.shape]
        tensors = {name: TensorDiff.of(ours[name], theirs[name]) for name in shared}
        return GatesDiff(
            found,
            {name: tensor for name, tensor in tensors.items() if tensor.largest},
            sorted(ours.keys() - shared),
            sorted(theirs.keys() - shared),
        )


def make_gate(config: GateConfig, geometry: ModelGeometry) -> Scorer | RetentionGate:
    """The gate of one layer, with fresh weights."""
    gate: Scorer | RetentionGate = class_of(SCORERS[config.scorer].gate)(config, geometry)
    return gate


def _architecture_fields(first: Gates, second: Gates) -> list[str]:
    """The fields in which the gates or the models they are for differ, as sentences."""
    found = []
    for own, other in ((first.config, second.config), (first.geometry, second.geometry)):
        for entry in fields(own):
            a, b = getattr(own, entry.name), getattr(other, entry.name)
            if a != b:
                found.append(f"{entry.name} differs" if entry.name == "inv_freq" else f"{entry.name} is {a} and {b}")
    return found


def _expected_shapes(config: GateConfig, geometry: ModelGeometry, source: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of gates, by name."""
    try:
        with torch.device("meta"):  # one gate: a file that names thousands of layers must cost little
            one = make_gate(config, geometry)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # torch's own for absurd sizes
        raise SeergateError(f"{source}: {first_line(error)}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in one.state_dict().items()}
    return {f"layers.{layer}.{name}": shape for layer in geometry.layers for name, shape in shapes.items()}


def _check_tensors(tensors: Mapping[str, Tensor], expected: dict[str, tuple[int, ...]], source: str) -> None:
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise SeergateError(f"{source}: the tensor {name} is missing; its shape must be {expected[name]}")
        if name not in expected:
            raise SeergateError(f"{source}: the tensor {name} belongs to no gate that its configuration describes")
        tensor = tensors[name]
        if tuple(tensor.shape) != expected[name]:
            shape = tuple(tensor.shape)
            raise SeergateError(f"{source}: the tensor {name} has shape {shape}; it must be {expected[name]}")
        if tensor.dtype not in DTYPES:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)
            raise SeergateError(f"{source}: the tensor {name} has dtype {tensor.dtype}; it must be one of {kinds}")
        if not bool(tensor.isfinite().all()):
            raise SeergateError(f"{source}: the tensor {name} holds values that are not finite numbers")


def _check_results(results: Sequence[Any], source: str) -> None:
    for result in results:
        if not isinstance(result, dict):
            raise SeergateError(f"{source}: results holds {result!r}; it must be a list of objects")
        for name in ("token_budget", "accuracy", "standard_error", "samples", "mean_tokens"):
            value = result.get(name)
            if value is not None and not (is_number(value) and abs(value) < 1e300):
                shown = reprlib.repr(value)
                raise SeergateError(f"{source}: {name} of a result is {shown}; it must be a number or null")
