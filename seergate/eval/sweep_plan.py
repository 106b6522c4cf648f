"""The settings of a sweep, from a YAML file or the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_origin, get_type_hints

from huggingface_hub.dataclasses import type_validator

from seergate.config import is_retention
from seergate.errors import SeergateError, did_you_mean
from seergate.eval.calibration.matching import MEASURES
from seergate.eval.method_text import read_method
from seergate.eval.run_config import RunOptions
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec, grid
from seergate.eval.tasks.registry import make_task
from seergate.eval.tasks.task import Task
from seergate.methods import Dense, has_gates
from seergate.options import listed, option
from seergate.paths import exists

MATCHES = ("budget", *MEASURES)

NOT_WRITTEN = ("sampling", "model_name", "on_progress")
"""Options of a run that are derived from others, or cannot be written, and so are not accepted in a file."""


def named_gates(text: str) -> str | dict[str, str]:
    """Parse ``--gates``: one adapter, or several named ones as ``NAME=DIR,NAME=DIR``."""
    if os.sep in text.partition("=")[0] or "=" not in text or exists(text):
        return text
    pairs = [part.strip().partition("=") for part in text.split(",")]
    named = {name: place for name, _, place in pairs}
    if not all(name and place for name, _, place in pairs) or len(named) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} must be DIR, or NAME=DIR,NAME=DIR with different names")
    return named


@dataclass(frozen=True, kw_only=True)
class SweepPlan(RunOptions):
    """A grid of settings on one task, and how to run them. Lists span the grid; a file may give a single value.

    Each option is described by its ``metadata["help"]``, which is also the command line's help.

    Attributes:
        gates: with several adapters, methods with gates run once with each one of their block size.
        match: see `seergate.eval.calibration.matching`.
        task_options: options of the task, such as ``problems`` (`make_task`).
    """

    model: str = option("tiny-reasoner", "preset, directory, GGUF file or Hub id (org/name)")
    gates: str | dict[int | str, str] | None = option(
        None,
        "directory or Hub id (org/name) of gates; or NAME=DIR,NAME=DIR to compare them [gates/ of the model]",
        type=named_gates,
        metavar="DIR",
    )
    method: list[str] = option(["dense", "gate"], "methods, with options as NAME:OPTION=VALUE:...; dense runs first")
    budget: list[int] = option([], "tokens read per KV head and step [the task's]")
    match: str = option(
        MATCHES[0],
        "match settings by: the token budget, or the bytes held or read per step of that many dense tokens",
        choices=MATCHES,
    )
    threshold: list[float | int] = option([], "of the gate's probabilities, with or without budgets")
    block_size: list[int] = option([], "of methods that select blocks [the gates', else 64]")
    dense_layers: list[tuple[int, ...] | None] = option(
        [None], "layers that stay dense [the gates' own, else none]", type=listed(int, least=0), metavar="I,J"
    )
    task: str = option(
        "", "tasks, with options as NAME:OPTION=VALUE:..., or .jsonl files [the tiny model: chain_sum]", metavar="A,B"
    )
    task_options: dict[str, Any] = field(default_factory=dict)
    temperature: float | int | None = option(None, "0 is greedy [chain_sum: 0; others: the model's own sampling]")
    top_p: float | int = option(1.0, "with --temperature")
    top_k: int = option(0, "with --temperature; 0 is off")
    min_p: float | int = option(0.0, "with --temperature; 0 is off")
    batch_size: int | None = option(None, "samples generated together [what fits into memory]")
    workers: int = option(0, "generate in N workers, by Ray [in this process]")
    ray_address: str | None = option(None, "a running Ray cluster, or auto [start one here]", metavar="ADDRESS")
    dtype: str = option("auto", "auto is as saved", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int | None = option(None, "CPU threads per process [all cores, divided]")
    out: str | None = option(None, "directory of the runs [runs/eval-MODEL-TASK]", metavar="DIR")

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
    def of(cls, values: Mapping[str, Any], where: str = "the sweep") -> SweepPlan:
        """A plan from plain values, as YAML has them; a single value stands for a list of one."""
        types = {name: kind for name, kind in get_type_hints(cls).items() if name not in NOT_WRITTEN}
        given = dict[str, Any]()
        for name, value in values.items():
            if name not in types:
                raise SeergateError(f"{where} has no setting {name!r}; {did_you_mean(str(name), types)}")
            if name == "dense_layers" and isinstance(value, list):  # [0, 1] is one choice; [[], [0, 1]] are two
                choices = value if value and all(each is None or isinstance(each, list) for each in value) else [value]
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
        self.check_reference(specs)
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
            gates_note = f" (these gates have {', '.join(map(str, sizes))})" if theirs else ""
            raise SeergateError(
                f"match is {self.match!r}; give one block size{gates_note} and one choice of dense layers with it"
            )
