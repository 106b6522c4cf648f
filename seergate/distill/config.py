"""The configuration of a distillation run: `TrainConfig`, its presets, and overrides.

`seergate.options` derives the command line from the dataclasses. The values of presets, other YAML files and Python
callers go through the same parser.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from seergate.config import POOLINGS, SCORERS, GateConfig, check_recipe, is_retention, scorer_kind
from seergate.durable import naming
from seergate.errors import SeergateError, did_you_mean
from seergate.eval.tasks.chain_sum import GIVENS, NAMES
from seergate.models.names import locate, preset_of
from seergate.options import Parser, add_options, as_text, option
from seergate.paths import HUB_ID, exists, is_local_model, model_name, shipped
from seergate.yaml_file import read_yaml

DEFAULT_PRESET = "tiny-reasoner"
"""The default model; it ships with seergate and needs no network."""

RECOMMENDED = "configs/recipes/recommended.yaml"
"""The default recipe for models without a preset."""

CHAIN_SUM = "chain_sum"
"""Name of the built-in training data: generated problems of the tiny reasoner's task."""

TRACKERS = ("tensorboard", "wandb", "trackio")
"""Experiment trackers, named as in Hugging Face's trainers."""

MAX_LENGTH = 32768
"""Tokens per pack in the paper; packs are shorter for models with fewer positions."""

MOST_PACKS = 1_000_000
"""Largest number of packs per optimizer step; every process makes a list of them."""

_SHARE = re.compile(r"\d*\.?\d+(e[+-]?\d+)?")


