"""``seergate figure``: regenerates a figure or table of one of five papers."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seergate.cli.arguments import eval_args, given
from seergate.durable import check_writable
from seergate.errors import SeergateError, did_you_mean
from seergate.escaping import markdown_text
from seergate.eval.papers.figures import FIGURES
from seergate.eval.store import write_text
from seergate.models.names import TINY_GATES, is_tiny
from seergate.paths import model_name, shipped

if TYPE_CHECKING:
    from seergate.eval.sweep_plan import SweepPlan

HELP = (
    "regenerate a figure or table of one of five papers",
    "Run what a figure of the paper compares and draw it: by default on the tiny reasoner, in minutes on a CPU; with\n"
    "--model on a real model and the paper's task, block sizes and budgets. Gates that are missing for the tiny\n"
    "reasoner are distilled first; for other models give them with --gates DIR, or --gates NAME=DIR,NAME=DIR where\n"
    "several are compared. What is there already is kept, so an interrupted figure continues.\n\n"
    "4, 5, 7, 8, 9, table1: of SeerAttention-R. raas..., rpc..., lazy..., reasoncache...: of RaaS, RPC,\n"
    "LazyEviction and ReasonCache; docs/reproduce.md lists them, and what is not reproduced and why.",
    [
        "seergate figure 5",
        "seergate figure 7 --out runs/fig7",
        "seergate figure 4 --model Qwen3-14B --task math500",
        "seergate figure rpc-table1 --model deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    ],
)


EVAL_OPTIONS = ("samples", "temperature", "max_new_tokens", "batch_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", metavar="NAME", help=", ".join(FIGURES))
    eval_args(parser, "model")
    eval_args(parser, "gates", help="of gates; or NAME=DIR, several with commas")
    parser.add_argument("--task", help="[chain_sum for the tiny reasoner, else the figure's, or aime24]")
    parser.add_argument("--task-source", metavar="FILE", help="a local copy of the task's problems")
    parser.add_argument("--problems", type=int, metavar="N", help="[32 of chain_sum, of others as in the paper]")
    parser.add_argument("--variables", type=int, metavar="N", help="size of a chain_sum problem [30]")
    eval_args(parser, *EVAL_OPTIONS)
    parser.add_argument("--max-steps", type=int, metavar="N", help="training steps of the gates [the preset's]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="[runs/figure-NAME-MODEL]")


def run(options: argparse.Namespace) -> None:
    """Run the missing settings, draw the figure and print its findings."""
    from seergate.eval.report.plots import check_libraries
    from seergate.eval.report.write import check_report
    from seergate.eval.run_plan import check_prompts, run_plan

    if options.name not in FIGURES:
        raise SeergateError(
            f"there is no figure {options.name!r}; {did_you_mean(options.name, FIGURES)} (docs/reproduce.md says "
            "what is not reproduced, and why)"
        )
    check_libraries()  # before any work
    tiny = is_tiny(options.model)
    run = FIGURES[options.name].tiny if tiny else FIGURES[options.name].real
    _check_options(options, run, tiny)
    label = _label(options.name)
    out = options.out or Path("runs") / f"{label}-{model_name(options.model)}"
    plan = plan_of(options, run, tiny, out)
    if plan.make_task().scored is not None:
        raise SeergateError(
            f"the figure {options.name} compares answers, and {plan.task!r} scores texts; use `seergate eval`"
        )
    check_prompts(plan)
    check_writable(out)
    check_report(out)
    pages = {f"{_label(name)}.md" for name in FIGURES if name != options.name}
    if other := sorted(page.name for page in out.glob("*.md") if page.name in pages):
        raise SeergateError(f"{out} has the runs of {', '.join(other)}, which would be drawn too; give another --out")
    began = time.monotonic()
    if "gate" in plan.method:
        plan = replace(plan, gates=_gates(options, plan.block_size, tiny, out))
    run_plan(plan)
    page = _write(options.name, out, label)
    print(f"\n{page} ({time.monotonic() - began:.0f} seconds)")


def _label(name: str) -> str:
    return name if "table" in name else f"figure-{name}"


def plan_of(options: argparse.Namespace, run: dict[str, Any], tiny: bool, out: Path) -> SweepPlan:
    """The sweep of a figure with the settings ``run``, in the directory ``eval`` of ``out``."""
    from seergate.eval.sweep_plan import SweepPlan

    task = options.task or ("chain_sum" if tiny else run.get("task", "aime24"))
    name = task.partition(":")[0]  # options in the task's text have precedence over these defaults
    defaults = {"problems": 32, "variables": 30} if name == "chain_sum" else {}
    if name == run.get("task"):
        defaults = run.get("task_options", {})
    source = {} if options.task_source is None else {"source": options.task_source}
    values: dict[str, Any] = {
        **run,
        **given(options, *EVAL_OPTIONS),
        "model": options.model,
        "task": task,
        "task_options": defaults | given(options, "problems", "variables") | source,
        "out": str(out / "eval"),
    }
    return SweepPlan.of(values, "the figure")


def _check_options(options: argparse.Namespace, run: dict[str, Any], tiny: bool) -> None:
    """Refuse options that the figure would ignore."""
    gated = "gate" in run["method"]
    trains = gated and tiny and "block_size" in run and options.gates is None
    ignored = ([] if gated else ["gates"]) + ([] if trains else ["max_steps"])
    why = "it trains no gates" if gated else "none of its methods has gates"
    for name in given(options, *ignored):
        raise SeergateError(
            f"the figure {options.name} does not take --{name.replace('_', '-')}, as {why}; leave it out"
        )


def _gates(options: argparse.Namespace, sizes: list[int], tiny: bool, out: Path) -> str | dict[Any, str] | None:
    """The gates given by the user; else, for the tiny reasoner, shipped or newly distilled gates per block size."""
    if options.gates is not None or not tiny or not sizes:
        return options.gates
    from seergate.models.gate_bank import GateBank

    own = str(shipped(TINY_GATES))
    shipped_size = GateBank.from_pretrained(own).config.block_size
    return {size: own if size == shipped_size else str(_distilled(options, size, out)) for size in sizes}


def _distilled(options: argparse.Namespace, block_size: int, out: Path) -> Path:
    """Gates of this block size, distilled unless they exist."""
    from seergate.distill import load_train_config, run_distillation
    from seergate.gates import CONFIG_FILE
    from seergate.models.gate_bank import GateBank

    directory = out / f"gates-b{block_size}"
    overrides = {"output_dir": str(directory), "block_size": block_size, **given(options, "max_steps")}
    config = load_train_config(options.model, overrides)
    if (directory / CONFIG_FILE).is_file():
        steps = GateBank.from_pretrained(directory).training_record["config"]["max_steps"]
        if steps != config.max_steps:
            raise SeergateError(
                f"the gates in {directory} are of {steps} training steps, and {config.max_steps} are wanted; give "
                f"--max-steps {steps}, or another --out"
            )
        return directory
    print(f"distilling gates for blocks of {config.block_size} tokens ({config.max_steps} steps)", flush=True)
    return run_distillation(config)


def _write(name: str, out: Path, label: str) -> Path:
    from seergate.eval.papers.styles import STYLES, beside
    from seergate.eval.report import load_sweeps, write_report
    from seergate.eval.report.load import apart

    figure = FIGURES[name]
    draw, table, read = STYLES[figure.style]
    sweep, *others = sweeps = load_sweeps(out / "eval")
    if others:
        one, other, *_ = apart(sweeps)
        raise SeergateError(
            f"the runs in {out / 'eval'} cannot be compared ("
            + "; ".join(f"{name} is {one[name]!r} and {other[name]!r}" for name in one)
            + f"): grade them alike with `seergate regrade {out / 'eval'} --grader NAME`, or use another --out"
        )
    parts = [f"# {figure.source} on our runs: {figure.title}"]
    if draw is not None:
        parts.append(f"![{figure.title}]({draw(sweep, out / f'{label}.png').name})")
    lines = read(sweep)
    parts += ["\n".join(f"- {markdown_text(line)}" for line in lines), table(sweep)]
    if compared := beside(sweep, figure.published, figure.real):
        parts += ["## Beside the paper's numbers", compared, *([figure.caution] if figure.caution else [])]
    parts.append("Everything else about these runs, and what to bear in mind: `report.md`.")
    write_text(out / f"{label}.md", "\n\n".join(parts) + "\n")
    write_report(out / "eval", out)
    for line in lines:
        print(f"- {markdown_text(line)}")
    return out / f"{label}.md"
