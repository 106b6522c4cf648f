"""``seergate break-even``: the context length above which sparse attention is faster than dense attention."""

from __future__ import annotations

import argparse

from seergate.cli.arguments import model_args, run_args

HELP = (
    "find the best dense_below for this machine",
    "Time a dense and a sparse step of one layer on random keys and values: one row, the method's own scores, from\n"
    "just above the budget up to 256 MiB of them (1 GiB on a GPU) or the model's longest context. Prints the times,\n"
    "and the length up to which reading everything was faster: the longest that was timed if it always was.",
    [
        "seergate break-even --model tiny-reasoner --budget 256",
        "seergate break-even --model Qwen3-8B --gates org/Qwen3-8B-gates --budget 2048",
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    model_args(parser, "[gates/ of the model, else Quest is timed]")
    parser.add_argument("--budget", type=int, default=4096, metavar="N", help="token budget [%(default)s]")
    run_args(parser)


def run(options: argparse.Namespace) -> None:
    """Time dense and sparse steps of one layer, and print the break-even length."""
    from seergate.cli.models import bank_for, load_model, model_path
    from seergate.hf.break_even import break_even, layer_times
    from seergate.methods import Gate, Quest

    bank = bank_for(options.model, options.gates)
    if bank is not None and bank.config.retention and options.gates is None:
        bank = None  # the model's own gates are retention gates, which select no blocks
    model = load_model(model_path(options.model), options.dtype, options.device)
    method = Quest(token_budget=options.budget) if bank is None else Gate(bank=bank, token_budget=options.budget)
    times = layer_times(model, method)
    for length, dense, sparse in times:
        print(f"{length:>8} tokens   dense {1e3 * dense:8.3f} ms   sparse {1e3 * sparse:8.3f} ms")
    print(f"dense_below={break_even(times)}")
