"""``seergate plan``: what a training run needs, before any weight is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

HELP = (
    "say what a training run needs: memory, time, disk",
    "Say what a training run needs: memory, time, disk. Takes all options of seergate train, and:",
    ["seergate plan --model Qwen3-8B --memory-gb 24", "seergate plan --model tiny-reasoner"],
)


def run_argv(argv: Sequence[str]) -> int:
    """Print the plan; returns the exit code."""
    from seergate.cli.train import resolve, train_parser

    parser = train_parser("seergate plan", HELP[1], HELP[2], listed=False)
    group = parser.add_argument_group("plan")
    group.add_argument("--processes", type=int, default=1, help="processes that share the work [1]")
    group.add_argument("--memory-gb", type=float, help="memory of the GPU that will do it [this machine's]")
    group.add_argument("--device", choices=("cpu", "cuda"), help="plan for this kind of device [what is here]")
    group.add_argument("--sample-tokens", type=int, help="typical length of a sample, for the time [all of a pack]")
    group.add_argument("--tflops", type=float, help="what one device sustains, in TFLOP/s; instead of measuring")
    group.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True, help="time one layer here")
    options = vars(parser.parse_args(argv))
    names = ("processes", "memory_gb", "device", "sample_tokens", "tflops", "measure")
    own = {name: options.pop(name) for name in names}
    config = resolve(options)
    from seergate.distill.plan import make_plan

    print(make_plan(config, **own).text())
    return 0
