"""The model card of gates: purpose, usage, training and results.

`card.jinja` is its text. The generated text is between two markers. The rest of a card is its owner's: saving and
pushing again replace only the text between the markers and the metadata entries that seergate writes.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from seergate.checks import is_int
from seergate.config import RULES, SCORERS, GateConfig
from seergate.escaping import markdown_block, markdown_code, markdown_text
from seergate.gates.bank import Gates
from seergate.gates.record import portable_base
from seergate.paths import GGUF, is_hub_id

CARD_FILE = "README.md"
BEGIN, END = "<!-- seergate: what follows is generated -->", "<!-- seergate: end of what is generated -->"
TAGS = ["seergate", "sparse-attention", "block-sparse", "attention-gate"]
OF_GATES = ("model-index", "datasets", "base_model", "base_model_relation")
"""Metadata that seergate writes and that not all gates have."""
LICENCE = ("license", "license_name", "license_link")
_HALF = 196.0  # times the standard error of a share: half the width of a 95 % interval in percent


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


def model_card(bank: Gates, source: Source, *, existing: str | None) -> str:
    """The README of gates, with the owner's text of the ``existing`` card."""
    from huggingface_hub import ModelCard

    base, gate, record = portable_base(bank.geometry.base_model), bank.config, bank.training_record
    card = ModelCard.from_template(
        _metadata(bank, source),
        template_path=Path(__file__).parent / "card.jinja",
        **{
            "text": markdown_text,
            "code": markdown_code,
            "block": markdown_block,
            "percent_right": percent_right,
            "titled": titled,
        },
        **{"bank": bank, "geometry": bank.geometry, "gate": gate, "scoring": scoring(gate), "source": source},
        **{"base": base, "in_gguf": base and base.lower().endswith(GGUF)},
        rule="" if RULES.keys() & bank.decode_defaults.keys() else f", token_budget={_budget(bank)}",
        settings=", ".join(f"{key}={value!r}" for key, value in bank.decode_defaults.items()),
        **{"paper": SCORERS[gate.scorer].paper, "options": _options(bank)},
        **{"record": record, "whole_record": json.dumps(record, indent=2)},
    )
    old, before, after = _parts(existing or "")
    tags = old["tags"].value if isinstance(old.get("tags"), yaml.SequenceNode) else []
    owned = [tag.value for tag in tags if isinstance(tag, yaml.ScalarNode)]
    new = card.data.to_dict()
    if TAGS[0] in owned:  # it may have been written for other gates
        old = {name: value for name, value in old.items() if name in new or name not in OF_GATES}
    merged = {**old, **new}
    merged["tags"] = [*TAGS, *(tag for tag in owned if tag not in TAGS)]
    header = yaml.dump(merged, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    # No record's text is taken for the marker. Inside of JSON and of Python strings the escape is the same character.
    text = card.text.strip().replace(END, END.replace("<", "\\u003c"))
    return f"---\n{header}---\n\n{before.lstrip()}{BEGIN}\n{text}\n\n{END}{after.rstrip()}\n"


class _Dumper(yaml.SafeDumper):
    def represent_data(self, data: Any) -> yaml.Node:
        """Represent a value; a node stays as it is."""
        return data if isinstance(data, yaml.Node) else super().represent_data(data)


def has_own_text(card: str) -> bool:
    """True if a card has text outside of its generated part."""
    return any(part.strip() for part in _parts(card)[1:])


def _parts(card: str) -> tuple[dict[Any, yaml.Node], str, str]:
    """A card's metadata, empty if it is not a YAML mapping, and its owner's text before and after the generated part;
    all is before if there is none. Values, and keys that are not text, are nodes, which are written as they were, such
    as ``no`` for Norwegian.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    values: dict[Any, yaml.Node] = {}
    if header := REGEX_YAML_BLOCK.match(card):
        card = card[header.end() :]
        with contextlib.suppress(yaml.YAMLError, ValueError):  # ValueError: a date that there is not
            if isinstance(yaml.safe_load(header[2]), dict):
                node: Any = yaml.compose(header[2], yaml.SafeLoader)
                values = {key.value if key.tag.endswith(":str") else key: value for key, value in node.value}
    before, begin, rest = card.partition(BEGIN)
    if not begin and card.strip():
        before = card.rstrip() + "\n\n"
    return values, before, rest.partition(END)[2]


def _metadata(bank: Gates, source: Source) -> Any:
    """The card's metadata, in the Hub's vocabulary; results and the held-out loss become its `model-index`."""
    from huggingface_hub import EvalResult, ModelCardData

    base, options = bank.geometry.base_model, _options(bank)
    data: dict[str, Any] = {name: bank.licence.get(name) for name in LICENCE}
    if is_hub_id(base):
        data |= {"base_model": base, "base_model_relation": "adapter"}
    if is_hub_id(str(options.get("data"))) and options.get("data_revision"):  # no local data has a revision
        data["datasets"] = [options["data"]]
    measurements = []  # type and name of a dataset; type, value and name of a metric
    for result in bank.results:
        task, accuracy = str(result.get("task", "unknown")), result.get("accuracy")
        own = result.get("method") in ("gate", bank.config.scorer) and not result.get("options")
        if own and isinstance(accuracy, (int, float)):
            budget = result.get("token_budget")
            limit = result.get("limit", "all") if budget is None else f"token budget {budget}"
            title = ", ".join(filter(None, ("accuracy (%)", str(limit), result.get("task_options"))))
            measurements.append((str(result.get("dataset", task)), task, "accuracy", round(100 * accuracy, 2), title))
    if isinstance(kl := bank.training_record.get("kl_held_out"), (int, float)):
        trained_on = str(options.get("data", "training data"))
        name = "loss" if bank.config.retention else "KL from the model's attention (nats per row)"
        measurements.append((trained_on, f"{trained_on}, held out", "kl_divergence", round(kl, 6), name))
    if measurements:
        results = [EvalResult("text-generation", *row[:4], metric_name=row[4]) for row in measurements]
        data |= {"model_name": Path(source.name).name, "eval_results": results}
    return ModelCardData(library_name="seergate", pipeline_tag="text-generation", **data)


def _budget(bank: Gates) -> int:
    """A token budget for the example: an eighth of the trained length, rounded down to a power of two."""
    longest, sinks = _options(bank).get("max_length"), bank.config.sink_blocks
    budget = 1 << ((longest // 8).bit_length() - 1) if is_int(longest) and longest >= 8 else 4096
    return max(budget, (2 + sinks) * bank.config.block_size)


def titled(result: dict[str, Any], name: str, options: str) -> str:
    """The task or method of a result, with its options if it names any: ``gate, dense_layers=0+1``."""
    return ", ".join(str(result[key]) for key in (name, options) if result.get(key))


def percent_right(result: dict[str, Any]) -> str:
    """The accuracy of a result in percent, with half a 95 % interval if known: ``97.3 ± 2.0``; empty if unknown."""
    accuracy, error = result.get("accuracy"), result.get("standard_error")
    return "" if accuracy is None else f"{100 * accuracy:.1f}" + (f" ± {_HALF * error:.1f}" if error else "")


def _options(bank: Gates) -> dict[str, Any]:
    options = bank.training_record.get("config")
    return options if isinstance(options, dict) else {}


def scoring(gate: GateConfig) -> dict[str, str]:
    """Options of the scorer for the card's table, name -> value."""
    values = {} if gate.scorer == GateConfig.scorer else {"scorer": gate.scorer}
    if SCORERS[gate.scorer].poolings:
        values |= {"key pooling": ", ".join(gate.k_pooling), "query pooling": gate.q_pooling}
    return values | ({"sink blocks": f"{gate.sink_blocks}, always read"} if gate.sink_blocks else {})
