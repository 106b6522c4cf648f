"""Plots of the tokens that evicting methods keep over one answer, and of when attention returns to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seergate.report.plots import pyplot, save

if TYPE_CHECKING:
    from papers.kept import KeptTokens
    from seergate.eval.recurrence import Recurrence


def kept_plot(kept: dict[str, KeptTokens], path: Path, *, layer: int, head: int) -> Path:
    """One panel per method: a row per decode step, a column per token, dark where the token was resident.

    Args:
        kept: method's name -> record of its tokens.
        path: the image.
        layer, head: the layer and KV head that are drawn.
    """
    size = (3.2 * len(kept), 3.4)
    figure, panels = pyplot().subplots(1, len(kept), squeeze=False, figsize=size, layout="constrained")
    for axes, (name, tokens) in zip(panels[0], kept.items(), strict=True):
        resident = tokens.resident(layer, head)
        axes.imshow(resident, aspect="auto", cmap="Greys", interpolation="none", vmin=0, vmax=1)
        axes.axvline(tokens.prompt - 0.5, color="#D55E00", linewidth=1)
        axes.tick_params(labelsize=8)
        share = resident.sum(1).mean() / (np.arange(tokens.prompt, tokens.tokens) + 1).mean() if len(resident) else 1.0
        axes.set_title(f"{name} ({100 * share:.0f} % resident)", fontsize=9)
        axes.set_xlabel("token; the prompt ends at the line", fontsize=8)
    figure.axes[0].set_ylabel("decode step")
    figure.suptitle(f"What stays, layer {layer}, KV head {head}", fontsize=10)
    return save(figure, path)


def recurrence_plot(name: str, found: Recurrence, path: Path) -> Path:
    """Share of tokens whose maximum recurrence interval is at most x (Figure 3c of LazyEviction), and the window.

    Args:
        name: the line's label, such as the task's name.
        found: the measured intervals.
        path: the image.
    """
    figure, axes = pyplot().subplots(figsize=(5.5, 3.6), layout="constrained")
    intervals, counts = (np.array(part) for part in zip(*sorted(found.histogram().items()), strict=True))
    window = found.window()
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
    return save(figure, path)


KINDS = {"lasting": "#009E73", "milestone": "#56B4E9", "phoenix": "#D55E00", "idle": "#DDDDDD"}
"""RaaS's kinds of tokens (`Recurrence.kinds`) -> colour."""


def kinds_plot(found: Recurrence, budgets: Sequence[int], path: Path) -> Path:
    """Shares of lasting, milestone, phoenix and idle tokens by cache size, of the prompt and of what was generated.

    The RaaS paper reads these statistics off attention maps (its section 3.1 and Figure 3). A phoenix token is needed
    again after a cache that evicts the least recently used token has lost it.

    Args:
        found: the measured intervals.
        budgets: sizes of the cache, in tokens.
        path: the image.
    """
    figure, panels = pyplot().subplots(1, 2, sharey=True, figsize=(8.0, 3.4), layout="constrained")
    kinds = {budget: found.kinds(budget) for budget in budgets}
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
    return save(figure, path)
