"""``seergate figure kept`` and ``recurrence``: tokens that evicting methods keep, and when attention returns."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval import Limit, RunOptions, Task
from seergate.eval.calibration.calibrator import Calibrator, check_auto, evenly_chosen_prompts
from seergate.eval.calibration.recurrence import Recurrence, measure_recurrence
from seergate.eval.papers.kept import KeptTokens, drawn_layer, kept_tokens
from seergate.eval.report.plots import pyplot, save
from seergate.eval.report.tables import markdown
from seergate.eval.settings import grid
from seergate.eval.store import write_json, write_text
from seergate.eval.tasks.prompts import end_ids
from seergate.methods import EvictingMethod
from seergate.models.families import kv_heads
from seergate.models.names import load_model, model_path
from seergate.pretrained import load_tokenizer

TINY_KEPT = [
    "raas",
    "rpc:interval=64:window=16",
    "h2o:interval=8",
    "snapkv:window=16:interval=16",
    "lazy_eviction:window=auto:alpha=0.01",
    "random_evict:interval=16",
]
REAL_KEPT = ["raas", "rpc:interval=1024", "h2o:interval=64", "snapkv", "lazy_eviction:window=auto", "random_evict"]
TINY_BUDGET, REAL_BUDGET = 128, 1024
BUDGETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Cache sizes of the milestone statistics, as fractions of the longest context."""
KINDS = {"lasting": "#009E73", "milestone": "#56B4E9", "phoenix": "#D55E00", "idle": "#DDDDDD"}
"""RaaS's kinds of tokens (`Recurrence.kinds`) -> colour."""


def kept(options: argparse.Namespace, task: Task, out: Path, tiny: bool) -> Path:
    """Draw the tokens that each method keeps while it answers one problem (Figure 5 of RPC, Figure 3 of RaaS)."""
    budget = options.budget or (TINY_BUDGET if tiny else REAL_BUDGET)
    specs = grid(options.method or (TINY_KEPT if tiny else REAL_KEPT), [budget], None)
    check_auto(specs)
    for spec in specs:
        if not spec.uncalibrated and not isinstance(spec.method(None), EvictingMethod):
            raise SeergateError(f"{spec.name!r} evicts nothing, so there is nothing to see; give methods that evict")
    model, tokenizer, limit, run = _loaded(options, task)
    calibrated = Calibrator(model, tokenizer, task, out / "calibration", limit=limit, sampling=run["sampling"])
    prompt = evenly_chosen_prompts(tokenizer, task, 1)[0]
    layer, head, by_method, rows = drawn_layer(kv_heads(model)), 0, {}, []
    for spec in map(calibrated, specs):
        method = spec.method(None)
        assert isinstance(method, EvictingMethod)
        name = spec.label.partition("-")[0]
        name = spec.label if name in by_method else name
        by_method[name] = tokens = kept_tokens(model, method, prompt, max_new_tokens=limit.of(len(prompt)), **run)
        resident = tokens.resident(layer, head)
        mean = resident.sum(1).mean() if len(resident) else tokens.prompt
        survivors = resident[-1, : tokens.prompt].mean() if len(resident) and tokens.prompt else 1.0
        rows.append([spec.label, str(tokens.tokens), f"{mean:.0f}", f"{100 * survivors:.0f}"])
        print(f"{spec.label}: {tokens.tokens - tokens.prompt} tokens answered", flush=True)
    kept_plot(by_method, out / "figure-kept.png", layer, head)
    table = markdown(["method", "tokens seen", "resident, mean", "of the prompt at the end %"], rows)
    text = (
        f"# What stays: {options.model}, one problem of {task.name}, layer {layer}, KV head {head}\n\n"
        "![What stays](figure-kept.png)\n\nA row is a decode step, a column a token, dark where its key was there "
        "to be attended to. Each method answers for itself, so answers differ in length.\n\n" + table
    )
    write_text(out / "figure-kept.md", text + "\n")
    return out / "figure-kept.md"


def kept_plot(by_method: dict[str, KeptTokens], path: Path, layer: int, head: int) -> None:
    """Draw one panel per method: a row per decode step, a column per token, dark where the token was resident."""
    size = (3.2 * len(by_method), 3.4)
    figure, panels = pyplot().subplots(1, len(by_method), squeeze=False, figsize=size, layout="constrained")
    for axes, (name, tokens) in zip(panels[0], by_method.items(), strict=True):
        resident = tokens.resident(layer, head)
        axes.imshow(resident, aspect="auto", cmap="Greys", interpolation="none", vmin=0, vmax=1)
        axes.axvline(tokens.prompt - 0.5, color="#D55E00", linewidth=1)
        axes.tick_params(labelsize=8)
        share = resident.sum(1).mean() / (np.arange(tokens.prompt, tokens.tokens) + 1).mean() if len(resident) else 1.0
        axes.set_title(f"{name} ({100 * share:.0f} % resident)", fontsize=9)
        axes.set_xlabel("token; the prompt ends at the line", fontsize=8)
    figure.axes[0].set_ylabel("decode step")
    figure.suptitle(f"What stays, layer {layer}, KV head {head}", fontsize=10)
    save(figure, path)


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