class _Joined(argparse.Action):
    """Joins several arguments, also of repeated options, into one string, separated by commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, ",".join([*([earlier] if earlier else []), *values]))


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the frozen model, its placement and its precision."""

    _argument_group_name = "model"

    model: str = option(
        MISSING, f"preset of configs/, directory, GGUF or Hub id (org/name) of the frozen model [{DEFAULT_PRESET}]"
    )
    revision: str | None = option(None, "revision of the model on the Hub")
    rope_scaling: str | None = option(
        None,
        "RoPE instead of the model's own, as a JSON object of transformers' form: "
        '\'{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}\'',
    )
    output_dir: str | None = option(None, "where the run goes [runs/<model>-gates]")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "the frozen model's precision [bfloat16 on a GPU, float32 on a CPU]; gates train in float32"
    )
    quantize: Literal["none", "bnb-8bit", "bnb-4bit", "torchao-int8"] = option(
        "none", "keep the frozen model's linear layers in 8 or 4 bits (needs bitsandbytes or torchao)"
    )
    base_memory_gb: float | None = option(
        None,
        "device memory for the frozen model in GB, per process; other layers are offloaded to host memory, then to "
        "disk, and fetched for each pack [all of it on the device]",
    )
    shard_base: bool | None = option(
        None,
        "shard the frozen model over the processes and gather one layer at a time "
        "[if a copy per process does not fit]",
    )


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Options of the gates' architecture."""

    _argument_group_name = "gate"

    block_size: int = option(64, "tokens per block, 8..256")
    gate_dim: int | None = option(
        None,
        "width of the gate [the model's head dimension; "
        f"{' and '.join(f'{kind.gate_dim} for {name}' for name, kind in SCORERS.items() if kind.gate_dim)}]",
    )
    k_pooling: tuple[str, ...] = option(POOLINGS, "how the keys of a block are pooled: some of max,min,avg")
    q_pooling: str = option("proj", "how a group's query heads become one: proj, avgproj, avg or none")
    qk_norm: bool = option(True, "RMSNorm on the gate's queries and keys")
    rope: bool = option(True, "rotary position embedding on the gate's queries and keys")
    scorer: str = option(
        "attn_gate",
        "what scores blocks to read: SeerAttention-R's gate, the index branch of MiniMax Sparse Attention or the "
        "indexer of DeepSeek Sparse Attention; or tokens to keep: the gates of Fast KVzip or TRIM-KV",
        choices=SCORERS.keys(),  # a view, which shows those that a program adds
    )
    sink_blocks: int = option(0, "number of first blocks that are left out of training and always read in decoding")
    anchors: tuple[int, ...] = option(
        (), "layers with gates; each gate also selects for the layers above it, up to the next one [all layers]"
    )
    init: Literal["random", "model"] = option(
        "random",
        "initial weights of fresh gates: random, or model: the model's own product of queries and pooled keys, plus "
        "random weights (attn_gate as wide as the model's heads)",
    )
    init_gates: str | None = option(
        None, "gates to begin with, of the same model and architecture: a directory or Hub id [fresh ones]"
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of the training data."""

    _argument_group_name = "data"

    data: str = option(
        "open-r1/OpenR1-Math-220k",
        "dataset: Hub id, a local file or directory (JSONL, JSON, Parquet, Arrow) or chain_sum; or "
        "several as SOURCE:SHARE (org/a:0.7 b.jsonl:0.3); a Hub id may have a revision (org/a@main:0.7)",
        nargs="+",
        action=_Joined,
    )
    data_config: str | None = option(None, "configuration of a Hub dataset [its default]")
    data_revision: str | None = option(None, "revision of a Hub dataset [its newest]")
    data_split: str = option("train", "split of the dataset")
    data_column: str | None = option(
        None, "column with the conversation or text [messages, prompt+completion or text]"
    )
    data_limit: int | None = option(None, "use this many rows at most; with chain_sum, the number of problems")
    streaming: bool = option(False, "read a Hub dataset row by row instead of downloading it (set data_limit too)")
    chain_sum_variables: tuple[int, ...] = option((8, 75), "smallest and largest problem of chain_sum")
    chat_template: str | None = option(None, "a .jinja file to use instead of the model's own chat template")
    max_length: int = option(
        MAX_LENGTH, "maximum tokens per pack and sample; the default is limited to the model's positions"
    )
    over_length: Literal["truncate", "drop"] = option("truncate", "what happens to samples longer than max_length")
    token_cache: str | None = option(None, "directory for tokenised data [~/.cache/seergate/tokens]")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Options of the training recipe."""

    _argument_group_name = "recipe"

    recipe: Literal["paper", "recommended"] = option(
        "paper",
        "the defaults of all other options: paper for those of SeerAttention-R, or recommended for those of "
        "configs/recipes/recommended.yaml, which is the default of models without a preset",
    )
    max_steps: int = option(800, "optimizer steps")
    packs_per_step: int = option(16, "packs per optimizer step, over all processes together")
    gradient_accumulation_steps: int | None = option(
        None, "packs per optimizer step of each process; sets packs_per_step to this times the number of processes"
    )
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    min_lr: float = option(1e-5, "learning rate that the cosine ends at")
    lr_head_dim: int | None = option(
        None,
        "head dimension for which the learning rates are meant; for wider heads they are lower in proportion [any]",
    )
    warmup_steps: int = option(20, "steps of linear warm-up")
    weight_decay: float = option(0.0, "AdamW's weight decay")
    max_grad_norm: float = option(1.0, "largest norm of the gradient; 0 switches clipping off")
    row_start: float = option(0.5, "only rows from this fraction of each sample on count in the loss, in [0, 1)")
    row_stride: int = option(1, "count only every N-th of these rows, at another offset in each pack")
    reduction: Literal["row_mean", "published"] = option(
        "row_mean", "row_mean: true KL in nats per row; published: the weighting of the published code"
    )
    target: Literal["max", "sum"] = option(
        "max", "what the gate learns of a block's attention: the largest probability, or the sum of all"
    )
    target_budget: int = option(2048, "token budget of a KV head's cache, with scorer trim_kv")
    seed: int = option(0, "seed of the gates' initial values and of the order of the packs")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options of checkpoints, evaluation, logging and the engine. They may change when a run is resumed."""

    _argument_group_name = "checkpoints, evaluation, logging and engine"

    save_steps: int = option(100, "steps between checkpoints; 0 keeps only the last")
    save_total_limit: int = option(2, "checkpoints to keep")
    resume: bool = option(True, "continue from the newest checkpoint in output_dir")
    eval_steps: int = option(100, "steps between evaluations on held-out packs; 0 switches them off")
    eval_packs: int = option(16, "packs held out for evaluation, at most a tenth of all")
    eval_row_start: float | None = option(
        None, "rows from this fraction of each sample on count in evaluations [row_start]"
    )
    logging_steps: int = option(10, "steps between plain log lines where there is no terminal")
    recall_budgets: tuple[int, ...] = option(
        (1024, 2048, 4096), "token budgets, shorter than packs, at which the recall of teacher mass is logged"
    )
    report_to: tuple[str, ...] = option(
        ("tensorboard",), f"where every step's numbers go: some of {','.join(TRACKERS)}, or none"
    )
    push_to_hub: str | None = option(None, "Hub repository (org/name) for the finished gates")
    deepspeed: str | None = option(
        None,
        "DeepSpeed configuration file, or none; the deepspeed launcher implies ds_configs/zero2.json",
        nargs="?",
        const="",
    )


_RULES: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    (
        "max_steps max_length data_limit save_total_limit logging_steps lr_head_dim",
        lambda number: number >= 1,
        "a positive integer",
    ),
    (
        "packs_per_step gradient_accumulation_steps",
        lambda number: 1 <= number <= MOST_PACKS,
        f"a positive integer, at most {MOST_PACKS:,}",
    ),
    ("seed", lambda seed: 0 <= seed < 2**63, "0 or a positive integer below 2**63"),
    (
        "revision output_dir data_config data_revision data_column chat_template token_cache",
        bool,
        "a name or a path, or left out",
    ),
    ("output_dir token_cache", lambda path: Path(path).parts[:1] != ("~",), "written out: only a shell replaces ~"),
    ("warmup_steps save_steps eval_steps eval_packs", lambda number: number >= 0, "0 or a positive integer"),
    ("learning_rate", lambda rate: 0 < rate < math.inf, "a positive number"),
    ("base_memory_gb", lambda size: 0 < size < math.inf, "a positive number of gigabytes"),
    ("weight_decay", lambda decay: 0 <= decay < math.inf, "0 or a positive number"),
    ("max_grad_norm", lambda norm: 0 <= norm < math.inf, "0 (off) or a positive number"),
    ("row_start eval_row_start", lambda share: 0 <= share < 1, "at least 0 and below 1"),
    ("anchors", lambda layers: all(layer >= 0 for layer in layers), "layers, 0 or greater"),
    ("model", bool, "a preset, a Hub id (org/name) or a directory"),
    ("init_gates", bool, "a directory or Hub id"),
    ("data", bool, "a Hub id, a local path or chain_sum"),
    ("push_to_hub", HUB_ID.fullmatch, "a Hub repository (org/name)"),
    (
        "report_to",
        lambda names: names == ("none",) or set(names) <= set(TRACKERS),
        f"some of {', '.join(TRACKERS)}, or none alone",
    ),
    (
        "chain_sum_variables",
        lambda sizes: len(sizes) == 2 and GIVENS < sizes[0] <= sizes[1] <= NAMES,
        f"two integers in {GIVENS + 1}..{NAMES}, the smaller one first",
    ),
)
"""Rules for option values: names of the options, a predicate that each given value must meet, and its description."""


class _Share(NamedTuple):
    """One source of a data mixture."""

    name: str
    revision: str | None
    share: float


def _share(source: str) -> _Share | None:
    """Parse ``NAME:SHARE``, or ``NAME@REVISION:SHARE`` for the Hub; ``None`` for an existing path or no share."""
    place, _, share = source.rpartition(":")
    if not place or not _SHARE.fullmatch(share) or exists(source):
        return None
    if place.startswith(("/", ".", "~")) or exists(place):
        return _Share(place, None, float(share))
    name, _, revision = place.partition("@")
    return _Share(name, revision or None, float(share))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CheckpointOptions, RecipeOptions, DataOptions, GateOptions, ModelOptions):
    """One distillation run. The defaults are the paper's recipe (SeerAttention-R, section 4.1, and its launch script).

    Each field is described by its ``metadata["help"]``, which is also the command line's help.

    Raises:
        ValueError: if an option is out of range or contradicts another one.
    """

    def __post_init__(self) -> None:
        check_recipe(self.gates(128), self.target, self.reduction, self.target_budget, self.row_stride)
        for options, holds, rule in _RULES:
            for name in options.split():
                self._must(name, getattr(self, name) is None or bool(holds(getattr(self, name))), rule)
        fresh = self.init_gates is None and scorer_kind(self.scorer).begins_as_model
        able = ", ".join(name for name, kind in SCORERS.items() if kind.begins_as_model)
        self._must("init", fresh or self.init == "random", f"random with init_gates or a scorer other than {able}")
        retention = is_retention(self.scorer)
        self._must("anchors", not (retention and self.anchors), f"left out with scorer {self.scorer!r}, which evicts")
        unread = (1 + self.sink_blocks) * self.block_size
        self._must("max_length", self.max_length > unread, f"larger than {unread}: the sink blocks and one block more")
        peak = self.learning_rate
        self._must("min_lr", 0 <= self.min_lr <= peak, f"between 0 and learning_rate ({peak})")
        shares = [part.share if part else 0.0 for part in self._shares()]
        names = [part.name for part in self._shares() if part]
        mixed = all(shares) and len(set(names)) == len(names)
        self._must(
            "data", not names or mixed, "one source, or different ones with a positive share each (a:0.7 b:0.3)"
        )
        if self.rope_scaling is not None:
            self._must("rope_scaling", "rope_type" in self.rope_parameters, 'a JSON object with "rope_type"')
        blocks = all(budget >= self.block_size for budget in self.recall_budgets)
        self._must("recall_budgets", blocks, f"numbers of tokens, each at least block_size ({self.block_size})")
        quantized, limited = self.quantize != "none", self.base_memory_gb is not None
        through = scorer_kind(self.scorer).end_to_end
        whole = f"with scorer {self.scorer!r}, which trains through the whole model"
        for name, clash, where in (
            ("base_memory_gb", limited and quantized, f"when quantize is {self.quantize}"),
            ("shard_base", self.shard_base and (limited or quantized), "with base_memory_gb or quantize"),
            ("base_memory_gb", limited and through, whole),
            ("shard_base", self.shard_base and through, whole),
            ("data_revision", any(shares) and self.data_revision, "where data names several sources, which have their "
             "own (org/a@REVISION:0.7)"),
        ):  # fmt: skip
            self._must(name, not clash, f"left out {where}")
        # On a CPU, bitsandbytes' 4-bit layers pass no gradient back; GPUs were not tested.
        self._must("quantize", not through or self.quantize != "bnb-4bit", f"none, torchao-int8 or bnb-8bit {whole}")

    def _must(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

    def gates(self, head_dim: int) -> GateConfig:
        """Return the gates' architecture; ``gate_dim`` defaults to the scorer's width, or else to ``head_dim``."""
        given = {item.name: getattr(self, item.name) for item in fields(GateConfig)}
        width = scorer_kind(self.scorer).gate_dim or head_dim if self.gate_dim is None else self.gate_dim
        return GateConfig(**{**given, "gate_dim": width})

    def for_heads(self, head_dim: int) -> TrainConfig:
        """Return the configuration with the learning rates for this head dimension.

        A step of Adam changes the output of a linear map in proportion to the number of its inputs.
        """
        scale = 1.0 if self.lr_head_dim is None else min(1.0, self.lr_head_dim / head_dim)
        return replace(self, learning_rate=scale * self.learning_rate, min_lr=scale * self.min_lr, lr_head_dim=None)

    @property
    def loss_options(self) -> dict[str, Any]:
        """Options of the loss on a pack, as fields of `seergate.distill.losses.distill_loss.DistillSpec`."""
        names = ("row_start", "reduction", "recall_budgets", "target", "target_budget", "row_stride")
        return {name: getattr(self, name) for name in names}

    @property
    def run_dir(self) -> Path:
        """Directory of the adapter, checkpoints and logs."""
        return Path(self.output_dir) if self.output_dir else Path("runs") / f"{model_name(self.model).lower()}-gates"

    def _shares(self) -> list[_Share | None]:
        return [None] if exists(self.data) else [_share(source) for source in self.data.split(",")]

    @property
    def sources(self) -> list[tuple[TrainConfig, float]]:
        """(configuration with this source alone, share) for each source of ``data``; (self, 1.0) without a mixture."""
        return [
            (replace(self, data=part.name, data_revision=part.revision), part.share) for part in self._shares() if part
        ] or [(self, 1.0)]

    def with_data_revisions(self, revisions: Sequence[str | None]) -> TrainConfig:
        """Return this configuration with one revision for each of its `sources`."""
        if not any(self._shares()):
            return replace(self, data_revision=revisions[0])
        places = zip(self.sources, revisions, strict=True)
        return replace(
            self, data=",".join(f"{one.data}{f'@{at}' if at else ''}:{share}" for (one, share), at in places)
        )

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """``rope_scaling`` as a mapping; empty if it is not given or is not a JSON object."""
        try:
            parameters = json.loads(self.rope_scaling or "{}")
        except ValueError:
            return {}
        return parameters if isinstance(parameters, dict) else {}

    def in_processes(self, number: int) -> TrainConfig:
        """Replace ``gradient_accumulation_steps`` by the equivalent ``packs_per_step`` for ``number`` processes."""
        if self.gradient_accumulation_steps is None:
            return self
        packs = self.gradient_accumulation_steps * number
        return replace(self, packs_per_step=packs, gradient_accumulation_steps=None)

    def most_packs(self, processes: int) -> int:
        """Maximum number of packs that one process computes in a step; other processes may compute one less."""
        return -(-self.packs_per_step // processes)

    def uneven(self, processes: int) -> str | None:
        """Return a note if ``packs_per_step`` is not divisible by the number of processes, else ``None``."""
        most = self.most_packs(processes)
        fewer = most * processes - self.packs_per_step
        share = "one less" if most > 1 else "none"
        return f"{self.packs_per_step} packs a step: {share} for {fewer} of {processes} processes" if fewer else None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain YAML types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def result_shaping(self) -> dict[str, Any]:
        """Return the fields that affect the trained gates. A run resumes from a checkpoint only if they are equal."""
        free = {item.name for item in fields(CheckpointOptions)} - {"eval_packs"}  # held-out packs are not trained on
        free |= {"output_dir", "base_memory_gb", "shard_base", "token_cache", "recipe"}
        return {name: value for name, value in self.to_dict().items() if name not in free}

    def save(self, path: Path) -> None:
        """Write all fields as YAML."""
        with naming(path):
            path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Inverse of `to_dict`. Numbers, lists and booleans may also be strings, since YAML reads ``1e-3`` as one."""
        _check_names(values)
        given = {name: value for name, value in values.items() if value is not None}  # None is always the default
        options = [f"--{name}={as_text(value)}" for name, value in given.items()]
        return cls(**vars(option_parser(prog="").parse_args(options)))


def option_parser(**arguments: Any) -> Parser:
    """Return a parser of all options; its result holds only given options. ``arguments`` are for `ArgumentParser`."""
    parser = Parser(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **arguments)
    for kind in TrainConfig.__bases__[::-1]:
        add_options(parser.add_argument_group(vars(kind)["_argument_group_name"]), kind)
    return parser


def read_options(path: Path) -> dict[str, Any]:
    """Read training options from a YAML file; raises `SeergateError` for an unknown option."""
    values = read_yaml(path)
    _check_names(values, f"{path}: ")
    return values


def _check_names(names: Iterable[str], where: str = "") -> None:
    options = [item.name for item in fields(TrainConfig)]
    for name in names:
        if name not in options:
            raise SeergateError(f"{where}{name!r} is not an option of training; {did_you_mean(str(name), options)}")


def load_train_config(model: str | None = None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration of a run: the recipe's defaults, overridden by the preset, then by ``overrides``.

    Args:
        model: a model directory, a GGUF file, the name of a preset of ``configs/`` in any case (``"Qwen3-8B"``), or a
            Hub id. The Hub id of a preset's model selects the preset, too (``"Qwen/Qwen3-8B"``).
        overrides: options that override those of the preset.

    Raises:
        SeergateError: if the model is none of these (the message suggests a preset), or an option is unknown.
        ValueError: if an option is out of range.
    """
    overrides = dict(overrides or {})
    named = overrides.pop("model", DEFAULT_PRESET)
    model = named if model is None else model
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    preset = preset_of(model)
    values: dict[str, Any] = {"model": model} if preset is None else read_options(preset)
    if overrides.get("data") not in (None, values.get("data")):  # the preset's limit and columns are of its own data
        values = {name: value for name, value in values.items() if not name.startswith("data_")}
    given = {**values, **overrides}
    gated = given.get("scorer", "attn_gate") == "attn_gate"  # the recommended recipe is for these gates
    if not gated and "recipe" not in overrides:
        given.pop("recipe", None)  # a preset's
    given.setdefault("recipe", "recommended" if gated and values.keys() == {"model"} else "paper")
    defaults = read_options(shipped(RECOMMENDED)) if given["recipe"] == "recommended" else {}
    if given.get("init_gates"):
        defaults.pop("init", None)
    return TrainConfig.from_dict(overridden(defaults, given))


def overridden(options: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Options overridden by others. ``packs_per_step`` also overrides ``gradient_accumulation_steps``, which would
    otherwise win over it.
    """
    replaced = {"gradient_accumulation_steps"} if by.get("packs_per_step") else set()
    return {name: value for name, value in options.items() if name not in replaced} | dict(by)


def locate_model(config: TrainConfig) -> TrainConfig:
    """Resolve ``model`` to a name for `load_base`; raise `SeergateError` if it or ``chat_template`` does not exist."""
    if config.chat_template is not None and not Path(config.chat_template).is_file():
        raise SeergateError(f"chat_template is {config.chat_template!r}; it must be a .jinja file that exists")
    located = replace(config, model=locate(config.model))
    if config.revision is not None and is_local_model(located.model):
        raise SeergateError(
            f"revision is {config.revision!r}, but {config.model} lies on this machine; it must be left out"
        )
    return located
