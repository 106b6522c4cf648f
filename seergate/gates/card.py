"""The model card of gates: purpose, usage, training and results.

The generated text is between two markers. The rest of a card is its owner's: saving and pushing again replace only the
text between the markers and the metadata entries that seergate writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from seergate.checks import is_int
from seergate.config import RULES, SCORERS, GateConfig
from seergate.escaping import markdown_block, markdown_code, markdown_text, visible
from seergate.gates.bank import Gates
from seergate.gates.record import portable_base
from seergate.paths import directory_here, is_hub_id

CARD_FILE, PLOT_FILE = "README.md", "accuracy.png"
BEGIN, END = "<!-- seergate: what follows is generated -->", "<!-- seergate: end of what is generated -->"
TAGS = ["seergate", "sparse-attention", "block-sparse", "attention-gate"]
PAPER = "[SeerAttention-R](https://arxiv.org/abs/2506.08889)"
_HALF = 196.0
"""Factor from the standard error of a share to the half-width of a 95 % interval in percent."""


@dataclass(frozen=True)
class Source:
    """The place that a card's usage example loads gates from: a directory or a Hub id."""

    name: str
    revision: str | None = None
    subfolder: str | None = None

    @property
    def arguments(self) -> str:
        """The arguments of `seergate.load` for this source, as Python code."""
        places = {"revision": None if self.revision == "main" else self.revision, "subfolder": self.subfolder}
        named = [f", {name}={json.dumps(value)}" for name, value in places.items() if value]
        return json.dumps(self.name) + "".join(named)


def model_card(bank: Gates, source: Source, *, existing: str | None, plotted: bool) -> str:
    """The README of gates, with the owner's text of the ``existing`` card, and `accuracy.png` if ``plotted``."""
    old_metadata, old_text = _split(existing or "")
    new = _metadata(bank, source)
    merged = {**old_metadata, **new}
    merged["tags"] = [*new["tags"], *(tag for tag in _texts(old_metadata.get("tags")) if tag not in new["tags"])]
    before, after = _own_text(old_text)
    body = "\n".join([BEGIN, *_body(bank, source, plotted), END])
    header = yaml.safe_dump(merged, sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n{before.lstrip()}{body}{after.rstrip()}\n"


def has_own_text(card: str) -> bool:
    """True if a card has text outside of its generated part."""
    return any(part.strip() for part in _own_text(_split(card)[1]))


def usage(bank: Gates, source: Source) -> str:
    """Complete Python code that loads the gates and generates with them."""
    base = portable_base(bank.geometry.base_model)
    own_rule = RULES.keys() & bank.decode_defaults.keys()
    rule = "" if own_rule else f", token_budget={_budget(bank)}"
    if base is None:
        return (
            "from seergate import GateBank\n\n"
            f"bank = GateBank.from_pretrained({source.arguments})\n"
            f"# with seergate.attached(model, bank{rule}): model.generate(...)"
        )
    lines = ["import seergate", "", f"model = seergate.load({source.arguments}{rule})"]
    if not _has_tokenizer(base):
        return "\n".join([*lines, "# an ordinary transformers model: model.generate(...) decodes sparsely"])
    imports, question = ["from transformers import AutoTokenizer", ""], '"How many positive divisors does 360 have?"'
    if _options(bank).get("data") == "chain_sum":  # models of this task only know the words of its problems
        imports = ["import random", "", *imports]
        lines.insert(1, "from seergate.eval.tasks.chain_sum import make_problem")
        question = "make_problem(20, random.Random(0)).question"
    return "\n".join(
        [
            *imports,
            *lines,
            "tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)",
            f"text = {question}",
            "if tokenizer.chat_template:",
            '    messages = [{"role": "user", "content": text}]',
            "    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)",
            'input_ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)',
            "print(tokenizer.decode(model.generate(input_ids, max_new_tokens=512)[0]))",
        ]
    )


def _budget(bank: Gates) -> int:
    """A token budget for the example: an eighth of the trained length, rounded down to a power of two."""
    longest = _options(bank).get("max_length")
    budget = 4096
    if is_int(longest) and longest >= 8:
        budget = 1 << ((longest // 8).bit_length() - 1)
    sinks = bank.config.sink_blocks
    return max(budget, (1 + sinks + (sinks > 0)) * bank.config.block_size)


def _metadata(bank: Gates, source: Source) -> dict[str, Any]:
    """The card's metadata, in the Hub's vocabulary."""
    from huggingface_hub import ModelCardData

    base = bank.geometry.base_model
    data: dict[str, Any] = {"library_name": "seergate", "pipeline_tag": "text-generation", **bank.licence}
    if is_hub_id(base):
        data |= {"base_model": base, "base_model_relation": "adapter"}
    dataset = _options(bank).get("data")
    if isinstance(dataset, str) and is_hub_id(dataset):
        data["datasets"] = [dataset]
    results = _eval_results(bank)
    if results:
        data |= {"model_name": Path(source.name).name, "eval_results": results}
    return {**ModelCardData(**data).to_dict(), "tags": list(TAGS)}


def _eval_results(bank: Gates) -> list[Any]:
    """Results of the gates and their held-out loss, for the card's `model-index`."""
    from huggingface_hub import EvalResult

    found = []
    for result in bank.results:
        if result.get("method") not in ("gate", bank.config.scorer) or not isinstance(
            result.get("accuracy"), (int, float)
        ):
            continue
        task = str(result.get("task", "unknown"))
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=str(result.get("dataset", task)),
                dataset_name=task,
                metric_type="accuracy",
                metric_value=round(100 * result["accuracy"], 2),
                metric_name=f"accuracy (%), token budget {result.get('token_budget')}",
            )
        )
    kl = bank.training_record.get("kl_held_out_best")
    if isinstance(kl, (int, float)):
        data = str(_options(bank).get("data", "training data"))
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=data,
                dataset_name=f"{data}, held out",
                metric_type="kl_divergence",
                metric_value=round(kl, 6),
                metric_name="loss" if bank.config.retention else "KL from the model's attention (nats per row)",
            )
        )
    return found


