"""Collects the metrics of evaluation runs in one file of results, for tables in documents.

python benchmarks/collect.py runs/methods --name methods
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import RESULTS, save

from seergate.eval.report.load import Sweep, load_sweeps
from seergate.eval.statistics.intervals import mean_and_error
from seergate.eval.store import read_json
from seergate.gates import CONFIG_FILE

KEPT = (
    *("accuracy", "accuracy_se", "n_problems", "mean_prompt_tokens", "mean_tokens", "truncation_rate", "density"),
    *("bytes_read_per_step", "own_bytes_mean", "own_bytes_peak", "tokens_per_second", "recall", "next_token_kl"),
    *("kl", "kl_se", "kl_low", "kl_high", "kl_p99", "kl_p99_low", "kl_p99_high", "agreement", "perplexity"),
    "reply_logprob",
)


def rows_of(sweep: Sweep) -> list[dict[str, Any]]:
    """One row per setting. ``gate_minus_this`` is the paired difference in accuracy to the gate at the same budget, or
    ``gate_BUDGET_minus_this`` at each of the gate's budgets if there is none the same; of several gates, the first by
    name. For scored texts, ``kl_texts`` has the mean KL of each text instead.
    """
    ours = min((setting.series for setting in sweep.settings if setting.method == "gate"), default=None)
    gates = {setting.budget: setting for setting in sweep.settings if setting.series == ours}
    rows: list[dict[str, Any]] = []
    for setting in sweep.settings:
        row = {"method": setting.series, "budget": setting.budget, "nominal": setting.nominal}
        row |= {key: setting.metrics[key] for key in KEPT if setting.metrics.get(key) is not None}
        if "kl" in row:
            row["kl_texts"] = [mean_and_error(text["kl"]).mean for text in setting.samples]
            rows.append(row)
            continue
        if path := (setting.config.get("gates") or {}).get("path"):
            training = (read_json(Path(path) / CONFIG_FILE) or {}).get("training", {})
            row |= {key: training[key] for key in ("tokens_seen", "kl_held_out_best") if key in training}
        for budget, gate in gates.items():
            if setting.series != ours and (setting.budget == budget or setting.budget not in gates):
                difference = sweep.difference(gate, setting)
                if not difference.n:
                    continue
                name = "gate_minus_this" if setting.budget == budget else f"gate_{budget}_minus_this"
                row |= {name: difference.mean, f"{name}_se": difference.se}
        rows.append(row)
    return rows


def main() -> None:
    """Read the runs, and save the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--name", required=True, help="of the file")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    (sweep,) = load_sweeps(options.runs)
    task = sweep.config["task"]
    described = {
        "task": {**task, "file": Path(task["file"]).name} if "file" in task else task,
        "generation": sweep.config["generation"],
        "environment": sweep.config["environment"],
    }
    print("saved", save(options.name, described, rows_of(sweep), options.output))


if __name__ == "__main__":
    main()
