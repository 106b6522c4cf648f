"""The ``seergate`` command: finds and runs the sub-command, and turns errors into a message and an exit code.

Exit codes: 0 for success, 2 for a user error (reported in one sentence), 130 for an interrupt, 128 + n for a process
stopped by signal n, which is 141 if nothing reads its output any more (``| head -1``). Any other exception is a bug in
seergate and shows its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from seergate.cli import (
    adapters,
    calibrate,
    demo,
    doctor,
    figure,
    generate,
    layers,
    methods,
    runs,
    traces,
    train,
    tune,
)
from seergate.cli import eval as evaluation
from seergate.cli.arguments import Command
from seergate.cli.console import OK, guarded
from seergate.cli.openmp import bound_spinning
from seergate.errors import SeergateError, did_you_mean
from seergate.escaping import Terminal
from seergate.options import Parser
from seergate.version import __version__

COMMANDS: dict[str, ModuleType | Command] = {
    "demo": demo,
    "plan": train.PLAN,
    "prepare": train.PREPARE,
    "train": train,
    "tune": tune,
    "ablate": train.ABLATE,
    "traces": traces,
    "eval": evaluation,
    "methods": methods,
    "generate": generate,
    "report": runs.REPORT,
    "sweep": evaluation.SWEEP,
    "regrade": runs.REGRADE,
    "calibrate": calibrate,
    "anchors": layers.ANCHORS,
    "dense-layers": layers.DENSE_LAYERS,
    "figure": figure,
    "doctor": doctor,
    "info": adapters.INFO,
    "push": adapters.PUSH,
    "export": adapters.EXPORT,
}


def build_parser() -> Parser:
    """Build the parser of ``seergate`` itself, which lists the commands; `_parser_of` builds that of one command."""
    parser = Parser(
        prog="seergate",
        description="Learned sparse attention for frozen reasoning models: distil gates, decode with them, compare.",
        epilog="seergate COMMAND --help explains a command. Start with: seergate demo. Your own model: seergate tune",
    )
    parser.add_argument("--version", action="version", version=f"seergate {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.HELP[0])
    return parser


def _add_plugin(parser: argparse.ArgumentParser, default: object) -> None:
    text = "module with methods of your own, which it registers when it is imported; may be given several times"
    parser.add_argument("--plugin", action="append", default=default, metavar="MODULE", help=text)


def _load_plugins(arguments: list[str]) -> list[str]:
    """Import the modules given by ``--plugin`` in this process and, through an environment variable, in its child
    processes; return the other arguments.
    """
    parser = Parser(prog="seergate", add_help=False, allow_abbrev=False)
    _add_plugin(parser, [])
    given, others = parser.parse_known_args(arguments)
    if given.plugin:
        from seergate.methods.registry import PLUGINS, load_plugins

        load_plugins(*given.plugin)
        os.environ[PLUGINS] = ",".join(filter(None, [os.environ.get(PLUGINS), *given.plugin]))
    return others


def _parser_of(command: ModuleType | Command, name: str) -> Parser:
    """Build the parser of a command or of a sub-command such as ``eval show``."""
    _, description, examples = command.HELP
    if getattr(command, "trains", False):
        parser = train.train_parser(f"seergate {name}", description, examples, listed=False)
    else:
        parser = Parser(
            prog=f"seergate {name}",
            description=description,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
    command.add_arguments(parser)
    if getattr(command, "TAKES_METHODS", False):
        _add_plugin(parser, argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command given by ``argv``, by default the process's arguments, and return the exit code."""
    bound_spinning()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # keeps a log file up to date; writes characters that the locale lacks as escapes, as standard error does
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    os.environ.setdefault("PYTHON_COLORS", "0")  # from 3.14 on, argparse writes escape sequences
    with contextlib.redirect_stdout(Terminal(sys.stdout)) if sys.stdout else contextlib.nullcontext():
        return guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(arguments: list[str]) -> int:
    if any(argument.split("=")[0] == "--plugin" for argument in arguments):
        arguments = _load_plugins(arguments)
    if not arguments:
        build_parser().print_help()
        return OK
    name, *others = arguments
    if name.startswith("-"):
        build_parser().parse_args(arguments)
    if name not in COMMANDS:
        raise SeergateError(f"there is no command {name!r}; {did_you_mean(name, COMMANDS)}")
    command = COMMANDS[name]
    if command is train:
        return train.main(others, "seergate train")
    below = getattr(command, "SUBCOMMANDS", {})
    if others and others[0] in below:
        name, command, others = f"{name} {others[0]}", below[others[0]], others[1:]
    options = _parser_of(command, name).parse_args(others)
    return int(command.run(options) or OK)


if __name__ == "__main__":
    sys.exit(main())
