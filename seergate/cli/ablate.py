"""``seergate ablate``: variants of a training run, compared in one table."""

from __future__ import annotations

from collections.abc import Sequence

HELP = (
    "train variants of a run and compare them",
    "Train variants of a run and compare them on held-out packs. Takes all options of seergate train, and:",
    ["seergate ablate block-size --model tiny-reasoner", "seergate ablate my-study.yaml --model Qwen3-0.6B"],
)


def run_argv(argv: Sequence[str]) -> int:
    """Train what is not yet trained and print the tables; returns the exit code."""
    from seergate.cli.train import given_options, train_parser
    from seergate.distill.ablation import compare, prepared, studies

    parser = train_parser("seergate ablate", HELP[1], HELP[2], listed=False)
    known = ", ".join(studies())
    parser.add_argument(
        "studies", metavar="STUDY", nargs="+", help=f"some of {known}, all, or .yaml files of your own"
    )
    options = vars(parser.parse_args(argv))
    names, dry_run = options.pop("studies"), options.get("dry_run")
    values = given_options(options)
    if dry_run:
        for study, configs in prepared(names, values):
            print(f"{study.name}: " + ", ".join(str(config.run_dir) for config in configs.values()))
    else:
        print("\n" + compare(names, values), end="")
    return 0
