"""``seergate import-legacy``."""

from __future__ import annotations

import argparse
from pathlib import Path

from seergate.cli.adapters import add_source_options, for_base, read_adapter

HELP = (
    "convert gates in the published SeerAttention-R format",
    "Read gates as the SeerAttention-R authors published them (config.json and attn_gate_weights.pth) and write an\n"
    "adapter. Not needed to use them: every command and seergate.load read both formats. Decoded as the published\n"
    "code does (compat='published') unless you say otherwise.",
    [
        "seergate import-legacy SeerAttention/SeerAttention-Decode-Qwen3-8B-AttnGates qwen3-8b-gates",
        "seergate import-legacy old-gates new-gates --base-model Qwen/Qwen3-4B",
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", metavar="SRC", help="directory or Hub id")
    parser.add_argument("out", type=Path, metavar="DST", help="new directory")
    parser.add_argument("--base-model", metavar="ID", help="Hub id or directory [what config.json names]")
    add_source_options(parser)


def run(options: argparse.Namespace) -> int:
    """Read the one format and write the other."""
    from seergate.errors import SeergateError
    from seergate.gates import save_adapter

    if options.out.is_dir() and any(options.out.iterdir()):
        raise SeergateError(f"{options.out} is not empty; name a new directory")
    adapter = read_adapter(options.source, options)
    if options.base_model:
        adapter = for_base(adapter, options.base_model)
    save_adapter(adapter, options.out)
    layers, base = len(adapter.geometry.layers), adapter.geometry.base_model or "an unnamed model"
    print(f"written: {options.out} ({layers} layers, {adapter.nbytes / 1e6:.1f} MB, for {base})")
    return 0
