"""``seergate methods``: the methods that can be named, with their options."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from dataclasses import MISSING, fields
from typing import Any

HELP = (
    "the decoding methods and their options",
    "List the methods that --method takes, with what they do and their options as NAME=DEFAULT. An option follows\n"
    "the name of its method, as in quest:block_size=16. EVICTOR+gate, such as snapkv+gate, has the evictor's options\n"
    "and read_budget. docs/options.md says what each option means.",
    ["seergate methods", "seergate methods quest h2o"],
)
TAKES_METHODS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("methods", metavar="METHOD", nargs="*", help="only these [all]")


def run(options: argparse.Namespace) -> None:
    """Print the methods."""
    from seergate.methods import METHODS, method_class, option_names
    from seergate.methods.registry import keeping_class, load_plugins, reading_class

    load_plugins()
    for name in options.methods or METHODS:
        kinds = keeping_class(name), reading_class(name), method_class(name)  # two of NAME+gate, else one
        summary = " ".join((inspect.getdoc(kinds[-1]) or "").split("\n\n")[0].split())
        names = option_names(name)
        options_of = {x.name: _written(x) for kind in kinds for x in fields(kind) if x.init and x.name in names}
        given = [f"{option}={options_of.get(option, '?')}" for option in (*options_of, *sorted(names - {*options_of}))]
        print(f"{name}: {summary}")
        print(textwrap.fill(", ".join(given) or "no options", 110, initial_indent="    ", subsequent_indent="    "))


def _written(field: Any) -> str:
    """The default of an option as one writes it after a method's name; ``?`` if there is none."""
    from seergate.eval.method_text import value_text

    default = field.default if field.default_factory is MISSING else field.default_factory()
    return "?" if default is MISSING else value_text(default)
