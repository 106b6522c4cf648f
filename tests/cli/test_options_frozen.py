"""Every command and option is a decision; options.txt lists them. If a change is meant, write the list anew.

python -m tests.cli.test_options_frozen
"""

from pathlib import Path

from seergate.cli import train
from seergate.cli.main import COMMANDS, _parser_of

LIST = Path(__file__).with_name("options.txt")


def frozen() -> str:
    """A line per command: positional arguments and options; commands that take those of training list their own."""
    parsers = {"train": train.train_parser(None, "", ())}
    for name, command in COMMANDS.items():
        below = {f"{name} {below}": kind for below, kind in getattr(command, "SUBCOMMANDS", {}).items()}
        parsers |= {full: _parser_of(kind, full) for full, kind in {name: command, **below}.items() if kind != train}
    options_by_command = {
        name: [x for a in parser._actions for x in a.option_strings or [a.dest]] for name, parser in parsers.items()
    }
    lines, training = [], options_by_command["train"]
    for name, options in options_by_command.items():
        base_options = training if name != "train" and set(training) <= set(options) else ["-h", "--help"]
        own = ["(train)"] * (base_options is training) + [option for option in options if option not in base_options]
        lines.append(f"{name}: {' '.join(own)}")
    return "\n".join(lines) + "\n"


def test_commands_and_options_are_those_of_the_list() -> None:
    assert frozen() == LIST.read_text(encoding="utf-8")


if __name__ == "__main__":
    LIST.write_text(frozen(), encoding="utf-8")
