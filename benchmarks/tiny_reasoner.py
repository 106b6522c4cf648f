"""Accuracy of the tiny reasoner's generated answers with its gates: the results in docs/methods.md.

    python benchmarks/tiny_reasoner.py

1. `lengths`: dense attention on problems of every size, from the shortest to the largest that it was trained for.
2. `medium`: oracle, gates, Quest and StreamingLLM at budgets from too small to sufficient.

All settings of a part answer the same problems. ``gate_minus_this`` is the paired difference of accuracies with its
standard error; for dense attention, there is one for the gate at each budget. An interrupted run resumes. A part
without sizes or budgets is skipped.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from collect import rows_of
from common import arguments, described, parsed, save, shown

from seergate import GateBank
from seergate.eval import RunOptions, make_task, sweep
from seergate.eval.report.load import load_sweeps
from seergate.eval.settings import grid
from seergate.models.names import TINY, TINY_GATES, TINY_MODEL, load_model
from seergate.pretrained import load_tokenizer

METHODS = ["dense", "oracle", "gate", "quest", "streaming_llm"]


def measure(
    part: str, variables: int, problems: int, methods: list[str], budgets: list[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Evaluate methods and budgets on problems of one size."""
    bank, model, tokenizer = GateBank.from_pretrained(TINY_GATES), load_model(TINY_MODEL), load_tokenizer(TINY_MODEL)
    task = make_task("chain_sum", problems=problems, variables=variables)
    specs = grid(methods, budgets, bank.config.block_size)
    out = options.runs / f"{part}-{variables}"
    how = RunOptions(batch_size=options.batch_size, model_name=TINY)
    sweep(model, tokenizer, task, specs, out, how, gates=bank)
    (loaded,) = load_sweeps(out)
    rows = [{"part": part, "variables": variables, **row} for row in rows_of(loaded)]
    for row in rows:
        print(shown(row), flush=True)
    return rows


def main() -> None:
    """Parse the command line, measure, print, save."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[5, 10, 20, 40, 60, 75], help="variables, dense only"
    )
    parser.add_argument("--length-problems", type=int, default=64)
    parser.add_argument("--medium", type=int, default=20, help="variables")
    parser.add_argument("--medium-problems", type=int, default=128)
    parser.add_argument("--medium-budgets", type=int, nargs="*", default=[16, 32, 64, 128])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--runs", type=Path, default=Path("runs/tiny-reasoner-results"), help="folder of the answers")
    options = parsed(parser)
    rows = []
    for variables in options.lengths:
        rows += measure("lengths", variables, options.length_problems, ["dense"], [], options)
    if options.medium_budgets:
        rows += measure("medium", options.medium, options.medium_problems, METHODS, options.medium_budgets, options)
    print("saved", save("tiny_reasoner", described(options, "runs"), rows, options.output))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
