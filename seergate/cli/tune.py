"""``seergate tune``: trains gates for a model in a given time and recommends a budget.

Runs `plan`, `prepare`, `train`, `eval` and `report` in turn. Gates with one query per group and with a query per head
are trained on the same forward passes, and those with the lower KL on held-out packs are kept (docs/recipe_study.md,
"On wider heads"). The results of finished stages are in the output directory, and the same command resumes from there.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seergate.checks import check_counts
from seergate.cli.arguments import eval_args
from seergate.cli.train import prepare_process
from seergate.distill.config import load_train_config
from seergate.durable import check_writable, lock
from seergate.errors import SeergateError
from seergate.eval import store
from seergate.models.names import model_path
from seergate.paths import model_name
from seergate.progress import duration

if TYPE_CHECKING:
    from seergate.distill.callbacks import Callback, StepLog
    from seergate.distill.config import TrainConfig
    from seergate.eval.sweep_plan import SweepPlan

HELP = (
    "train gates in a given time and recommend a budget",
    "Train gates for a model by the recommended recipe in two thirds of the time given, evaluate them in the rest on\n"
    "needles and held-out texts, and name the smallest budget with no measurable loss, in three sentences.\n"
    "The same command continues after an interruption.",
    ["seergate tune ORG/NAME --hours 2", "seergate tune model.gguf --hours 8 --data my_texts.jsonl --out runs/mine"],
)
CONTEXT = 4096
"""Default number of tokens of a text, in training and evaluation; fewer if the model has fewer positions."""

STEPS_TIMED = 3
"""Training steps that are timed; the first of them is a warm-up and not counted."""

TRAINING_SHARE = 2 / 3
"""Share of the time that is spent on training."""

EPOCHS = 2
"""Maximum number of epochs, as in the search for the recipe."""

LEAST_STEPS = 20
"""Minimum training steps, a tenth of the recommended recipe's; hours that allow fewer are refused."""

LEAST, MOST = 8, 200
"""Minimum and maximum number of needle problems."""

QUERIES = {"a query per group": "proj", "a query per head": "none"}
"""Gates that are trained -> their ``q_pooling``."""

MARGIN = 0.05
"""Least relative difference of the held-out KL for which a query per head is kept, since it costs more to decode."""

STATE, TEXTS, HELD_OUT, DONE = "tune.json", "train.jsonl", "held_out.jsonl", "recommendation.txt"
GATES, TIMING, TRAINING = "gates", "timing", "training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("model", metavar="MODEL", help="directory, GGUF file, preset or Hub id (org/name)")
    parser.add_argument("--hours", type=float, required=True, metavar="H", help="approximate total time in hours")
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="a .jsonl file of rows as for `seergate train`, or a file or directory of texts; a part is held out "
        "[Python's library and /usr/share/doc]",
    )
    eval_args(parser, "budget", help="tokens read per KV head and step [1/8, 1/4, 1/2 of a text]")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help=f"tokens of a text [{CONTEXT}, or the model's positions]"
    )
    eval_args(parser, "dtype", help="dtype of the model [auto]")
    eval_args(parser, "threads")
    parser.add_argument("--out", metavar="DIR", help="output directory [runs/tune-MODEL]")


def run(options: argparse.Namespace) -> None:
    """Run the stages that are missing, and print the recommendation."""
    from seergate.eval.report.plots import check_libraries

    began = time.monotonic()
    prepare_process()
    check_libraries()  # before any work
    job = _checked(options)
    check_writable(job.out)
    with (job.out / ".lock").open("ab") as file:
        lock(file, job.out, "wait for its end, or give another --out")
        _run(options, job, began)


