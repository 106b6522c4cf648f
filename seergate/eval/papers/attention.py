"""``seergate figure recurrence``: when attention returns to tokens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.eval import Limit, RunOptions, Task
from seergate.eval.calibration.calibrator import evenly_chosen_prompts
from seergate.eval.calibration.recurrence import Recurrence, measure_recurrence
from seergate.eval.report.plots import pyplot, save
from seergate.eval.report.tables import markdown
from seergate.eval.store import write_json, write_text
from seergate.eval.tasks.prompts import end_ids
from seergate.models.names import load_model, model_path
from seergate.pretrained import load_tokenizer

BUDGETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Cache sizes of the milestone statistics, as fractions of the longest context."""
KINDS = {"lasting": "#009E73", "milestone": "#56B4E9", "phoenix": "#D55E00", "idle": "#DDDDDD"}
"""RaaS's kinds of tokens (`Recurrence.kinds`) -> colour."""


def recurrence(options: argparse.Namespace, task: Task, out: Path) -> Path:
    """Draw when attention returns to tokens (LazyEviction, Figure 3c) and the shares of RaaS's kinds of tokens."""
    model, tokenizer, limit, run = _loaded(options, task)
    prompts = evenly_chosen_prompts(tokenizer, task, options.problems or 4)
    longest = max(map(len, prompts))
    new = limit.of(longest)
    usage = measure_recurrence(model, prompts, alpha=options.alpha, max_new_tokens=new, **run)
    budgets = [options.budget] if options.budget else [max(1, int((longest + new) * share)) for share in BUDGETS]
    recurrence_plot(task.name, usage, out / "figure-recurrence.png")
    kinds_plot(usage, budgets, out / "figure-kinds.png")
    kinds = {budget: usage.kinds(budget) for budget in budgets}
    rows = [
        [part, str(budget), *(f"{100 * kinds[budget][part][kind]:.1f}" for kind in KINDS)]
        for part in ("prompt", "generated")
        for budget in budgets
    ]
    text = (
        f"# When attention comes back: {options.model}, {len(prompts)} problems of {task.name}\n\n"
        f"![Recurrence](figure-recurrence.png)\n\nA token is active at a step if it gets a probability of at least "
        f"{options.alpha:g}. Attention comes back to 80 % of tokens within {usage.window()} steps, and to "
        f"{100 * usage.recurring():.1f} % of tokens after more than one step. Every token of every layer and KV head "
        "counts once.\n\n![Kinds of tokens](figure-kinds.png)\n\nShares in per cent: *phoenix* tokens are used again "
        "after a least-recently-used cache of so many tokens would have lost them, *milestones* are used and then no "
        "more, *lasting* ones are in use at the end, *idle* ones never were.\n\n"
        + markdown(["part", "cache size", *KINDS], rows, left=1)
    )
    write_text(out / "figure-recurrence.md", text + "\n")
    record = {"alpha": options.alpha, "window": usage.window(), "recurring": usage.recurring()}
    shown = {"kinds": {str(budget): value for budget, value in kinds.items()}, "histogram": usage.histogram()}
    write_json(out / "figure-recurrence.json", {**record, **shown})
    return out / "figure-recurrence.md"


def recurrence_plot(name: str, usage: Recurrence, path: Path) -> None:
    """Draw the share of a task's tokens whose maximum recurrence interval is at most x, and the window at 80 %."""
    figure, axes = pyplot().subplots(figsize=(5.5, 3.6), layout="constrained")
    intervals, counts = (np.array(part) for part in zip(*sorted(usage.histogram().items()), strict=True))
    window = usage.window()
    (line,) = axes.step(intervals, 100 * counts.cumsum() / counts.sum(), where="post", label=f"{name}: {window}")
    axes.axvline(window, color=line.get_color(), linestyle=":", linewidth=1)
    axes.axhline(80, color="#7F7F7F", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(0, 104)
    axes.set_xlabel("maximum recurrence interval (decode steps)")
    axes.set_ylabel("share of tokens (%)")
    axes.legend(title="window at 80 %", fontsize=8)
    save(figure, path)


def kinds_plot(usage: Recurrence, budgets: Sequence[int], path: Path) -> None:
    """Draw the shares of lasting, milestone, phoenix and idle tokens by cache size, for prompt and generated tokens.

    The RaaS paper reads these statistics off attention maps (its section 3.1 and Figure 3). A phoenix token is used
    again after a cache of that size, which evicts the least recently used token, has lost it.
    """
    figure, panels = pyplot().subplots(1, 2, sharey=True, figsize=(8.0, 3.4), layout="constrained")
    kinds = {budget: usage.kinds(budget) for budget in budgets}
    for axes, part in zip(panels, ("prompt", "generated"), strict=True):
        bottom = np.zeros(len(budgets))
        for kind, colour in KINDS.items():
            shares = np.array([100 * kinds[budget][part][kind] for budget in budgets])
            axes.bar([str(budget) for budget in budgets], shares, bottom=bottom, color=colour, label=kind)
            bottom += shares
        axes.set_title(f"tokens of the {'prompt' if part == 'prompt' else 'answer'}", fontsize=10)
        axes.set_xlabel("cache size (tokens)")
    figure.axes[0].set_ylabel("share (%)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    save(figure, path)


def _loaded(
    options: argparse.Namespace, task: Task
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Limit, dict[str, Any]]:
    """The model, its tokenizer, the limit of an answer's length, and the sampling and end-of-answer ids."""
    path = model_path(options.model)
    model, tokenizer = load_model(path), load_tokenizer(path)
    run = RunOptions(max_new_tokens=options.max_new_tokens)
    how = {"sampling": run.resolved_sampling(task, model), "ends": end_ids(model, tokenizer)}
    return model, tokenizer, run.limit(task), how
