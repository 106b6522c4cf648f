r"""Why gates miss blocks that the oracle reads: variants of scorers, trained alike on the tiny reasoner and compared.

    python benchmarks/oracle_gap.py --threads 1
    python benchmarks/oracle_gap.py --threads 1 --only msa "a query per head"
    python benchmarks/oracle_gap.py --threads 1 --steps 160 --name oracle_gap_steps \
        --only attn_gate msa "a query per head"

All variants learn from one forward of the frozen model and from the same targets, by the recipe of
configs/tiny-reasoner.yaml but for ``--steps`` and one row in ``--stride``. Most of them exist here only. Measured on
packs that nobody learned from: KL, recall of the teacher's mass, and ``missed``, the share of rows whose teacher puts
more than half of its past mass on one block and whose gate leaves that block out. ``numbers`` is what a scorer keeps
per token and layer; keys and values are 512. The first rows are bounds: the teacher itself, and the best choice that
all KV heads can share. What is measured already is kept; ``commit`` and ``device`` are those that measured it.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from common import arguments, commit, provenance, save
from torch import Tensor, nn
from torch.nn import functional as F

from seergate import ops
from seergate.config import GateConfig
from seergate.distill.base_model import load_frozen
from seergate.distill.config import load_train_config, locate_model
from seergate.distill.data import prepare_data
from seergate.distill.distributed import DistributedState
from seergate.distill.engines import make_optimizer
from seergate.distill.packing import PackedBatch, PackOrder
from seergate.distill.trainer import scheduled_rate
from seergate.gates.gate import AttnGate
from seergate.gates.indexer import Indexer
from seergate.gates.msa import MSA
from seergate.gates.scorer import HeadwiseLinear, Scorer
from seergate.hf.loading import load_tokenizer
from seergate.hf.teacher_pass import TeacherCall, intercepted_attention
from seergate.models import families
from seergate.ops.gate_math import branch_end

BUDGETS = (32, 64)
NEVER = -1e9


def in_blocks(x_BKSD: Tensor, size: int) -> Tensor:
    """``[B, K, N, size, D]``; tokens that fill the last block are zero, and no row reads a block that is not full."""
    return F.pad(x_BKSD, (0, 0, 0, -x_BKSD.shape[2] % size)).unflatten(2, (-1, size))


def best_of(scores_BISM: Tensor, count: int) -> Tensor:
    """The highest of every ``count`` scores."""
    padded = F.pad(scores_BISM, (0, -scores_BISM.shape[-1] % count), value=NEVER)
    return padded.unflatten(-1, (-1, count)).amax(-1)


class Pooled(AttnGate):
    """The gate; its blocks may be shorter than those that are chosen."""

    def pool(self, k_BKSD: Tensor) -> Tensor:
        blocks = in_blocks(k_BKSD, self.entry_tokens)
        kinds = {"max": blocks.amax(3), "min": blocks.amin(3), "avg": blocks.mean(3)}
        return torch.cat([kinds[kind] for kind in self.config.k_pooling], -1)


class SeveralKeys(Pooled):
    """A block has several keys, each of a part of its tokens; its score is the highest."""

    parts = 2

    def __init__(self, config: GateConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.entry_tokens = config.block_size // self.parts

    def scores(self, qg_BKSE: Tensor, kg_BKNE: Tensor) -> Tensor:
        return best_of(super().scores(qg_BKSE, kg_BKNE), self.parts)


class EightKeys(SeveralKeys):
    """One per token."""

    parts = 8


class LearnedBasis(Pooled):
    """Keys are turned by a learned matrix before they are pooled."""

    def __init__(self, config: GateConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.basis = HeadwiseLinear(self.num_kv_heads, self.head_dim, self.head_dim)
        nn.init.zeros_(self.basis.weight).detach().diagonal(dim1=-2, dim2=-1).fill_(1.0)

    def pool(self, k_BKSD: Tensor) -> Tensor:
        return super().pool(k_BKSD @ self.basis.weight)


class MapThenPool(AttnGate):
    """The linear map first, then the maximum over the block's tokens."""

    def __init__(self, config: GateConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.k_proj = HeadwiseLinear(self.num_kv_heads, self.head_dim, config.gate_dim)

    def pool(self, k_BKSD: Tensor) -> Tensor:
        return in_blocks(k_BKSD @ self.k_proj.weight, self.entry_tokens).amax(3)

    def keys(self, pooled_BKNP: Tensor, positions: Tensor) -> Tensor:
        return branch_end(pooled_BKNP, self._weight_of("k_norm"), positions, self.inv_freq, 1.0)


class TwoLayers(Pooled):
    """A hidden layer of 256 between the pooled keys and the gate's."""

    def __init__(self, config: GateConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.k_proj = HeadwiseLinear(self.num_kv_heads, len(config.k_pooling) * self.head_dim, 256)
        self.out = HeadwiseLinear(self.num_kv_heads, 256, config.gate_dim)

    def keys(self, pooled_BKNP: Tensor, positions: Tensor) -> Tensor:
        keys_BKNE = F.gelu(pooled_BKNP @ self.k_proj.weight) @ self.out.weight
        return branch_end(keys_BKNE, self._weight_of("k_norm"), positions, self.inv_freq, 1.0)


class SideBySide(AttnGate):
    """The linear map takes all keys of the block."""

    def __init__(self, config: GateConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.k_proj = HeadwiseLinear(self.num_kv_heads, config.block_size * self.head_dim, config.gate_dim)

    def pool(self, k_BKSD: Tensor) -> Tensor:
        return in_blocks(k_BKSD, self.entry_tokens).flatten(3)


class ModelsOwn(Pooled):
    """Begins as the model's own query times the mean of the block's poolings."""

    def __init__(self, config: GateConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.begin_as_model()


class SignedIndexer(Indexer):
    """Weights of either sign, as in DeepSeek's equation."""

    def queries(self, q_BHSD: Tensor, positions: Tensor) -> Tensor:
        queries_BISE = super().queries(q_BHSD, positions)[..., :-1]
        weights_BSI = q_BHSD.transpose(1, 2).flatten(2) @ self.head_weights.weight[0]
        return torch.cat((queries_BISE, weights_BSI.transpose(1, 2)[..., None]), -1)


class SharedIndexer(Indexer):
    """One choice for all KV heads, as DeepSeek's."""

    def token_scores(self, queries_BISE: Tensor, keys_B1TE: Tensor) -> Tensor:
        scores_BKST = super().token_scores(queries_BISE, keys_B1TE)
        return scores_BKST.mean(1, keepdim=True).expand_as(scores_BKST)


class SharedSignedIndexer(SharedIndexer, SignedIndexer):
    """Both."""


@dataclass(frozen=True)
class Variant:
    """A scorer, what its configuration and its recipe change; a bound has none."""

    scorer: type[Scorer] | None
    gate: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "the teacher": Variant(None),
    "the teacher, one choice for all KV heads": Variant(None),
    "attn_gate": Variant(Pooled),
    "key: max": Variant(Pooled, {"k_pooling": ("max",)}),
    "key: avg": Variant(Pooled, {"k_pooling": ("avg",)}),
    "key: all tokens side by side": Variant(SideBySide),
    "key: mapped, then pooled": Variant(MapThenPool),
    "key: pooled in a learned basis": Variant(LearnedBasis),
    "key: two layers": Variant(TwoLayers),
    "width 64": Variant(Pooled, {"gate_dim": 64}),
    "width 256": Variant(Pooled, {"gate_dim": 256}),
    "two keys of width 64": Variant(SeveralKeys, {"gate_dim": 64}),
    "two keys": Variant(SeveralKeys),
    "a key per token and KV head": Variant(EightKeys, {"k_pooling": ("avg",)}),
    "blocks of 16": Variant(Pooled, {"block_size": 16}),
    "no RoPE": Variant(Pooled, {"rope": False}),
    "target: sum": Variant(Pooled, {}, {"target": "sum"}),
    "target: selected, 32 tokens": Variant(Pooled, {}, {"target": "selected", "target_budget": 32}),
    "target: selected, 64 tokens": Variant(Pooled, {}, {"target": "selected", "target_budget": 64}),
    "learning rate 3e-2": Variant(Pooled, {}, {"learning_rate": 3e-2}),
    "begun as the model's own product": Variant(ModelsOwn),
    "a query per head": Variant(Pooled, {"q_pooling": "none"}),
    "a query per head, learned basis": Variant(LearnedBasis, {"q_pooling": "none"}),
    "a query per head, begun as the model's own": Variant(ModelsOwn, {"q_pooling": "none"}),
    "msa": Variant(MSA),
    "msa of width 32": Variant(MSA, {"gate_dim": 32}),
    "indexer": Variant(Indexer),
    "indexer: weights of either sign": Variant(SignedIndexer),
    "indexer: one choice for all KV heads": Variant(SharedIndexer),
    "indexer: both, as DeepSeek's": Variant(SharedSignedIndexer),
    "indexer: both, learning rate 1e-3": Variant(SharedSignedIndexer, {}, {"learning_rate": 1e-3, "min_lr": 1e-5}),
}


class Member:
    """A variant in training."""

    def __init__(self, name: str, model: Any, config: Any) -> None:
        variant = VARIANTS[name]
        self.name, self.config = name, replace(config, **variant.recipe)
        self.gate_config = replace(config.gates(128), **variant.gate)
        self.size = self.gate_config.block_size
        self.gates = nn.ModuleList()
        if variant.scorer is None:
            return
        geometry = families.gate_geometry(model, self.gate_config)
        torch.manual_seed(config.seed)
        for _ in geometry.layers:
            self.gates.append(
                variant.scorer(
                    self.gate_config,
                    num_heads=geometry.num_heads,
                    num_kv_heads=geometry.num_kv_heads,
                    head_dim=geometry.head_dim,
                    inv_freq=torch.tensor(geometry.inv_freq) if self.gate_config.rope else None,
                )
            )
        self.parameters = list(self.gates.parameters())
        self.optimizer = make_optimizer(self.parameters, self.config)

    def update(self, step: int) -> None:
        """Take a step."""
        used = [p for p in self.parameters if p.grad is not None]
        nn.utils.clip_grad_norm_(used, self.config.max_grad_norm)
        self.optimizer.param_groups[0]["lr"] = scheduled_rate(self.config, step)
        self.optimizer.step()
        self.optimizer.zero_grad()


def log_target(call: TeacherCall, lse_TH: Tensor, rows: Tensor, first: int, end: int, member: Member) -> Tensor:
    """``[K, R, N]``: log of what the gate of the segment ``first .. end`` learns, at some of its rows."""
    q, k = call.query_BHSD[0][:, first:end][:, rows], call.key_BKSD[0][:, first:end]
    blocks = int(rows[-1]) // member.size
    logp_KGRS = torch.einsum("kgrd,ksd->kgrs", q.unflatten(0, (len(k), -1)), k) * call.sm_scale
    logp_KGRS -= lse_TH[first:end][rows].T.unflatten(0, (len(k), -1))[..., None]
    logp_KGRN = logp_KGRS[..., : blocks * member.size].unflatten(-1, (blocks, member.size))
    reduce = torch.amax if member.config.target == "max" else torch.logsumexp
    return reduce(logp_KGRN, (1, 4)).masked_fill(~past(rows, blocks, member.size), NEVER).log_softmax(-1)


def past(rows: Tensor, blocks: int, size: int) -> Tensor:
    """``[R, N]``: the block lies before the row's own."""
    return torch.arange(blocks) < (rows // size)[:, None]


def run_pack(model: Any, batch: PackedBatch, members: Sequence[Member], every: int, shift: int, sums: Any) -> None:
    """A pack through the frozen model: gradients of all members or, with ``sums``, what `measured` needs."""
    spans = list(pairwise(batch.cu_seqlens.tolist()))
    start = members[0].config.row_start
    rows_of = {
        m: [torch.arange(max(int((b - a) * start), m.size) + shift, b - a, every) for a, b in spans] for m in members
    }

    def attend(call: TeacherCall) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (call.query_BHSD, call.key_BKSD, call.value_BKSD))
        out, lse_TH = ops.packed_attention(q, k, v, batch.cu_seqlens, call.sm_scale)
        for segment, (a, b) in enumerate(spans):
            known: dict[Any, Tensor] = {}
            for m in members:
                rows = rows_of[m][segment]
                if not len(rows):
                    continue
                key = m.size, m.config.target
                if key not in known:
                    known[key] = log_target(call, lse_TH, rows, a, b, m)
                logp = known[key]
                with torch.set_grad_enabled(sums is None):
                    logpi = predicted(m, call, rows, a, b, logp)
                    if sums is None and m.config.target == "selected":
                        picked = logpi.topk(min(m.config.target_budget // m.size - 1, logp.shape[-1]), -1).indices
                        logp, logpi = (x.gather(-1, picked).log_softmax(-1) for x in (logp, logpi))
                    kl = (logp.exp() * (logp - logpi)).sum() / len(logp)
                    share = kl / (len(m.gates) or 1) / sum(map(len, rows_of[m])) / m.config.packs_per_step
                if sums is None:
                    share.backward()
                else:
                    add_up(sums[m.name], logp.exp(), logpi, kl, m.size)
        return out[None]

    gated = dict(families.full_attention_modules(model))
    positions = torch.cat([torch.arange(b - a) for a, b in spans])[None]
    with intercepted_attention(model, gated, attend), torch.no_grad():
        families.decoder_of(model)(input_ids=batch.input_ids, position_ids=positions, use_cache=False)


def predicted(m: Member, call: TeacherCall, rows: Tensor, first: int, end: int, logp: Tensor) -> Tensor:
    """``[K, R, N]``: the log probabilities that a member gives to blocks."""
    if not m.gates:
        return (
            logp
            if m.name == "the teacher"
            else logp.exp().mean(0, keepdim=True).clamp_min(1e-30).log().expand_as(logp)
        )
    gate, blocks = m.gates[call.layer], logp.shape[-1]
    assert isinstance(gate, Scorer) and call.q_pre_BHSD is not None and call.k_pre_BKSD is not None
    queries = gate.queries(call.q_pre_BHSD[:, :, first:end][:, :, rows], rows)
    entries = torch.arange(0, end - first, gate.entry_tokens)
    keys = gate.keys(gate.pool(call.k_pre_BKSD[:, :, first:end]), entries)[
        :, :, : blocks * m.size // gate.entry_tokens
    ]
    return gate.scores(queries, keys)[0].masked_fill(~past(rows, blocks, m.size), NEVER).log_softmax(-1)


def add_up(sums: dict[str, float], p: Tensor, logpi: Tensor, kl: Tensor, size: int) -> None:
    """Add a layer's rows of a segment."""
    top = p.max(-1)
    decisive = top.values > 0.5
    sums["kl"] += float(kl)
    sums["rows"] += p.shape[1]
    sums["decisive"] += float(decisive.sum())
    for budget in BUDGETS:
        best = logpi.topk(min(budget // size - 1, p.shape[-1]), -1).indices
        sums[f"recall at {budget}"] += float(p.gather(-1, best).sum()) / len(p)
        sums[f"missed at {budget}"] += float(((best != top.indices[..., None]).all(-1) & decisive).sum())


def measured(m: Member, sums: dict[str, float]) -> dict[str, Any]:
    """A row of the table."""
    gate: Any = m.gates[0] if m.gates else None
    return {
        "variant": m.name,
        "numbers": gate and gate.key_heads * m.gate_config.gate_dim / gate.entry_tokens,
        "parameters": sum(p.numel() for p in m.gates.parameters()),
        "kl": sums["kl"] / sums["rows"],
        **{f"recall at {budget}": sums[f"recall at {budget}"] / sums["rows"] for budget in BUDGETS},
        **{f"missed at {budget}": sums[f"missed at {budget}"] / sums["decisive"] for budget in BUDGETS},
        "decisive": int(sums["decisive"]),
    }


def main() -> None:
    """Parse the command line, train, measure, print, save."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stride", type=int, default=3, help="one row in so many teaches [%(default)s]")
    parser.add_argument("--held-out", type=int, default=4, help="packs [%(default)s]")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, help="variants [all]")
    parser.add_argument("--name", default="oracle_gap", help="of the file of results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    asked = {"max_steps": options.steps, "eval_packs": options.held_out}
    config, here = load_train_config("tiny-reasoner", asked), commit()
    path = locate_model(config).model
    data = prepare_data(config, load_tokenizer(path))
    model = load_frozen(path, config, DistributedState(0, 1, 0, torch.device("cpu")))
    members = [Member(name, model, config) for name in options.only or VARIANTS]
    order, began = PackOrder(len(data.train), config.seed), time.monotonic()
    learners = [m for m in members if m.gates]
    for step in range(options.steps if learners else 0):
        for pack in order.batch(step, config.packs_per_step):
            run_pack(model, data.batch(data.train[pack]), learners, options.stride, step % options.stride, None)
        for m in learners:
            m.update(step)
        if not step % 10:
            print(f"step {step + 1}, {time.monotonic() - began:.0f} s", flush=True)
    sums: dict[str, Any] = {m.name: defaultdict(float) for m in members}
    for pack in data.held_out:
        run_pack(model, data.batch(pack), members, 1, 0, sums)
    described = {key: value for key, value in vars(options).items() if key not in ("output", "only", "name")}
    where = {"commit": here, "device": provenance(torch.device("cpu"))["device"]}
    rows = {m.name: {**measured(m, sums[m.name]), **where} for m in members}
    file = options.output / f"{options.name}.json"
    if file.exists() and (kept := json.loads(file.read_text()))["options"] == described:
        rows = {row["variant"]: row for row in kept["rows"]} | rows
    for row in rows.values():
        print(
            "  ".join(f"{key} {value:.4f}" if isinstance(value, float) else f"{value}" for key, value in row.items())
        )
    ordered = [rows[name] for name in VARIANTS if name in rows]
    print("saved to", save(options.name, torch.device("cpu"), described, ordered, options.output))


if __name__ == "__main__":
    main()
