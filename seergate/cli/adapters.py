"""Commands about gates as files: ``info``, ``push`` and ``export``."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seergate.cli.arguments import Command
from seergate.durable import check_writable
from seergate.errors import SeergateError
from seergate.paths import directory_here, is_hub_id, is_local_model

if TYPE_CHECKING:
    from seergate.eval.report.load import Setting
    from seergate.models.gate_bank import GateBank

LIMITS = {"nominal", "token_budget", "budget_share", "budget_min", "budget_max", "threshold", "top_p"}
"""Keys of a run's ``method`` that limit what is read."""
NO_TASK_OPTIONS = {
    *("name", "problems", "n_problems", "grader", "chance", "contents", "prompts", "source", "shots_source", "file"),
    *("text", "seed", "revision"),
}
"""Keys of a run's ``task`` that a card does not name."""

INFO_HELP = (
    "what gates are for, how they were trained, how good they are",
    "Describe gates without loading their base model.",
    ["seergate info org/Qwen3-8B-gates", "seergate info runs/tiny-reasoner-gates --json"],
)


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="GATES", help="directory or Hub id")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_source_options(parser)


def _info(options: argparse.Namespace) -> None:
    facts = _facts_of(_read_gates(options.source, options))
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _say(facts)


def _facts_of(bank: GateBank) -> dict[str, Any]:
    from seergate.gates.card import scoring

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


def _say(facts: dict[str, Any]) -> None:
    from seergate.gates.card import percent_right, titled

    for title in ("gates", "base model"):
        print(title)
        _table(facts[title])
    training = dict(facts["training"])
    options = training.pop("config", None)
    flat = {key: value for key, value in training.items() if not isinstance(value, (dict, list))}
    if isinstance(options, dict):
        shown = ("data", "max_steps", "packs_per_step", "learning_rate", "seed")
        flat |= {key: options[key] for key in shown if key in options}
    print("training" if flat else "training: not recorded")
    _table(flat)
    print("results" if facts["results"] else "results: none recorded")
    for result in facts["results"]:
        limit = f"{result['token_budget']} tokens" if result.get("token_budget") else result.get("limit")
        budget = f", {limit}" if limit else ""
        names = titled(result, "task", "task_options"), titled(result, "method", "options")
        print(f"  {', '.join(names)}{budget}: {percent_right(result) or '?'} %")


def _table(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is not None:
            shown = f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else value
            print(f"  {name.replace('_', ' '):20} {shown}")


INFO = Command(INFO_HELP, _info_arguments, _info)

PUSH_HELP = (
    "upload gates to the Hugging Face Hub",
    "Upload gates in one commit, with a model card that says what they are for, how to use them, how they were made\n"
    "and how good they are. What you wrote around the generated part of an existing card stays.",
    [
        "seergate push runs/qwen3-8b-gates org/Qwen3-8B-gates --dry-run",
        "seergate push runs/qwen3-8b-gates org/Qwen3-8B-gates --private",
        "seergate push runs/qwen3-8b-gates org/Qwen3-8B-gates --results runs/eval-Qwen3-8B-aime24",
        "seergate push runs/qwen3-8b-gates org/Qwen3-8B-gates --create-pr --message 'Gates after 800 steps'",
    ],
)


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="directory of gates")
    parser.add_argument("repo_id", metavar="ORG/NAME", help="repository, created if missing; NAME alone is your own")
    parser.add_argument(
        "--private", action="store_true", default=None, help="make a new repository private; refuse a public one"
    )
    parser.add_argument("--revision", metavar="BRANCH", help="branch to commit to, created if missing [main]")
    parser.add_argument("--subfolder", metavar="DIR", help="folder in the repository [its root]")
    parser.add_argument("--message", default="Upload attention gates", help="commit message [%(default)s]")
    parser.add_argument("--description", help="text of the commit or pull request")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--dry-run", action="store_true", help="print the card and what would be uploaded, and stop")
    parser.add_argument("--token", metavar="TOKEN", help="Hub token [that of `hf auth login`]")
    _add_card_options(parser)