def _run(options: argparse.Namespace, job: _Job, began: float) -> None:
    """Run the stages in the locked output directory."""
    from seergate.eval.report.write import check_report

    state = store.read_json(job.out / STATE) or {}
    written = (TEXTS, HELD_OUT, DONE, GATES, TIMING, TRAINING)
    foreign = [name for name in written if not state and (job.out / name).exists()]
    if foreign:
        raise SeergateError(f"{job.out} has {foreign[0]}, which is not of a tune run; give another --out")
    if "decision" in state and "trained" not in state and (job.out / GATES).exists():
        raise SeergateError(f"{job.out} was begun by an earlier version of seergate; give another --out")
    requested = {name: getattr(options, name) for name in ("model", "data", "dtype", "hours")}
    requested |= {"max_length": job.config.max_length, "budget": job.budgets}
    for name, before in state.get("asked", {}).items():
        if requested[name] != before and "decision" in state:
            raise SeergateError(
                f"{name} is {requested[name]}, but {job.out} was begun with {before}; give that again or another --out"
            )
    if (job.out / DONE).exists():
        print((job.out / DONE).read_text(encoding="utf-8"), end="")
        return
    check_report(job.out)

    def note(**more: Any) -> None:
        state.update(more)
        store.write_json(job.out / STATE, state)

    if "decision" not in state:
        note(asked={name: requested[name] for name in ("model", "data", "dtype", "max_length")})
        held_out = job.write_texts()
        packs, (step, pair) = job.prepare(), job.measure()
        each = job.config.in_processes(1).packs_per_step
        choice = decide(options.hours, time.monotonic() - began, step, pair, packs, held_out, each)
        note(asked=requested, decision=asdict(choice))
    decision = Decision(**state["decision"])
    print(job.describe(decision))
    if "trained" not in state:
        job.train(decision.steps)
        note(trained=True)
    job.recommend(decision)


