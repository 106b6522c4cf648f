"""Configuration: the architecture of gates (`GateConfig`, saved with them), decoding with them (`DecodeConfig`, set at
run time), and the correction of the errors of sparse decode steps (`Rectify`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any, Literal

from seergate.checks import check, check_count, check_counts, check_flags, check_one_of, is_int, is_number

TARGETS = ("max", "sum")
POOLINGS = ("max", "min", "avg")
Q_POOLINGS = ("proj", "avgproj", "avg", "none")
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 256
MAX_GATE_DIM = 65_536


@dataclass(frozen=True)
class ScorerKind:
    """Properties of the gates of one scorer. A class may be given as "module:Class", to be imported on first use.

    Attributes:
        gate: class of the gates: a `seergate.gates.scorer.Scorer`, which scores blocks for the method ``gate``, or a
            `seergate.gates.retention.RetentionGate`, which scores tokens for the eviction method of the scorer's name.
        loss: class of their distillation loss, a subclass of `seergate.distill.losses.distill_loss.DistillLoss`.
        retention: whether ``gate`` is a retention gate.
        end_to_end: whether the loss sends gradients through the whole model.
        poolings: whether the gates have the options ``k_pooling`` and ``q_pooling``.
        begins_as_model: whether new gates can be initialised from the model's own ``q . k`` (`Scorer.begin_as_model`).
        gate_dim: default width; if ``None``, 128, and in training the model's head dimension.
        paper: link to the paper in Markdown, for the model card of retention gates.
        plot_style: colour and marker of the series ``gate [SCORER]`` in plots; ``None`` for the style of the method
            ``gate``. Retention gates have the style of the method named like the scorer.
    """

    gate: str | type
    loss: str | type = "seergate.distill.losses.block_loss:BlockLoss"
    retention: bool = False
    end_to_end: bool = False
    poolings: bool = False
    begins_as_model: bool = False
    gate_dim: int | None = None
    paper: str | None = None
    plot_style: tuple[str, str] | None = None


SCORERS = {
    "attn_gate": ScorerKind("seergate.gates.gate:AttnGate", poolings=True, begins_as_model=True),
    "msa": ScorerKind("seergate.gates.msa:MSA", plot_style=("#AA3377", "^")),
    "indexer": ScorerKind("seergate.gates.indexer:Indexer", plot_style=("#4477AA", "D")),
    "fast_kvzip": ScorerKind(
        "seergate.gates.retention:FastKVzipGate",
        "seergate.distill.losses.retention_loss:ImportanceLoss",
        retention=True,
        gate_dim=16,
        paper="[Fast KVzip](https://arxiv.org/abs/2601.17668)",
    ),
    "trim_kv": ScorerKind(
        "seergate.gates.retention:TrimKVGate",
        "seergate.distill.losses.retention_loss:StudentLoss",
        retention=True,
        end_to_end=True,
        gate_dim=512,
        paper="[TRIM-KV](https://arxiv.org/abs/2512.03324)",
    ),
}
"""Scorer name -> kind of gates; a program may add its own."""


def scorer_kind(name: str) -> ScorerKind:
    """The kind of gates of a scorer.

    Raises:
        ValueError: if no scorer has this name.
    """
    check("scorer", name, name in SCORERS, f"one of {(*SCORERS,)}")
    return SCORERS[name]


def class_of(kind: str | type) -> Any:
    """The class itself, imported if it is given as "module:Class"."""
    return pkgutil.resolve_name(kind) if isinstance(kind, str) else kind


def is_retention(name: str) -> bool:
    """True if ``name`` is a scorer of retention gates, or its eviction method; false for unknown names."""
    return name in SCORERS and SCORERS[name].retention


def check_poolings(name: str, kinds: Any) -> tuple[str, ...]:
    """Check that ``kinds`` are one or more of `POOLINGS`, each at most once; returns them as a tuple."""
    if isinstance(kinds, str):
        raise ValueError(f"{name} is {kinds!r}; it must be a sequence such as ({kinds!r},)")
    listed = isinstance(kinds, Sequence) and all(isinstance(kind, str) for kind in kinds)
    right = listed and bool(kinds) and len(set(kinds)) == len(kinds) and set(kinds) <= set(POOLINGS)
    check(name, kinds, right, f"one or more of {POOLINGS}, each at most once")
    return tuple(kinds)


def check_recipe(gates: GateConfig, target: str, reduction: str, target_budget: int | None, row_stride: int) -> None:
    """Check options of the loss; retention gates allow only defaults, and need a budget if trained end to end."""
    scorer = gates.scorer
    if not gates.retention:
        check_rows(reduction, gates.sink_blocks, row_stride)
        return check_one_of("target", target, TARGETS)
    given = (("target", target, "max"), ("reduction", reduction, "row_mean"), ("row_stride", row_stride, 1))
    for name, value, default in given:
        if value != default:
            raise ValueError(f"{name} is {value!r}; with scorer {scorer!r} it must be left out")
    if SCORERS[scorer].end_to_end and (not is_int(target_budget) or target_budget < 1):
        raise ValueError(
            f"target_budget is {target_budget!r}; with scorer {scorer!r} it must be the number of tokens that each KV "
            "head learns to do with"
        )


def check_rows(reduction: str, sink_blocks: int, row_stride: int) -> None:
    """Check ``sink_blocks`` and ``row_stride``; the published code, and so reduction ``"published"``, has neither."""
    for name, value, least in (("sink_blocks", sink_blocks, 0), ("row_stride", row_stride, 1)):
        check_count(name, value, least)
        if reduction == "published" and value > least:
            raise ValueError(f"{name} is {value}; with reduction 'published' it must be left out")


@dataclass(frozen=True)
class GateConfig:
    """The architecture of gates.

    Attributes:
        block_size: tokens per block, 8..256. For ``fast_kvzip``: the number of newest tokens, which are never
            evicted. For ``trim_kv``: the minimum distance, in tokens, of attention that the reported recall counts.
        gate_dim: width of the gate's query and key vectors; must be even if ``rope`` is on. Default: 128, and for
            retention gates their authors' 16 (``fast_kvzip``) and 512 (``trim_kv``, the width of the hidden layer).
        k_pooling: only for ``attn_gate``: one to three of ``"max", "min", "avg"``, in the order of concatenation.
        q_pooling: only for ``attn_gate``: how the query heads of a group are combined. ``"proj"``: sum of one linear
            map per head, as in the paper; ``"avgproj"``: mean, then a linear map; ``"avg"``: mean only, with a
            ``gate_dim`` equal to the head dimension; ``"none"``: one query per head and their highest score.
        qk_norm: apply RMSNorm over ``gate_dim`` on both branches, between the linear map and RoPE; for ``indexer``,
            LayerNorm on the keys only, as in DeepSeek's code.
        rope: apply RoPE to queries and index keys at their own positions, and to compressed keys at the first position
            of their block. Always ``False`` for retention gates, whatever is given.
        scorer: a key of `SCORERS`. Block scorers: ``"attn_gate"`` (SeerAttention-R, section 2.2), one key per block;
            ``"msa"`` (MiniMax Sparse Attention) and ``"indexer"`` (DeepSeek Sparse Attention), one key per token.
            Token scorers, for eviction: the retention gates ``"fast_kvzip"`` and ``"trim_kv"``, without RoPE.
        sink_blocks: number of first blocks of a sequence, which hold attention sinks. The gates are not trained to
            score them, and decoding always reads them. Not for retention gates.

    Raises:
        ValueError: for a value out of range, or an option that the scorer does not have.
    """

    block_size: int = 64
    gate_dim: int = None  # type: ignore[assignment]  # depends on the scorer
    k_pooling: tuple[str, ...] = POOLINGS
    q_pooling: str = "proj"
    qk_norm: bool = True
    rope: bool = True
    scorer: str = "attn_gate"
    sink_blocks: int = 0

    def __post_init__(self) -> None:
        kind = scorer_kind(self.scorer)
        if self.gate_dim is None:
            object.__setattr__(self, "gate_dim", 128 if kind.gate_dim is None else kind.gate_dim)
        if kind.retention:
            object.__setattr__(self, "rope", False)
        check_count("block_size", self.block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
        check_counts(self, sink_blocks=0)
        check_count("gate_dim", self.gate_dim, 1, MAX_GATE_DIM)
        check("gate_dim", self.gate_dim, not self.rope or self.gate_dim % 2 == 0, "even when rope is on")
        object.__setattr__(self, "k_pooling", check_poolings("k_pooling", self.k_pooling))
        check_flags(self, "qk_norm", "rope")
        check_one_of("q_pooling", self.q_pooling, Q_POOLINGS)
        for name, default, applicable in (
            ("k_pooling", POOLINGS, kind.poolings),
            ("q_pooling", "proj", kind.poolings),
            ("qk_norm", True, not kind.retention),
            ("sink_blocks", 0, not kind.retention),
        ):
            if not applicable and getattr(self, name) != default:
                raise ValueError(f"{name} is {getattr(self, name)!r}; with scorer {self.scorer!r} it must be left out")

    @property
    def retention(self) -> bool:
        """True if the gates score tokens for eviction instead of blocks for selection."""
        return SCORERS[self.scorer].retention

    def to_dict(self) -> dict[str, Any]:
        """The fields that the scorer uses, as JSON types; ``scorer`` and ``sink_blocks`` only if not the default."""
        values = {**asdict(self), "k_pooling": list(self.k_pooling)}
        unused = [] if SCORERS[self.scorer].poolings else ["k_pooling", "q_pooling"]
        unused += ["scorer"] if self.scorer == "attn_gate" else []
        unused += ["qk_norm", "rope"] if self.retention else []
        unused += [] if self.sink_blocks else ["sink_blocks"]
        return {name: value for name, value in values.items() if name not in unused}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GateConfig:
        """Inverse of `to_dict`; unknown keys are ignored (the adapter loader warns about them)."""
        names = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in names})


RULES: dict[str, tuple[str, ...]] = {
    "token_budget": (),
    "budget_share": ("budget_min", "budget_max"),
    "threshold": (),
    "top_p": (),
}
"""Rule that decides how many blocks are read -> further options, valid only with this rule."""

RULE_OPTIONS = (*RULES, *chain(*RULES.values()))
"""All options that decide how many blocks are read."""


@dataclass(frozen=True)
class DecodeConfig:
    """How to decode with a selecting method (SeerAttention-R, section 3.1).

    Exactly one of four rules decides how many blocks each KV head reads: ``token_budget``, ``budget_share``,
    ``threshold`` or ``top_p``. If none is given, ``token_budget`` is 4096.

    Attributes:
        token_budget: tokens per KV head and step, including the current block; rounded down to blocks, at least two.
            4,096 if no rule is given.
        budget_share: share of a row's blocks to read, in (0, 1], including the current block; rounded up to whole
            blocks. The budget grows with the length of each row. The share is the decimal fraction as written.
        budget_min, budget_max: minimum (if the row has as many) and maximum number of tokens that ``budget_share``
            reads; rounded down to whole blocks. Default minimum: the current block, the sink blocks and one more.
        threshold: read the past blocks whose softmax score exceeds this, in (0, 1).
        top_p: read the fewest past blocks whose softmax scores sum to this, in (0, 1).
        sink_blocks: number of first blocks that are always read. They count towards the budget, which must have room
            for them, the current block and one more, and are left out of the softmax. ``None`` uses the number that
            the gates were trained with, and 0 with other methods.
        dense_layers: indices of layers that stay dense (the paper's hybrid models, section 5.2).
        anchors: indices of layers whose selection is reused: other sparse layers read, per KV head, the blocks chosen
            by the nearest anchor below them, and store and score nothing. Layers below the first anchor select for
            themselves, as do all layers without anchors.
        dense_below: a row of at most this many tokens, including the current one, reads all of them: for short
            contexts, dense attention is faster than selection.
        compat: ``"published"`` reproduces the published checkpoints' code where it differs from the paper: a block
            that closes while decoding is rotated at its last position, the current block takes part in the softmax
            with logit 0, and the first and last block are read in addition to the budget. ``None`` follows the paper.
            ``"gates"`` is ``"published"`` for gates with that default (imported ones), and ``None`` for others.

    Raises:
        ValueError: for a value out of range, or options that exclude each other.
    """

    token_budget: int | None = None
    budget_share: float | None = None
    budget_min: int | None = None
    budget_max: int | None = None
    threshold: float | None = None
    top_p: float | None = None
    sink_blocks: int | None = None
    dense_layers: tuple[int, ...] = ()
    anchors: tuple[int, ...] = ()
    dense_below: int = 0
    compat: Literal["published", "gates"] | None = "gates"

    def __post_init__(self) -> None:
        check_rule(self)


def check_rule(options: Any, block_size: int | None = None) -> None:
    """Check the options of a `DecodeConfig`, or of a method that has the same ones, and fill in the defaults.

    Args:
        options: object with the options as attributes.
        block_size: tokens per block, if known: a budget must hold the current block, the sinks and a past block.
    """
    given = [name for name in RULES if getattr(options, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both given; exactly one of {', '.join(RULES)} must be")
    if not given:
        object.__setattr__(options, "token_budget", 4096)
    for rule, others in RULES.items():
        for name in others:
            if getattr(options, name) is not None and getattr(options, rule) is None:
                raise ValueError(f"{name} is {getattr(options, name)!r} without {rule}, which it goes with")
    check_counts(options, optional=True, token_budget=1, budget_min=1, budget_max=1, sink_blocks=0)
    share, least, most = options.budget_share, options.budget_min, options.budget_max
    right = share is None or (is_number(share) and 0 < share <= 1)
    check("budget_share", share, right, "a number greater than 0 and at most 1")
    if least is not None and most is not None:
        check("budget_max", most, most >= least, f"at least budget_min ({least})")
    check_counts(options, dense_below=0)
    for name in ("threshold", "top_p"):
        value = getattr(options, name)
        right = value is None or (is_number(value) and 0 < value < 1)
        check(name, value, right, "strictly between 0 and 1")
    if block_size is not None and options.sink_blocks is None:
        object.__setattr__(options, "sink_blocks", 0)
    sinks = 0 if options.sink_blocks is None else options.sink_blocks
    for name in ("dense_layers", "anchors"):
        layers = getattr(options, name)
        right = isinstance(layers, (tuple, list)) and all(is_int(layer) and layer >= 0 for layer in layers)
        check(name, layers, right, "a tuple of layer indices, 0 or greater")
        object.__setattr__(options, name, tuple(layers))
    if both := sorted(set(options.anchors) & set(options.dense_layers)):
        raise ValueError(f"anchors names {both}, which are in dense_layers, too; a dense layer chooses nothing")
    compat = getattr(options, "compat", None)  # only gates have it
    check_one_of("compat", compat, (None, "published", "gates"))
    unpublished = (share, options.top_p) != (None, None) or sinks or options.dense_below
    if compat == "published" and unpublished:
        raise ValueError(
            'compat is "published", whose code has neither budget_share nor top_p nor sink_blocks nor dense_below; '
            "leave them out, or pass compat=None"
        )
    fewest = 1 if compat == "published" else 2 + sinks  # the published code reads past blocks anyway
    for name in ("token_budget", "budget_min", "budget_max"):
        value, pages = getattr(options, name), getattr(options, "min_pages", 1)
        if block_size and value is not None and max(value, pages * block_size) < fewest * block_size:
            raise ValueError(
                f"{name} is {value}; with block_size {block_size} and {sinks} sink blocks it must be at least "
                f"{fewest * block_size}, as one block is the current one and others are to be read beside it"
            )


def nearest_anchor(layer: int, anchors: Iterable[int]) -> int:
    """The nearest anchor at or below a layer, or the layer itself if all anchors are above it."""
    return max((anchor for anchor in anchors if anchor <= layer), default=layer)


@dataclass(frozen=True)
class Rectify:
    """Recompute the keys and values of decoded tokens by a dense pass after every few sparse steps (ReSA).

    Attributes:
        every: number of sparse steps of a row between two dense passes; 32 in ReSA's code.
    """

    every: int = 32

    def __post_init__(self) -> None:
        check_counts(self, every=1)
