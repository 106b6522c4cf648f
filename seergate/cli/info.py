"""``seergate info``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from seergate.cli.adapters import add_source_options, read_gates
from seergate.gates.card import percent_right, scoring

if TYPE_CHECKING:
    from seergate.hf.bank import GateBank

HELP = (
    "what gates are for, how they were trained, how good they are",
    "Describe gates without loading their base model. With --diff, compare them with others.",
    [
        "seergate info org/Qwen3-8B-gates",
        "seergate info runs/tiny-reasoner-gates --json",
        "seergate info runs/a --diff runs/b",
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", metavar="GATES", help="directory or Hub id")
    parser.add_argument("--diff", metavar="OTHER", help="also what other gates have that differs")
    parser.add_argument("--json", action="store_true", help="for programs")
    add_source_options(parser)


def run(options: argparse.Namespace) -> int:
    """Read the gates and print the facts about them."""
    bank = read_gates(options.source, options)
    facts = facts_of(bank)
    if options.diff is not None:
        found = bank.diff(read_gates(options.diff, options))
        changed = {name: vars(entry) for name, entry in found.tensors.items()}
        facts["difference"] = {
            "fields": found.fields,
            "tensors": changed,
            "compared": len(bank.state_dict()) - len(found.only_first),
            "only here": found.only_first,
            "only there": found.only_second,
        }
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        say(facts)
    return 0


def facts_of(bank: GateBank) -> dict[str, Any]:
    """The facts about gates, in sections."""
    gate, geometry = bank.config, bank.geometry
    return {
        "gates": {
            "block size": gate.block_size,
            "gate width": gate.gate_dim,
            **scoring(gate),
            "q/k norm": None if gate.retention else gate.qk_norm,
            "RoPE": None if gate.retention else gate.rope,
            "gated layers": len(geometry.layers),
            "parameters": bank.num_parameters,
            "megabytes": round(bank.nbytes / 1e6, 1),
            "dtype": str(bank.dtype).removeprefix("torch."),
            "decoding defaults": bank.decode_defaults or None,
        },
        "base model": {
            "name": geometry.base_model,
            "revision": geometry.base_revision,
            "type": geometry.model_type,
            "layers": geometry.num_layers,
            "heads": f"{geometry.num_heads} query, {geometry.num_kv_heads} KV, width {geometry.head_dim}",
            "licence": bank.licence.get("license"),
        },
        "training": bank.training_record,
        "results": list(bank.results),
    }


def say(facts: dict[str, Any]) -> None:
    """Print the facts, one per line."""
    for title in ("gates", "base model"):
        print(title)
        _table(facts[title])
    training = dict(facts["training"])
    options = training.pop("config", None)
    flat = {**{key: value for key, value in training.items() if not isinstance(value, (dict, list))}}
    if isinstance(options, dict):
        flat |= {
            key: options[key]
            for key in ("data", "max_steps", "packs_per_step", "learning_rate", "seed")
            if key in options
        }
    print("training" if flat else "training: not recorded")
    _table(flat)
    print("results" if facts["results"] else "results: none recorded")
    for result in facts["results"]:
        budget = f", {result['token_budget']} tokens" if result.get("token_budget") else ""
        print(f"  {result.get('task')}, {result.get('method')}{budget}: {percent_right(result) or '?'} %")
    if "difference" in facts:
        _say_difference(facts["difference"])


def _table(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is not None:
            shown = f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else value
            print(f"  {name.replace('_', ' '):20} {shown}")


def _say_difference(found: dict[str, Any]) -> None:
    print("difference")
    for line in found["fields"]:
        print(f"  {line}")
    for place in ("only here", "only there"):
        if found[place]:
            print(f"  tensors {place}: {', '.join(found[place])}")
    for name, entry in found["tensors"].items():
        print(f"  {name}: {100 * entry['relative']:.3g} % of its norm, cosine {entry['cosine']:.6f}")
    if found["tensors"]:
        name, most = max(found["tensors"].items(), key=lambda item: item[1]["relative"])
        print(
            f"  in all: {len(found['tensors'])} of {found['compared']} tensors differ, "
            f"at most by {100 * most['relative']:.3g} % of their norm ({name})"
        )
    if not any(found[part] for part in ("fields", "tensors", "only here", "only there")):
        print("  none")
