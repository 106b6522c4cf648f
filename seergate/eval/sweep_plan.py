"""The settings of a sweep, from a YAML file or the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from huggingface_hub.dataclasses import type_validator

from seergate.config import is_retention
from seergate.errors import SeergateError, did_you_mean
from seergate.eval.calibration.matching import MEASURES
from seergate.eval.method_text import read_method
from seergate.eval.runner import RunOptions
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec, grid
from seergate.eval.tasks.registry import make_task
from seergate.eval.tasks.task import Task
from seergate.methods import Dense, has_gates
from seergate.yaml_file import read_yaml

MATCHES = ("budget", *MEASURES)

NOT_WRITTEN = ("sampling", "model_name", "on_progress")
"""Options of a run that are derived from others, or cannot be written, and so are not accepted in a file."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan(RunOptions):
    """A grid of settings on one task, and how to run them. Lists span the grid; a file may give a single value.

    Attributes:
        model: preset, directory or Hub id.
        gates: adapter directory or Hub id; or name -> adapter, in which case methods with gates run once with each
            adapter of their block size.
        method: methods, with options as ``NAME:OPTION=VALUE`` (`read_method`). ``dense`` runs once, and first.
        budget: token budgets; empty takes the task's.
        match: quantity that is equal between methods at a budget: ``budget`` (tokens), ``resident`` (bytes held on
            average) or ``read`` (bytes read per step). Budgets in bytes are given as tokens of the dense cache
            (`seergate.eval.calibration.matching`).
        threshold: thresholds for methods that select blocks, in addition to the budgets.
        block_size: tokens per block, for methods that select blocks; empty takes the block size of the gates if a
            method decodes with gates, else 64. Other methods have their own block size.
        dense_layers: choices of layers that stay dense; see `MethodSpec`.
        task: name, also with options as ``NAME:OPTION=VALUE``, or file (`make_task`); empty is `chain_sum`.
        task_options: options of the task, such as ``problems``.
        temperature, top_p, top_k, min_p: the sampling; without a temperature, the task's or the model's own.
        workers: number of workers that generate, by Ray; 0 generates in this process.
        ray_address: address of a running Ray cluster; see `seergate.eval.sweep`.
        dtype, device, threads: how the model is loaded and run.
        out: directory of the runs.
    """

    model: str = "tiny-reasoner"
    gates: str | dict[int | str, str] | None = None
    method: list[str] = field(default_factory=lambda: ["dense", "gate"])
    budget: list[int] = field(default_factory=list)
    match: str = "budget"
    threshold: list[float | int] = field(default_factory=list)
    block_size: list[int] = field(default_factory=list)
    dense_layers: list[tuple[int, ...] | None] = field(default_factory=lambda: [None])
    task: str = ""
    task_options: dict[str, Any] = field(default_factory=dict)
    temperature: float | int | None = None
    top_p: float | int = 1.0
    top_k: int = 0
    min_p: float | int = 0.0
    batch_size: int | None = None
    workers: int = 0
    ray_address: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_name", self.model)
        if self.temperature is not None:
            sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
            object.__setattr__(self, "sampling", sampling)
        elif self.top_p != 1.0 or self.top_k or self.min_p:
            raise SeergateError(
                "top-p, top-k and min-p have no effect without --temperature (in a file: temperature); give it too"
            )

    @classmethod
    def read(cls, path: Path) -> SweepPlan:
        """Read a plan from a YAML file whose keys are the attributes."""
        return cls.of(read_yaml(path), str(path))

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "the sweep") -> SweepPlan:
        """A plan from plain values; a single value stands for a list of one."""
        types = {name: kind for name, kind in get_type_hints(cls).items() if name not in NOT_WRITTEN}
        given = dict[str, Any]()
        for name, value in values.items():
            if name not in types:
                raise SeergateError(f"{where} has no setting {name!r}; {did_you_mean(str(name), types)}")
            if name == "dense_layers" and isinstance(value, list):  # [0, 1] is one choice; [[], [0, 1]] are two
                choices = value if value and isinstance(value[0], list) else [value]
                value = [tuple(choice) if isinstance(choice, list) else choice for choice in choices]
            elif get_origin(types[name]) is list and not isinstance(value, list):
                value = [value]
            try:
                type_validator(name, value, types[name])
            except TypeError as error:
                must = str(types[name]).removeprefix("<class '").removesuffix("'>")
                raise SeergateError(f"{where}: {name} is {value!r}; it must be {must}") from error
            if name == "method" and not value:
                raise SeergateError(f"{where}: method is empty; it must name at least one method")
            given[name] = value
        return cls(**given)

    def make_task(self) -> Task:
        """The task that the plan names."""
        return make_task(self.task or "chain_sum", **self.task_options)

    def specs(self, task: Task, gate_sizes: list[int]) -> list[MethodSpec]:
        """The settings, with the task's budgets if the plan has none. ``gate_sizes`` are the block sizes of the gates;
        they matter only if a method decodes with gates.
        """
        names = {name for text in self.method if not is_retention(name := read_method(text)[0])}
        gate_sizes = gate_sizes if any(map(has_gates, names)) else []
        sizes: list[int] = self.block_size or gate_sizes or [64]
        specs = grid(self.method, self.budget, list(sizes), self.dense_layers, self.threshold, task.budgets)
        if self.match not in MATCHES:
            raise SeergateError(f"match is {self.match!r}; it must be {', '.join(MATCHES[:-1])} or {MATCHES[-1]}")
        if self.match != MATCHES[0]:
            self._check_match(specs, sizes, self.budget or list(task.budgets))
        missing = sorted(set(sizes) - set(gate_sizes)) if gate_sizes else []
        if missing:
            raise SeergateError(
                f"block_size is {missing[0]}, but these gates have {', '.join(map(str, gate_sizes))}; leave it out, "
                "or give gates for each block size"
            )
        return specs

    def _check_match(self, specs: list[MethodSpec], sizes: list[int], budgets: list[int]) -> None:
        if specs[0].name != Dense.name:
            raise SeergateError(
                f"match is {self.match!r}, which needs dense among the methods: bytes are compared on its answers"
            )
        if self.threshold or not budgets:
            raise SeergateError(f"match is {self.match!r}, which chooses by budgets; give some, and no thresholds")
        if len(sizes) > 1 or len(self.dense_layers) > 1:
            theirs = len(sizes) > 1 and not self.block_size
            found = f" (these gates have {', '.join(map(str, sizes))})" if theirs else ""
            raise SeergateError(
                f"match is {self.match!r}; give one block size{found} and one choice of dense layers with it"
            )
