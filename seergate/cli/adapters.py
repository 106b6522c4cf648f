"""Shared parts of the commands about gates as files: options for the Hub, reading, results of evaluations."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seergate.errors import SeergateError
from seergate.paths import is_hub_id, is_local_model

if TYPE_CHECKING:
    from seergate.hf.bank import GateBank


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Options of reading from the Hub."""
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub repository [main]")
    parser.add_argument("--subfolder", metavar="DIR", help="where in it the gates lie [its root]")
    parser.add_argument("--token", metavar="TOKEN", help="for the Hub [the one of `hf auth login`]")
    parser.add_argument("--offline", action="store_true", help="use what was downloaded before")


def read_gates(source: str, options: argparse.Namespace) -> GateBank:
    """Read the gates that the options describe.

    Raises:
        SeergateError: if they are missing or damaged.
    """
    from seergate.hf.bank import GateBank

    hub = {"revision": options.revision, "subfolder": options.subfolder, "token": options.token}
    return GateBank.from_pretrained(source, **hub, local_files_only=options.offline)


def add_card_options(parser: argparse.ArgumentParser) -> None:
    """Options that change the card and the record of gates."""
    parser.add_argument(
        "--results", type=Path, action="append", default=[], metavar="DIR", help="runs of `seergate eval` for the card"
    )
    parser.add_argument("--base-model", metavar="ID", help="name the base model anew, such as Qwen/Qwen3-8B")
    parser.add_argument("--licence", "--license", dest="licence", metavar="ID", help="[the base model's]")


def describe(bank: GateBank, options: argparse.Namespace) -> None:
    """Give the gates the results, base model and licence that the options name.

    Raises:
        SeergateError: if the base model's name can be none.
    """
    if options.results:
        bank.results = tuple(record for path in options.results for record in results_of(path))
    if options.licence:
        bank.licence = {"license": options.licence}
    if name := options.base_model:
        if not is_hub_id(name) and not is_local_model(name):
            raise SeergateError(f"base-model is {name!r}; it must be a Hub id (org/name), a directory or a GGUF file")
        bank.geometry = replace(bank.geometry, base_model=name, base_revision=None)


def results_of(runs: Path) -> list[dict[str, Any]]:
    """Results of evaluations in the format of `GateBank.results`.

    Args:
        runs: a run directory, or a directory of several.

    Raises:
        SeergateError: if there are none.
    """
    from seergate.report.load import load_sweeps

    return [
        {
            "task": str(setting.config["task"]["name"]),
            "method": setting.method,
            "token_budget": setting.budget,
            "accuracy": setting.accuracy.mean,
            "standard_error": None if math.isnan(setting.accuracy.se) else setting.accuracy.se,
            "samples": setting.metrics["n_samples"],
            "mean_tokens": setting.metrics["mean_tokens"],
        }
        for sweep in load_sweeps(runs)
        if not sweep.of_texts
        for setting in sweep.settings
    ]