def _body(bank: Gates, source: Source, plotted: bool) -> list[str]:
    geometry, gate = bank.geometry, bank.config
    base = portable_base(geometry.base_model)
    revision = f" at revision {markdown_code(geometry.base_revision)}" if geometry.base_revision else ""
    named = markdown_code(base) + revision if base else "not recorded"
    layers = len(geometry.layers)
    total = f" of {geometry.num_layers}" if geometry.num_layers else ""
    kind = str(bank.dtype).removeprefix("torch.")
    about = f"Learned gates ({PAPER}) that let a frozen model decode with block-sparse attention."
    if gate.retention:
        paper = SCORERS[gate.scorer].paper
        about = f"Retention gates{f' ({paper})' if paper else ''} that evict tokens from a frozen model's cache."
    yes = {True: "yes", False: "no"}
    norm_and_rope = [] if gate.retention else [f"| q/k norm, RoPE | {yes[gate.qk_norm]}, {yes[gate.rope]} |"]
    lines = [
        f"# Attention gates for {markdown_text((base or geometry.model_type).rpartition('/')[2])}",
        "",
        f"{about} The base model is not part of this repository and is not changed by it.",
        "",
        f"Base model: {named}, {markdown_text(geometry.model_type)}.",
        "",
        "## Use",
        "",
        markdown_block(usage(bank, source), "python", "`"),
        "",
        "## Gates",
        "",
        "| | |",
        "|---|---|",
        f"| block size | {gate.block_size} tokens |",
        f"| gate width | {gate.gate_dim} |",
        *(f"| {name} | {markdown_text(value)} |" for name, value in scoring(gate).items()),
        *norm_and_rope,
        f"| gated layers | {layers}{total} |",
        f"| query and KV heads, their width | {geometry.num_heads} and {geometry.num_kv_heads}, {geometry.head_dim} |",
        f"| parameters | {bank.num_parameters:,} ({kind}, {bank.nbytes / 1e6:.1f} MB) |",
    ]
    if bank.decode_defaults:
        settings = ", ".join(f"{key}={value!r}" for key, value in bank.decode_defaults.items())
        lines.append(f"| decoding defaults | {markdown_text(settings)} |")
    return [*lines, "", *_results(bank, plotted), *_training(bank)]


def _results(bank: Gates, plotted: bool) -> list[str]:
    if not bank.results:
        return []
    lines = ["## Results", ""]
    if plotted:
        lines += [f"![Accuracy against token budget]({PLOT_FILE})", ""]
    lines += [
        "| task | method | token budget | accuracy (%) | samples | tokens per answer |",
        "|---|---|---|---|---|---|",
    ]
    for result in bank.results:
        tokens = result.get("mean_tokens")
        cells = [
            result.get("task", ""),
            result.get("method", ""),
            result.get("token_budget") or "all",
            percent_right(result),
            result.get("samples", ""),
            "" if tokens is None else f"{tokens:.0f}",
        ]
        lines.append(f"| {' | '.join(markdown_text(str(cell)) for cell in cells)} |")
    return [*lines, "", "± is half a 95 % interval, clustered by problem.", ""]


def percent_right(result: dict[str, Any]) -> str:
    """The accuracy of a result in percent, with half a 95 % interval if known: ``97.3 ± 2.0``; empty if unknown."""
    accuracy, error = result.get("accuracy"), result.get("standard_error")
    return "" if accuracy is None else f"{100 * accuracy:.1f}" + (f" ± {_HALF * error:.1f}" if error else "")


