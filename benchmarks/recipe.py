r"""The search for a training recipe: variants train on the same forward passes, then decode texts and needles.

    python train/recipes/long_text/make.py --out train.jsonl DIRECTORY
    python benchmarks/recipe.py --model DIRECTORY --data train.jsonl --held-out held_out.jsonl --packs 80 --epochs 2
    python benchmarks/recipe.py ... --only recommended norms

Every pack passes once through the frozen model. The training inputs are kept for some rows: their queries, the pooled
keys of blocks of 16 tokens, and the log of the largest probability that a group's heads assign to a token of a block;
so a training step of a variant is cheap. Each variant changes the recipe of configs/recipes/recommended.yaml as named
in `VARIANTS`, and takes one step per pack and epoch. Then every variant, the oracle, Quest and a window decode given
texts, always reading the first block. Metrics: ``kl`` to dense attention per token (mean and median over texts, 99th
percentile over tokens); and for needles of four cities, how many answers are ``found`` (each of their tokens is the
most likely one), and their log-probability. docs/recipe.md has the results of such a search.
"""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from common import arguments, described, parsed, save
from torch import Tensor, nn

from seergate import ops
from seergate.distill.base_model import fresh_gates
from seergate.distill.config import TrainConfig, load_train_config, locate_model
from seergate.distill.engines import make_optimizer
from seergate.distill.trainer import scheduled_rate
from seergate.eval.forced import TeacherForcing, pieces
from seergate.eval.settings import MethodSpec
from seergate.eval.statistics.intervals import clustered_quantile
from seergate.eval.tasks.prompts import encode, reply_ids
from seergate.eval.tasks.retrieval import needle, perplexity, texts_of
from seergate.methods import LongPromptWarning
from seergate.methods.base import LayerSpec, LayerState, Step
from seergate.methods.selecting import SelectingMethod, SelectingState
from seergate.models import families
from seergate.models.attach import attached
from seergate.models.gate_bank import GateBank
from seergate.models.loading import load_base
from seergate.models.packed_forward import TeacherCall, intercepted_attention
from seergate.models.score import score
from seergate.pretrained import load_tokenizer

FINEST = 16
"""Tokens per block of the kept inputs; a block of a variant is one or more of these."""
NEVER = -1e9
SCORED = 47


@dataclass(kw_only=True)
class Window(SelectingMethod):
    """A method that reads the newest blocks."""

    name: ClassVar[str] = "newest_blocks"

    def new_state(self, spec: LayerSpec) -> LayerState:
        return WindowState(spec, self)


