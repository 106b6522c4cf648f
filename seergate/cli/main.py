"""The ``seergate`` command: finds the sub-command, runs it, turns what goes wrong into a sentence and an exit code.

0: done. 2: a mistake the user can mend, told in one sentence. 130: interrupted. Anything else is a bug of seergate and
shows its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from seergate.cli import (
    ablate,
    break_even,
    calibrate,
    demo,
    doctor,
    export,
    figure,
    import_legacy,
    info,
    plan,
    push,
    regrade,
    report,
    sweep,
    train,
)
from seergate.cli import eval as evaluation
from seergate.errors import SeergateError, how_to_install, sentence
from seergate.openmp import bound_spinning
from seergate.version import __version__

OK, USER_ERROR, INTERRUPTED = 0, 2, 130

COMMANDS: dict[str, ModuleType] = {
    "demo": demo,
    "plan": plan,
    "train": train,
    "ablate": ablate,
    "eval": evaluation,
    "report": report,
    "sweep": sweep,
    "figure": figure,
    "regrade": regrade,
    "calibrate": calibrate,
    "break-even": break_even,
    "doctor": doctor,
    "info": info,
    "push": push,
    "export": export,
    "import-legacy": import_legacy,
}


TAKING_METHODS = ("eval", "report", "sweep", "figure", "calibrate")
"""Commands to which methods are named, be they a plugin's."""
DRAWING = ("demo", "eval", "report", "sweep", "figure")
"""Commands that end with a report."""


class Parser(argparse.ArgumentParser):
    """Says in one sentence what was wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit with 2."""
        self.exit(USER_ERROR, f"error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(
        prog="seergate",
        description="Learned sparse attention for frozen reasoning models: distil gates, decode with them, compare.",
        epilog="seergate COMMAND --help explains a command. Start with: seergate demo",
    )
    parser.add_argument("--version", action="version", version=f"seergate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, module in COMMANDS.items():
        summary, description, examples = module.HELP
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=module.PARSES_ITS_ARGUMENTS,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        if name in TAKING_METHODS:
            _add_plugin(command, argparse.SUPPRESS)
    return parser


def _add_plugin(parser: argparse.ArgumentParser, default: object) -> None:
    says = "module with methods of your own, which it registers when it is imported; may be given several times"
    parser.add_argument("--plugin", action="append", default=default, metavar="MODULE", help=says)


def _load_plugins(arguments: list[str]) -> list[str]:
    """Import what ``--plugin`` names, here and, by the environment, in every process that is started from here.

    Returns:
        The other arguments.
    """
    parser = Parser(prog="seergate", add_help=False, allow_abbrev=False)
    _add_plugin(parser, [])
    given, others = parser.parse_known_args(arguments)
    if given.plugin:
        from seergate.methods.registry import PLUGINS, load_plugins

        load_plugins(*given.plugin)
        os.environ[PLUGINS] = ",".join(filter(None, [os.environ.get(PLUGINS), *given.plugin]))
    return others


def _parser_of(module: ModuleType, prog: str) -> Parser:
    """The parser of a command below a command."""
    _, description, examples = module.HELP
    parser = Parser(
        prog=prog,
        description=description,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def _check_plots(options: argparse.Namespace) -> None:
    """Refuse a report that could not be drawn, before the work that it would be about."""
    if options.command not in DRAWING or getattr(options, "no_report", False):
        return
    if options.command == "figure" and options.name == "table2":  # a table only
        return
    if importlib.util.find_spec("matplotlib") is None:
        without = ", or leave the report out with --no-report" if hasattr(options, "no_report") else ""
        raise SeergateError(f"the report needs matplotlib; {how_to_install('eval')}{without}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; those of the process if ``None``.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    bound_spinning()
    try:
        if any(argument.split("=")[0] == "--plugin" for argument in arguments):
            arguments = _load_plugins(arguments)
        if not arguments:
            build_parser().print_help()
            return OK
        name = arguments[0]
        if not name.startswith("-") and name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
            print(f"error: there is no command {name!r}; {hint}", file=sys.stderr)
            return USER_ERROR
        if name in COMMANDS and not COMMANDS[name].PARSES_ITS_ARGUMENTS:
            return int(COMMANDS[name].run_argv(arguments[1:]))
        inner = getattr(COMMANDS.get(name), "SUBCOMMANDS", {}).get(arguments[1]) if len(arguments) > 1 else None
        if inner is not None:
            return int(inner.run(_parser_of(inner, f"seergate {name} {arguments[1]}").parse_args(arguments[2:])))
        options, unknown = build_parser().parse_known_args(arguments)
        if unknown:
            Parser(prog=f"seergate {options.command}").error(f"unrecognized arguments: {' '.join(unknown)}")
        _check_plots(options)
        return int(COMMANDS[options.command].run(options))
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (ValueError, OSError) as error:
        # Of the system's errors, only those about a file are the user's.
        foreign = isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and error.filename is None
        if foreign or os.environ.get("SEERGATE_TRACEBACK"):
            raise
        print(f"error: {sentence(error)}", file=sys.stderr)
        return USER_ERROR
