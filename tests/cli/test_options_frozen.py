"""Every command and option is a decision: options.txt lists them. If a change is meant, write the list anew.

python -m tests.cli.test_options_frozen
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from seergate.cli import train
from seergate.cli.main import COMMANDS, _parser_of
from seergate.options import Parser

LIST = Path(__file__).with_name("options.txt")


def options_of(parser: Parser) -> list[str]:
    """Options, and names of positional arguments, in the order of the help."""
    return [text for action in parser._actions for text in action.option_strings or [action.dest]]


def frozen() -> str:
    """One paragraph per command; commands that take the options of training list only their own."""
    training = options_of(train.train_parser(None, "", ()))
    found = {"train": training}
    for name, command in COMMANDS.items():
        below = {f"{name} {below}": kind for below, kind in getattr(command, "SUBCOMMANDS", {}).items()}
        for full, kind in {**({} if command is train else {name: command}), **below}.items():
            options = options_of(_parser_of(kind, full))
            if getattr(kind, "trains", False):
                options = ["(those of train)", *(option for option in options if option not in training)]
            found[full] = options
    lines = [
        f"{name}: {' '.join(option for option in found[name] if option not in ('-h', '--help'))}" for name in found
    ]
    return (
        "\n".join(textwrap.fill(line, 118, subsequent_indent="    ", break_on_hyphens=False) for line in lines) + "\n"
    )


def test_commands_and_options_are_those_of_the_list() -> None:
    assert frozen() == LIST.read_text(encoding="utf-8")


if __name__ == "__main__":
    LIST.write_text(frozen(), encoding="utf-8")