def _push(options: argparse.Namespace) -> None:
    from seergate.gates import CARD_FILE, Source, base_note, check_target, licence_of_base, read_card, save_adapter
    from seergate.models.gate_bank import GateBank

    if (directory := directory_here(options.directory)) is None:
        raise SeergateError(f"{options.directory} is not a directory; push uploads a directory of gates")
    if link := next((path for path in sorted(directory.iterdir()) if path.is_symlink()), None):
        raise SeergateError(
            f"{link} is a link, and what it leads to may not be for others to read; push uploads only files that are "
            f"in {directory} themselves: copy them (cp -rL), or write new gates with seergate export"
        )
    bank = GateBank.from_pretrained(directory)
    _describe(bank, options)
    if options.dry_run:
        check_target(options.repo_id, options.revision, options.subfolder, options.create_pr)
        bank.licence = bank.licence or licence_of_base(bank, options.token)
        with tempfile.TemporaryDirectory() as place:
            if card := read_card(directory):
                (Path(place) / CARD_FILE).write_text(card, encoding="utf-8")
            source = Source(options.repo_id, options.revision, options.subfolder)
            files = sorted(save_adapter(bank, place, card_source=source).iterdir())
            print((Path(place) / CARD_FILE).read_text(encoding="utf-8"))
            print(f"not uploaded: {', '.join(f'{file.name} ({file.stat().st_size:,} bytes)' for file in files)}")
        return
    if note := base_note(bank.geometry.base_model):
        print(note)
    address = bank.push_to_hub(
        options.repo_id,
        card=read_card(directory),
        private=options.private,
        token=options.token,
        revision=options.revision,
        subfolder=options.subfolder,
        commit_message=options.message,
        commit_description=options.description,
        create_pr=options.create_pr,
    )
    print(f"pushed: {address}")


PUSH = Command(PUSH_HELP, _push_arguments, _push)

EXPORT_HELP = (
    "copy gates to a directory: other precision, fewer layers, from or to the published format",
    "Write gates to a new directory, changed as you say. With --format published the result is what the published\n"
    "SeerAttention-R code loads. Gates in that format (config.json and attn_gate_weights.pth) are read by every\n"
    "command, and decode as the published code does (compat='published') unless you say otherwise.",
    [
        "seergate export org/Qwen3-8B-gates my-gates --dtype bfloat16",
        "seergate export my-gates upper-half --layers 18-35",
        "seergate export my-gates published --format published",
        "seergate export SeerAttention/SeerAttention-Decode-Qwen3-8B-AttnGates qwen3-8b-gates",
    ],
)


def _layer_list(text: str) -> list[int]:
    """Parse layers such as ``0,2,8-11``."""
    layers: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            named = range(int(first), int(last if dash else first) + 1)
            if not named:
                raise ValueError
            layers += named
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be layers such as 0,2,8-11") from None
    return layers


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="directory or Hub id of gates")
    parser.add_argument("out", type=Path, metavar="DST", help="new directory")
    parser.add_argument("--format", choices=["seergate", "published"], default="seergate", help="[%(default)s]")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="dtype of the weights [unchanged]")
    parser.add_argument("--layers", type=_layer_list, metavar="I,J-K", help="keep the gates of these layers [all]")
    parser.add_argument("--loaded-as", metavar="NAME", help="directory or Hub id in the card's example [DST]")
    _add_card_options(parser)
    _add_source_options(parser)


def _export(options: argparse.Namespace) -> None:
    import torch

    from seergate.gates import Source, save_adapter
    from seergate.models.published import export_published

    if options.out.is_dir() and any(options.out.iterdir()):
        raise SeergateError(f"{options.out} is not empty; name a new directory")
    if options.format == "published":
        for name in ("results", "licence", "loaded_as"):
            if getattr(options, name):
                option = name.replace("_", "-")
                raise SeergateError(f"--{option} is for the model card, which the published format does not have")
    bank = _read_gates(options.source, options)
    if options.layers is not None:
        bank = bank.subset(options.layers)
    _describe(bank, options)
    if options.dtype is not None:
        bank = bank.cast(getattr(torch, options.dtype))
    check_writable(options.out)
    if options.format == "published":
        export_published(bank, options.out)
    else:
        save_adapter(bank, options.out, card_source=Source(options.loaded_as) if options.loaded_as else None)
    print(f"written: {options.out} ({len(bank.geometry.layers)} layers, {bank.nbytes / 1e6:.1f} MB)")


EXPORT = Command(EXPORT_HELP, _export_arguments, _export)


def _add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub repository [main]")
    parser.add_argument("--subfolder", metavar="DIR", help="folder of the gates in the repository [its root]")
    parser.add_argument("--token", metavar="TOKEN", help="Hub token [that of `hf auth login`]")
    parser.add_argument("--offline", action="store_true", help="use downloaded files only")


