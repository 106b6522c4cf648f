"""``seergate export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from seergate.cli.adapters import add_card_options, add_source_options, describe, read_gates
from seergate.cli.arguments import numbers

HELP = (
    "copy gates to a directory: other precision, fewer layers, from or to the published format, average",
    "Write gates to a new directory, changed as you say. With several sources their average is written. With\n"
    "--format published the result is what the published SeerAttention-R code loads. Gates in that format\n"
    "(config.json and attn_gate_weights.pth) are read by every command, and decode as the published code does\n"
    "(compat='published') unless you say otherwise.",
    [
        "seergate export org/Qwen3-8B-gates my-gates --dtype bfloat16",
        "seergate export runs/a,runs/b averaged --weights 0.25,0.75",
        "seergate export my-gates upper-half --layers 18-35",
        "seergate export my-gates published --format published",
        "seergate export SeerAttention/SeerAttention-Decode-Qwen3-8B-AttnGates qwen3-8b-gates",
    ],
)


def layer_list(text: str) -> list[int]:
    """Layers such as ``0,2,8-11``."""
    layers: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            layers += range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be layers such as 0,2,8-11") from None
    return layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("sources", metavar="SRC", help="directory or Hub id of gates; with commas, an average")
    parser.add_argument("out", type=Path, metavar="DST", help="new directory")
    parser.add_argument("--format", choices=["seergate", "published"], default="seergate", help="[%(default)s]")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="[as they are]")
    parser.add_argument("--layers", type=layer_list, metavar="I,J-K", help="keep the gates of these layers [all]")
    parser.add_argument("--weights", type=numbers, metavar="A,B", help="of an average [equal]")
    parser.add_argument("--loaded-as", metavar="NAME", help="directory or Hub id in the card's example [DST]")
    add_card_options(parser)
    add_source_options(parser)


def run(options: argparse.Namespace) -> int:
    """Read, change, write."""
    import torch

    from seergate.errors import SeergateError
    from seergate.gates import Source, average, cast, save_adapter, subset
    from seergate.hf.published import export_published

    if options.out.is_dir() and any(options.out.iterdir()):
        raise SeergateError(f"{options.out} is not empty; name a new directory")
    sources = [source for source in options.sources.split(",") if source]
    if options.weights and len(sources) < 2:
        raise SeergateError("weights are for an average; name two sources or more, with commas")
    banks = [read_gates(source, options) for source in sources]
    bank = banks[0] if len(banks) == 1 else average(banks, options.weights)
    if options.layers is not None:
        bank = subset(bank, options.layers)
    if options.dtype is not None:
        bank = cast(bank, getattr(torch, options.dtype))
    describe(bank, options)
    if options.format == "published":
        export_published(bank, options.out)
    else:
        source = Source(options.loaded_as) if options.loaded_as else None
        save_adapter(bank, options.out, card_source=source)
    print(f"written: {options.out} ({len(bank.geometry.layers)} layers, {bank.nbytes / 1e6:.1f} MB)")
    return 0