def _training(bank: Gates) -> list[str]:
    """The section on training: the most important options in a table, then the whole record."""
    record = bank.training_record
    if not record:
        return ["## Training", "", "Not recorded.", ""]
    options = _options(bank)
    rows = [
        (name.replace("_", " "), options[name])
        for name in ("init_gates", "data", "max_steps", "learning_rate", "max_length")
        if options.get(name) is not None
    ]
    loss, unit = ("loss", "") if bank.config.retention else ("KL", " (nats per row)")
    named = {
        "tokens_seen": "tokens seen",
        "kl_held_out_best": f"{loss} on held-out data{unit}",
        "kl_last_step": f"{loss} at the last step{unit}",
        "imported_from": "imported from",
    }
    rows += [(title, record[key]) for key, title in named.items() if record.get(key) is not None]
    shown = [(name, f"{value:.5g}" if isinstance(value, float) else markdown_text(str(value))) for name, value in rows]
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in shown), ""] if rows else []
    # Without `<`, no value of the record can be taken for one of the card's markers.
    whole = markdown_block(json.dumps(record, indent=2).replace("<", "\\u003c"), "json", "`")
    details = ["<details><summary>All that was recorded</summary>", "", whole, "", "</details>", ""]
    return ["## Training", "", *table, *details]


def _options(bank: Gates) -> dict[str, Any]:
    options = bank.training_record.get("config")
    return options if isinstance(options, dict) else {}


def _has_tokenizer(base: str) -> bool:
    """True if the base model's tokenizer is in its directory or in the Hub's cache; does not use the network."""
    names, here = ("tokenizer.json", "tokenizer_config.json"), directory_here(base)
    if here is not None:
        return any((here / name).is_file() for name in names)
    if not is_hub_id(base):
        return False
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(base, name), str) for name in names)


def _split(text: str) -> tuple[dict[str, Any], str]:
    """The metadata and the text of a card; metadata that is not a YAML mapping is dropped."""
    if not text.startswith("---\n") or "\n---" not in text[3:]:
        return {}, text
    header, body = text[4:].split("\n---", 1) if not text.startswith("---\n---") else ("", text[7:])
    try:
        values = yaml.safe_load(header)
    except yaml.YAMLError:
        values = None
    return (values if isinstance(values, dict) else {}), body.lstrip("-").lstrip("\n")


def _own_text(text: str) -> tuple[str, str]:
    """Text before and after the generated part of a card; all of it is before if there is no generated part."""
    before, begin, rest = text.partition(BEGIN)
    if not begin and text.strip():
        before = text.rstrip() + "\n\n"
    return before, rest.partition(END)[2]


def scoring(gate: GateConfig) -> dict[str, str]:
    """Options of the scorer for the card's table, name -> value."""
    values = {} if gate.scorer == GateConfig.scorer else {"scorer": gate.scorer}
    if SCORERS[gate.scorer].poolings:
        values |= {"key pooling": ", ".join(gate.k_pooling), "query pooling": gate.q_pooling}
    return values | ({"sink blocks": f"{gate.sink_blocks}, always read"} if gate.sink_blocks else {})


def _texts(value: Any) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else []


def results_plot(results: Sequence[dict[str, Any]], path: Path) -> bool:
    """Plot accuracy against token budget: a line per task and method, with 95 % intervals; dense as a horizontal line.

    Returns False without a plot if there are no results at a budget, or matplotlib is not installed.
    """
    lines: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for result in results:
        budget, accuracy = result.get("token_budget"), result.get("accuracy")
        if budget is not None and accuracy is not None:
            key = str(result.get("task", "")), str(result.get("method", ""))
            lines.setdefault(key, []).append((budget, 100 * accuracy, _HALF * (result.get("standard_error") or 0.0)))
    if not lines:
        return False
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter, ScalarFormatter
    except ImportError:
        return False
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")  # not pyplot, which has global state
    axes = figure.add_subplot()
    for (task, method), points in lines.items():
        budgets, means, errors = zip(*sorted(points), strict=True)
        axes.errorbar(budgets, means, yerr=errors, marker="o", capsize=3, label=f"{method}, {task}")
    for result in results:
        if result.get("method") == "dense" and result.get("accuracy") is not None:
            label = f"dense, {result.get('task', '')}"
            axes.axhline(100 * result["accuracy"], color="black", linestyle="--", linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({budget for points in lines.values() for budget, _, _ in points}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="token budget", ylabel="accuracy (%)", ylim=(0, 104))
    for text in axes.legend(frameon=False).get_texts():
        text.set(text=visible(text.get_text()), parse_math=False)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return True
