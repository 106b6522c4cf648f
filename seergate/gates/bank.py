"""`Gates`: one gate per gated layer of a model, and everything that is saved with them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor, nn

from seergate.checks import is_int, is_number
from seergate.config import RULE_OPTIONS, RULES, SCORERS, DecodeConfig, GateConfig, class_of
from seergate.errors import SeergateError, first_line
from seergate.gates.geometry import ModelGeometry
from seergate.gates.retention import RetentionGate
from seergate.gates.scorer import Scorer

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Gates(nn.Module):
    """The gates of one model and their metadata. The subclass `seergate.GateBank` adds models and files, for users.

    The state dict, which is also the adapter's, has keys ``layers.{i}.`` plus a parameter name of the gate, such as
    ``q_proj.weight``. It does not contain the base model.

    Args:
        config: the architecture, the same for all layers.
        geometry: properties of the model that the gates are for.
        training: record of the training, as JSON types; the attribute is ``training_record``.
        decode_defaults: fields of `DecodeConfig` to decode with by default, such as ``{"compat": "published"}``.
        results: measured results, one mapping each: ``task``, ``method``, ``token_budget``, ``accuracy`` (0..1),
            ``standard_error``, ``samples``, ``limit`` (a text, for methods without a budget), ``options`` and
            ``task_options`` (texts); other keys are kept.
        licence: ``license`` and, if that is not a standard identifier, ``license_name`` and ``license_link``.

    Attributes:
        source: the directory or Hub id that the gates were loaded from, or empty.

    Raises:
        ValueError: if the architecture does not fit the geometry.
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
        self._share_frequencies()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._share_frequencies()
        return self

    def _share_frequencies(self) -> None:
        """Give all gates on a device the same tensor of RoPE frequencies: a decode step then computes angles once."""
        shared: dict[torch.device, Tensor] = {}
        for gate in self.layers.values():
            if isinstance(gate, Scorer) and gate.inv_freq is not None:
                gate.inv_freq = shared.setdefault(gate.inv_freq.device, gate.inv_freq)

    def gate(self, layer: int) -> Any:
        """The gate of a layer of the model: a `Scorer`, or a `RetentionGate` if ``config.retention``."""
        return self.layers[str(layer)]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Pairs of layer index and gate, by ascending layer."""
        return ((layer, self.gate(layer)) for layer in self.geometry.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def nbytes(self) -> int:
        """Size of the parameters in bytes."""
        return sum(parameter.nbytes for parameter in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return next(self.parameters()).dtype

    def decode_config(self, **given: Any) -> DecodeConfig:
        """The `DecodeConfig` of these gates: their ``decode_defaults``, overridden by ``given``.

        If ``given`` has a rule (one of `seergate.config.RULES`), the options of the default rule are dropped.
        """
        replaced = RULE_OPTIONS if RULES.keys() & given.keys() else ()
        rest = {name: value for name, value in self.decode_defaults.items() if name not in replaced}
        return DecodeConfig(**{**rest, **given})

    def record(self) -> dict[str, Any]:
        """Everything except the weights, as arguments of the constructor."""
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
        """Gates with this `record` and copies of these weights, on the CPU and all in the widest of their dtypes.

        Raises:
            SeergateError: naming ``source`` and the first invalid result, or the first tensor that is missing,
                unexpected, of the wrong shape, not floating-point or not finite.
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
        """A copy on the CPU, with other weights or with changes to the `record`."""
        weights = self.state_dict() if tensors is None else tensors
        return self.holding(weights, "these gates", **{**self.record(), **changes})

    def cast(self, dtype: torch.dtype) -> Self:
        """A copy on the CPU in another dtype; a SeergateError if it is not in `DTYPES` or a number overflows."""
        tensors = {name: tensor.to(dtype) for name, tensor in self.state_dict().items()}
        return self.holding(tensors, f"these gates in {dtype}", **self.record())

    def subset(self, layers: Iterable[int]) -> Self:
        """A copy with the gates of some layers, without results and means over more layers; the model's other layers
        will be dense, or read what an anchor selects. Anchors among the decode defaults that have no gate any more are
        left out.

        Raises:
            SeergateError: if a layer has no gate, or ``layers`` is empty.
        """
        indices = sorted(set(layers))
        absent = [layer for layer in indices if not is_int(layer) or layer not in self.geometry.layers]
        if absent or not indices:
            raise SeergateError(f"layers is {absent or indices}; it must name some of {list(self.geometry.layers)}")
        tensors = {name: x for name, x in self.state_dict().items() if int(name.split(".")[1]) in indices}
        geometry, defaults = replace(self.geometry, layers=tuple(indices)), dict(self.decode_defaults)
        if "anchors" in defaults:
            defaults["anchors"] = [layer for layer in defaults["anchors"] if layer in indices]
        measured = (
            ("kl_", "recall_", "anchor_recall", "own_recall") if len(indices) < len(self.geometry.layers) else ()
        )
        training = {name: value for name, value in self.training_record.items() if not name.startswith(measured)}
        return self.derived(tensors, geometry=geometry, decode_defaults=defaults, training=training, results=())

    def with_anchors(self, anchors: Sequence[int], **training: Any) -> Self:
        """A copy with the gates of the anchor layers only, and these anchors as decode default, so that the layers
        above them reuse their selection (`DecodeConfig.anchors`); ``training`` is added to the training record.
        """
        defaults = {**self.decode_defaults, "anchors": list(anchors)}
        some = self.subset(anchors)
        return some.derived(decode_defaults=defaults, training={**some.training_record, **training})


def make_gate(config: GateConfig, geometry: ModelGeometry) -> Scorer | RetentionGate:
    """A gate for one layer, with newly initialised weights."""
    gate: Scorer | RetentionGate = class_of(SCORERS[config.scorer].gate)(config, geometry)
    return gate


def _expected_shapes(config: GateConfig, geometry: ModelGeometry, source: str) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, in the state dict of gates."""
    try:
        with torch.device("meta"):  # only one gate, in case a file names thousands of layers
            one = make_gate(config, geometry)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # torch raises the last two for absurd sizes
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