def _read_gates(source: str, options: argparse.Namespace) -> GateBank:
    """Read gates from a directory or the Hub, with the options of `_add_source_options`."""
    from seergate.models.gate_bank import GateBank

    hub = {"revision": options.revision, "subfolder": options.subfolder, "token": options.token}
    return GateBank.from_pretrained(source, **hub, local_files_only=options.offline)


def _add_card_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that change the model card and the metadata of gates."""
    parser.add_argument(
        "--results", type=Path, action="append", default=[], metavar="DIR", help="runs of `seergate eval` for the card"
    )
    parser.add_argument("--base-model", metavar="ID", help="new name of the base model, such as Qwen/Qwen3-8B")
    parser.add_argument("--licence", "--license", dest="licence", metavar="ID", help="[the base model's licence]")


def _describe(bank: GateBank, options: argparse.Namespace) -> None:
    """Set the results, base model and licence that the options name."""
    if options.results:
        bank.results = tuple(record for path in options.results for record in results_of(path, bank))
    if options.licence:
        bank.licence = {"license": options.licence}
    if name := options.base_model:
        if not is_hub_id(name) and not is_local_model(name):
            raise SeergateError(f"base-model is {name!r}; it must be a Hub id (org/name), a directory or a GGUF file")
        if name != bank.geometry.base_model:
            bank.geometry = replace(bank.geometry, base_model=name, base_revision=None)


def results_of(runs: Path, bank: GateBank) -> list[dict[str, Any]]:
    """Accuracy of each setting in a run directory, or in all runs in a directory, as in `GateBank.results`; not of
    settings with other gates than these, nor of sweeps without these. A `SeergateError` if there are only others.
    ``options`` has the options of a method that differ from its defaults with these gates, apart from what limits it,
    and ``task_options`` the task's.
    """
    from seergate.eval.report.load import load_sweeps
    from seergate.fingerprint import fingerprint

    gates = fingerprint(bank)
    sweeps = [sweep for sweep in load_sweeps(runs) if not sweep.of_texts]
    if not sweeps:
        raise SeergateError(f"{runs} has scored texts only, and gates record results of answers; leave it out")
    # Sweeps without these gates may be of any model.
    ours = [sweep for sweep in sweeps if gates in {setting.gates for setting in sweep.settings}]
    if not ours:
        others = {setting.gates for sweep in sweeps for setting in sweep.settings if setting.gates}
        raise SeergateError(
            f"{runs} has results of other gates ({', '.join(sorted(others)) or 'none'}) than {gates}, or of these in "
            "another dtype"
        )
    mine = [setting for sweep in ours for setting in sweep.settings if setting.gates in (None, gates)]
    if partial := next((setting for setting in mine if not setting.complete), None):
        raise SeergateError(f"{partial.directory} lacks samples; repeat the command that made it, or leave it out")
    return [
        {
            "task": str(setting.config["task"]["name"]),
            **_named("task_options", {k: v for k, v in setting.config["task"].items() if k not in NO_TASK_OPTIONS}),
            "method": setting.method,
            **_named("options", _unusual(setting, bank)),
            "token_budget": setting.budget,
            "limit": setting.nominal,
            "accuracy": setting.accuracy.mean,
            "standard_error": None if math.isnan(setting.accuracy.se) else setting.accuracy.se,
            "samples": setting.metrics["n_samples"],
            "mean_tokens": setting.metrics["mean_tokens"],
        }
        for setting in mine
    ]


def _named(name: str, options: dict[str, Any]) -> dict[str, str]:
    """Options that are set, as text under a name: ``compat=published, dense_layers=0+1``; empty if there are none."""
    from seergate.eval.method_text import value_text

    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if v is not None}
    return {name: ", ".join(f"{key}={value_text(value)}" for key, value in plain.items())} if plain else {}


def _unusual(setting: Setting, bank: GateBank) -> dict[str, Any]:
    """The options of a setting's method that differ from its defaults with these gates, apart from what limits it.
    None of a method that has no defaults for all of its options, or is not known here.
    """
    from seergate.eval.settings import MethodSpec

    try:
        spec = MethodSpec(setting.method, 1 << 20, bank.config.block_size)
        usual = {"rectify_every": None, **spec.describe(bank if spec.has_gates else None)}
    except SeergateError:
        return {}
    given = {key: setting.config["method"].get(key) for key in usual.keys() - LIMITS}
    return {key: value for key, value in sorted(given.items()) if value != usual[key]}