def _checked(options: argparse.Namespace) -> _Job:
    import torch

    from seergate.distill.base_model import within_positions
    from seergate.distill.estimate import architecture, make_plan
    from seergate.models.families import usable_positions, why_no_longer

    if not 0 < options.hours < float("inf"):
        raise SeergateError(f"hours is {options.hours}; it must be a positive number")
    check_counts(options, optional=True, threads=1)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.data is not None and not Path(options.data).exists():
        raise SeergateError(f"data is {options.data!r}; there is no such file or directory")
    config = load_train_config(options.model, {"recipe": "recommended", "dtype": options.dtype})
    context, shape = options.max_length, architecture(config)
    if context is None:
        context = min(CONTEXT, within_positions(config, shape).max_length)
    elif context > (usable_positions(shape.get_text_config()) or context):
        raise SeergateError(f"max_length is {context}; {why_no_longer(shape.get_text_config())}")
    out = Path(options.out or f"runs/tune-{model_name(options.model).lower().removesuffix('.gguf')}")
    least = (2 + config.sink_blocks) * config.block_size
    budgets = sorted(set(options.budget or (max(least, context // part) for part in (8, 4, 2))))
    config = replace(
        config,
        max_length=context,
        data=str(out / TEXTS),
        data_config=None,
        data_limit=None,
        token_cache=str(out / "tokens"),
        output_dir=str(out / TRAINING),
        recall_budgets=tuple(budgets),
        eval_packs=2,
    )
    job = _Job(options, config, budgets)
    for budget in budgets:
        if not least <= budget < job.length:
            raise SeergateError(
                f"budget is {budget}; it must be at least {least}, which is {2 + config.sink_blocks} blocks, and "
                f"below {job.length}, the length of the texts that are scored"
            )
    plans = [make_plan(replace(config, q_pooling=pooling)) for pooling in QUERIES.values()]
    trained = ("gates", "gradients", "moments")  # the rest is shared
    sums = {name: sum(getattr(plan.memory, name) for plan in plans) for name in trained}
    plan = replace(plans[-1], memory=replace(plans[-1].memory, **sums))
    if not plan.fits:
        print(plan.text())
        raise SeergateError("the model does not fit into this machine's memory, see above")
    return job


@dataclass(frozen=True)
class Decision:
    """Training steps, needle problems and scored texts that fit into the time, and the expected seconds of training
    and of evaluation.
    """

    steps: int
    problems: int
    texts: int
    training: float
    evaluation: float


def pair_seconds(budgets: int, dense: float, gate: float, dense_text: float, gate_text: float) -> float:
    """Return the seconds of a needle problem and a scored text under all settings, given those of each with dense
    attention, which scores a text twice, and with gates.
    """
    return dense + 2 * dense_text + budgets * (gate + gate_text)


def decide(
    hours: float, spent: float, step: float, pair: float, packs: int, held_out: int, packs_per_step: int = 1
) -> Decision:
    """Divide ``hours``, of which ``spent`` seconds are over, between training on ``packs`` packs, in steps of ``step``
    seconds on ``packs_per_step`` packs, and evaluation, with ``pair`` seconds for a problem and one of at most
    ``held_out`` texts. Too few hours are refused.
    """
    left, most_steps = 3600 * hours - spent, max(1, EPOCHS * packs // packs_per_step)
    steps = max(0, min(int(TRAINING_SHARE * left / step), most_steps))
    problems = min(int((left - steps * step) / pair), MOST)
    if steps < min(LEAST_STEPS, most_steps) or problems < LEAST:
        needed = max(LEAST_STEPS * step / TRAINING_SHARE, LEAST * pair / (1 - TRAINING_SHARE)) + spent
        raise SeergateError(
            f"hours is {hours:g}; it must be at least {1.05 * needed / 3600:.2g}, as {LEAST_STEPS} steps of training "
            f"take {duration(LEAST_STEPS * step)} here, and {LEAST} problems and texts {duration(LEAST * pair)}"
        )
    return Decision(steps, problems, min(problems, held_out), steps * step, problems * pair)


@dataclass(frozen=True)
class _Job:
    """The stages of one tune run; ``config`` is the training configuration without the number of steps."""

    options: argparse.Namespace
    config: TrainConfig
    budgets: list[int]

    @property
    def out(self) -> Path:
        """The output directory."""
        return self.config.run_dir.parent

    @property
    def length(self) -> int:
        """Tokens of a scored text, which nearly all texts made for the context have."""
        return self.config.max_length * 3 // 4

    def write_texts(self) -> int:
        """Write the training texts and the held-out texts; return the number of held-out texts."""
        from seergate.distill.held_out import divide
        from seergate.pretrained import load_tokenizer

        def lines(rows: Iterable[dict[str, Any]]) -> str:
            return "".join(json.dumps(row) + "\n" for row in rows)

        tokenizer, data = load_tokenizer(model_path(self.options.model)), self.options.data
        rows, held_out, malformed = divide(data, self.config, tokenizer, self.length)
        if malformed:
            print(f"note: {len(malformed)} rows of {data} are left out ({malformed[0]})")
        print(f"texts: {len(rows)} to train on, {len(held_out)} held out")
        store.write_text(self.out / TEXTS, lines(rows))
        store.write_text(self.out / HELD_OUT, lines({"text": text} for text in held_out))
        return len(held_out)

    def prepare(self) -> int:
        """Prepare training, and return the number of packs."""
        from seergate.distill.trainer import prepare_run

        report = prepare_run(self.config)
        print(report.summary())
        return report.packs

    def measure(self) -> tuple[float, float]:
        """Return the seconds of a training step, and `pair_seconds`."""
        from seergate.distill.callbacks import Callback
        from seergate.eval.run_plan import checked_task, run_plan

        class Clock(Callback):
            def on_step(self, log: StepLog) -> None:
                steps.append(log.seconds)

        place, largest = self.out / TIMING, self.budgets[-1]
        gates = place / tuple(QUERIES.values())[-1]  # the slower ones
        plans = self._evaluations(gates, place, 2, 2, [largest])
        for plan in plans:
            checked_task(plan)
        print(f"measuring: {STEPS_TIMED} steps of training, 2 problems and 2 texts")
        shutil.rmtree(place, ignore_errors=True)
        once: dict[str, Any] = {"output_dir": str(place), "save_steps": 0, "eval_steps": 0, "report_to": ("none",)}
        steps, seconds = list[float](), list[float]()
        if gates not in _train(replace(self.config, **once), STEPS_TIMED, Clock()):
            raise SeergateError(f"gates that diverge in {STEPS_TIMED} steps, see above, give no time to measure")
        for plan in plans:
            runs = run_plan(plan)
            for label in ("dense", f"gate-{largest}"):
                seconds.append(min(sample["seconds"] for sample in store.read_samples(runs / label)))
        shutil.rmtree(place)
        return sum(steps[1:]) / (STEPS_TIMED - 1), pair_seconds(len(self.budgets), *seconds)

    def train(self, steps: int) -> None:
        """Train, or resume from the last checkpoint, and keep the better gates."""
        from seergate.models.gate_bank import GateBank

        save_steps = max(1, min(self.config.save_steps, steps // 10))
        runs = _train(replace(self.config, save_steps=save_steps), steps)
        banks = {run.name: GateBank.from_pretrained(run) for run in runs}  # one if the other kind diverged
        kinds = list(QUERIES.values())
        held_out = (banks[kind].training_record["kl_held_out"] if kind in banks else None for kind in kinds)
        group, head = (math.inf if kl is None else kl for kl in held_out)  # None: not finite, or too few packs
        per_head = head < (1 - MARGIN) * group
        if math.isfinite(group + head):
            print(f"KL on held-out packs: {group:.3f} with a query per group, {head:.3f} with a query per head")
        banks.get(kinds[per_head], next(iter(banks.values()))).save_pretrained(self.out / GATES)

    def recommend(self, decision: Decision) -> None:
        """Run the missing evaluations, write the report, and print the recommendation."""
        from seergate.eval.report import load_sweeps, write_report
        from seergate.eval.report.recommendation import recommendation
        from seergate.eval.run_plan import run_plan

        gates = self.out / GATES
        plans = self._evaluations(gates, self.out, decision.problems, decision.texts, self.budgets)
        runs = [run_plan(plan) for plan in plans]
        report = write_report(runs[0], self.out, *runs[1:])
        (answers,), (texts,) = map(load_sweeps, runs)
        lines = [*recommendation(answers, texts), "", f"gates: {gates}", f"report: {report.html}"]
        store.write_text(self.out / DONE, "\n".join(lines) + "\n")
        print("", *lines, sep="\n")

    def describe(self, decision: Decision) -> str:
        """The decision as a sentence for the user."""
        budgets = ", ".join(f"{budget:,}" for budget in self.budgets)
        return (
            f"decided: {decision.steps} steps of training ({duration(decision.training)}); "
            f"then {decision.problems} needle problems of {self.config.max_length:,} tokens and {decision.texts} "
            f"texts of {self.length:,}, with dense attention and with gates at {budgets} tokens "
            f"({duration(decision.evaluation)})"
        )

    def _evaluations(
        self, gates: Path, out: Path, problems: int, texts: int, budgets: Sequence[int]
    ) -> tuple[SweepPlan, SweepPlan]:
        """The plans of the needle problems and of the scored texts."""
        import torch

        from seergate.eval.sweep_plan import SweepPlan

        same = SweepPlan(
            model=self.options.model,
            gates=str(gates),
            method=["dense", "gate"],
            budget=list(budgets),
            dtype=self.options.dtype,
            threads=self.options.threads,
            batch_size=None if torch.cuda.is_available() else 1,  # no faster in a batch, and an interruption loses it
        )
        needles = {"problems": problems, "length": (self.config.max_length,)}
        scored = {"problems": texts, "length": self.length, "scored": min(256, self.length // 4)}
        return (
            replace(same, task="needle", task_options=needles, out=str(out / "needle")),
            replace(
                same,
                task="perplexity",
                task_options={**scored, "data": str(self.out / HELD_OUT)},
                out=str(out / "perplexity"),
            ),
        )


def _train(config: TrainConfig, steps: int, *callbacks: Callback) -> list[Path]:
    """Train gates with each kind of query for ``steps`` steps, at most a tenth of them warm-up. Returns directories.

    ``callbacks`` are called for the last gates, which end each step.
    """
    from seergate.distill.trainer import run_together

    config = replace(config, max_steps=steps, warmup_steps=min(config.warmup_steps, steps // 10))
    configs = {
        name: replace(config, q_pooling=pooling, output_dir=str(config.run_dir / pooling))
        for name, pooling in QUERIES.items()
    }
    last = tuple(QUERIES)[-1]
    directories = run_together({name: (each, callbacks if name == last else ()) for name, each in configs.items()})
    gc.collect()  # frees the frozen model before another is loaded
    return directories
