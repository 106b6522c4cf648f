"""Gates: one gate per gated layer of a model, and everything that is saved with them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor, nn

from seergate.checks import is_number
from seergate.config import RULE_OPTIONS, RULES, SCORERS, DecodeConfig, GateConfig, class_of
from seergate.errors import SeergateError, first_line
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
        """Gates with copies of these weights, on the CPU and all in one dtype, the widest of them.

        Args:
            tensors: the state dict.
            source: for error messages.
            **record: the arguments of the constructor.

        Raises:
            SeergateError: naming the first result that cannot be, or the first tensor that is missing, left over, of
                the wrong shape, not floating-point or not finite.
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


def make_gate(config: GateConfig, geometry: ModelGeometry) -> Scorer | RetentionGate:
    """The gate of one layer, with fresh weights.

    Raises:
        ValueError: if the configuration does not fit the model.
    """
    gate: Scorer | RetentionGate = class_of(SCORERS[config.scorer].gate).for_geometry(config, geometry)
    return gate


def _expected_shapes(config: GateConfig, geometry: ModelGeometry, source: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of gates, by name."""
    try:
        with torch.device("meta"):
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