class WindowState(SelectingState):
    """The state of `Window`, which stores nothing."""

    def scores(self, step: Step) -> Tensor:
        blocks = torch.arange(-(-step.max_length // self.block_size), device=step.lengths.device)
        return blocks.float().expand(len(step.lengths), self.spec.num_kv_heads, -1)


class NewestBlocks(MethodSpec):
    """A setting of `Window`."""

    def method(self, bank: GateBank | None) -> Window:
        return Window(token_budget=self.token_budget, block_size=self.block_size, **self.options)


NORMS: dict[str, Any] = {"qk_norm": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "recommended": {},
    "untrained": {},
    "blocks of 32": {"block_size": 32},
    "random start": {"init": "random"},
    "first block learned": {"sink_blocks": 0},
    "a query per head": {"q_pooling": "none"},
    "norms": NORMS,
    "norms, learning rate 1e-2": NORMS | {"learning_rate": 1e-2},
    "norms, learning rate 1e-3": NORMS | {"learning_rate": 1e-3},
    "norms, blocks of 32": NORMS | {"block_size": 32},
    "the paper's start and target, blocks of 32": NORMS | {"block_size": 32, "sink_blocks": 0, "init": "random"},
}
"""Variant -> the options in which it differs from the recommended recipe."""
BASELINES = {
    f"{name}, blocks of {size}": (kind, method, size)
    for size in (16, 32)
    for name, kind, method in (
        ("oracle", MethodSpec, "oracle"),
        ("Quest", MethodSpec, "quest"),
        ("window", NewestBlocks, "oracle"),
    )
}


@dataclass
class Pack:
    """Training inputs of a pack: its rows ``[R]`` and, for each layer, their queries ``[1, H, R, D]``, the pooled keys
    ``[1, K, N, 3 D]`` and the log targets ``[K, R, N]``, with ``N`` blocks of `FINEST` tokens.
    """

    rows: Tensor
    queries: dict[int, Tensor] = field(default_factory=dict)
    pooled: dict[int, Tensor] = field(default_factory=dict)
    logp: dict[int, Tensor] = field(default_factory=dict)


def capture(model: Any, ids: Tensor, rows: Tensor) -> Pack:
    """Run the frozen model on a pack, and keep the training inputs."""
    cu_seqlens, pack = torch.tensor([0, len(ids)], dtype=torch.int32), Pack(rows)
    gated = dict(families.full_attention_modules(model))

    def attend(call: TeacherCall) -> Tensor:
        out, lse_TH = call.attention(cu_seqlens)
        if call.layer in gated:
            assert call.q_pre_BHSD is not None and call.k_pre_BKSD is not None
            pack.queries[call.layer] = call.q_pre_BHSD[:, :, rows]
            pack.pooled[call.layer] = ops.pool_keys(call.k_pre_BKSD, FINEST)
            pack.logp[call.layer] = log_maxima(call, lse_TH, rows).to(call.query_BHSD.dtype)
        return out[None]

    with intercepted_attention(model, gated, attend), torch.no_grad():
        positions = torch.arange(len(ids))[None]
        families.decoder_of(model)(input_ids=ids[None], position_ids=positions, use_cache=False)
    return pack


def log_maxima(call: TeacherCall, lse_TH: Tensor, rows: Tensor) -> Tensor:
    """``[K, R, N]``: log of the largest probability that a head of the group assigns to a token of the block."""
    k_KSD = call.key_BKSD[0].float()
    q_KGRD = call.query_BHSD[0][:, rows].float().unflatten(0, (len(k_KSD), -1))
    scores = torch.einsum("kgrd,ksd->kgrs", q_KGRD, k_KSD) * call.sm_scale
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    scores -= lse_TH[rows].float().T.unflatten(0, (len(k_KSD), -1))[..., None]
    return scores.unflatten(-1, (-1, FINEST)).amax((1, 4))


def coarser(pooled_BKNP: Tensor, times: int) -> Tensor:
    """Pooled keys of blocks that are ``times`` as long, from those of short blocks."""
    parts = pooled_BKNP.float().unflatten(2, (-1, times)).chunk(3, -1)
    return torch.cat([parts[0].amax(3), parts[1].amin(3), parts[2].mean(3)], -1)


class Member:
    """A variant in training."""

    def __init__(self, name: str, model: Any, config: TrainConfig) -> None:
        self.name, self.config = name, replace(config, **VARIANTS[name]).for_heads(families.head_dim_of(model))
        torch.manual_seed(config.seed)
        self.bank = fresh_gates(self.config, model)
        self.parameters = list(self.bank.parameters())
        self.optimizer = make_optimizer(self.parameters, self.config)

    def learn(self, pack: Pack, step: int) -> float:
        """Take a training step, and return the KL, mean over rows, KV heads and layers."""
        size, sinks = self.bank.config.block_size, self.bank.config.sink_blocks
        total = torch.zeros(())
        for layer, gate in self.bank:
            pooled = coarser(pack.pooled[layer], size // FINEST)
            keys = gate.keys(pooled, torch.arange(pooled.shape[2]) * size)
            queries = gate.queries(pack.queries[layer].float(), pack.rows)
            logits = gate.scores(queries, keys)[0]
            blocks = torch.arange(logits.shape[-1])
            past = (blocks < (pack.rows // size)[:, None]) & (blocks >= sinks)
            logp = pack.logp[layer].float().unflatten(-1, (-1, size // FINEST)).amax(-1)
            logp, logits = (x.masked_fill(~past, NEVER).log_softmax(-1) for x in (logp, logits))
            total = total + (logp.exp() * (logp - logits)).sum(-1).mean()
        (total / len(self.bank)).backward()
        nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.param_groups[0]["lr"] = scheduled_rate(self.config, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total.detach()) / len(self.bank)


def decode(model: Any, texts: TeacherForcing, problems: list[tuple[Tensor, int]], spec: Any, bank: Any) -> dict:
    """The metrics of a setting; ``problems`` are tokens ``[1, S]`` and the index at which the answer begins."""
    kl = [texts.measure(spec, bank, number)["kl"] for number in range(len(texts.ids))]
    exact, logprobs = [], []
    for ids, start in problems:
        with warnings.catch_warnings(), attached(model, spec.method(bank)):
            warnings.simplefilter("ignore", LongPromptWarning)
            scored = score(model, ids, start=start, logits=True)
        assert scored.logits is not None
        exact.append(bool((scored.logits[0].argmax(-1) == ids[0, start:]).all()))
        logprobs.append(float(scored.log_probs.sum()))
    means = [statistics.mean(each) for each in kl]
    return {
        "kl": statistics.mean(means),
        "kl_median": statistics.median(means),
        "kl_p99": clustered_quantile(kl, 0.99)[0],
        "kl_texts": means,
        "found": sum(exact),
        "needle_logprob": statistics.mean(logprobs),
    }


def needles(tokenizer: Any, count: int, length: int) -> list[tuple[Tensor, int]]:
    """Needle problems with four cities, as tokens ``[1, S]`` with the answer, and the index at which it begins."""
    encoded = []
    for problem in needle(problems=count, length=(length,), keys=4).bound(tokenizer).problems():
        prompt = str(problem.prompt)
        ids = encode(tokenizer, prompt)
        encoded.append((torch.tensor([[*ids, *reply_ids(tokenizer, prompt, problem.reply)]]), len(ids)))
    return encoded


def main() -> None:
    """Parse the command line, capture, train, decode, print, save."""
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="directory, Hub id or preset")
    parser.add_argument("--data", type=Path, required=True, help=".jsonl of train/recipes/long_text/make.py")
    parser.add_argument("--held-out", type=Path, required=True, help=".jsonl of other texts")
    parser.add_argument("--packs", type=int, default=80, help="packs that are learned from [%(default)s]")
    parser.add_argument("--epochs", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a pack [%(default)s]")
    parser.add_argument("--row-stride", type=int, default=24, help="one row in so many is kept [%(default)s]")
    parser.add_argument("--text-length", type=int, default=2500, help="tokens of a held-out text [%(default)s]")
    parser.add_argument("--texts", type=int, default=11, help="held-out texts [%(default)s]")
    parser.add_argument("--needles", type=int, default=24, help="problems [%(default)s]")
    parser.add_argument("--needle-length", type=int, default=3500, help="their tokens [%(default)s]")
    parser.add_argument("--budget", type=int, default=512, help="tokens per KV head [%(default)s]")
    parser.add_argument("--only", nargs="*", choices=[*VARIANTS, *BASELINES], help="[all]")
    options = parsed(parser)
    for name in ("packs", "epochs", "row_stride", "texts", "needles"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if options.length % 32 or options.length < 512:
        parser.error(f"--length is {options.length}; it must be a multiple of 32, at least 512")
    steps = options.packs * options.epochs
    overrides = {"recipe": "recommended", "max_steps": steps, "warmup_steps": min(10, steps - 1), "row_stride": 1}
    config = load_train_config(options.model, overrides)
    path = locate_model(config).model
    tokenizer, model = load_tokenizer(path), load_base(path, dtype=torch.bfloat16).requires_grad_(False)
    names = options.only or [*VARIANTS, *BASELINES]
    packs = pieces(tokenizer, list(texts_of(str(options.data))), options.length)[: options.packs]
    if len(packs) < options.packs:
        parser.error(f"--packs is {options.packs}; {options.data} has {len(packs)} texts of {options.length} tokens")
    members = [Member(name, model, config) for name in names if name in VARIANTS]
    learners, began = [m for m in members if m.name != "untrained"], time.monotonic()
    captured = []
    for number, ids in enumerate(packs if learners else []):
        first = int(options.length * config.row_start) + number % options.row_stride
        captured.append(capture(model, ids, torch.arange(first, options.length, options.row_stride)))
    for step in range(steps if learners else 0):
        kl = {m.name: m.learn(captured[step % len(captured)], step) for m in learners}
        if not step % 10:
            print(f"step {step + 1}, {time.monotonic() - began:.0f} s", *(f"{x:.3f}" for x in kl.values()), flush=True)
    del captured
    task = perplexity(
        problems=options.texts, length=options.text_length, scored=SCORED, data=str(options.held_out)
    ).bound(tokenizer)
    texts = TeacherForcing.of(model, tokenizer, task)
    problems = needles(tokenizer, options.needles, options.needle_length)
    sinks, rows = {"sink_blocks": 1}, []
    settings = dict[str, tuple[MethodSpec, GateBank | None]]()
    for name in (name for name in BASELINES if name in names):
        kind, method, size = BASELINES[name]
        settings[name] = kind(method, options.budget, size, (), sinks), None
    for m in members:
        settings[m.name] = MethodSpec("gate", options.budget, m.bank.config.block_size, (), sinks), m.bank
    settings["dense"] = MethodSpec("dense"), None
    for name, (spec, bank) in settings.items():
        trained = {} if bank is None else {"gate": bank.config.to_dict()}
        rows.append({"variant": name, **decode(model, texts, problems, spec, bank), **trained})
        figures = (f"{key} {rows[-1][key]:.4f}" for key in ("kl", "kl_median", "kl_p99", "needle_logprob"))
        print(name, *figures, f"found {rows[-1]['found']} of {options.needles}", sep="  ", flush=True)
    overrides = described(options, "only") | {"data": options.data.name, "held_out": options.held_out.name}
    print("saved", save("recipe", overrides, rows, options.output))


if __name__ == "__main__":
    main()
