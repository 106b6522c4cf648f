"""``seergate prepare``: the part of a training run that needs no GPU, ahead of it."""

from __future__ import annotations

from collections.abc import Sequence

HELP = (
    "download and tokenise what a training run needs, without a GPU",
    "Look up commits, download model and data, tokenise and pack, so that the run begins at once, offline too.\n"
    "Takes all options of seergate train; give the run the same ones.",
    ["seergate prepare --model Qwen3-8B"],
)


def run_argv(argv: Sequence[str]) -> int:
    """Prepare the run; returns the exit code."""
    from seergate.cli.train import print_plan, resolve, train_parser

    options = vars(train_parser("seergate prepare", HELP[1], HELP[2], listed=False).parse_args(argv))
    dry_run, config = options["dry_run"], resolve(options)
    if dry_run:
        print_plan(config)
        return 0
    from seergate.distill.trainer import prepare_run

    print(prepare_run(config).summary())
    return 0
