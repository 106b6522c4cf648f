r"""What is lost when layers reuse the block selection of anchor layers, and which budget rule is best at equal bytes.

    python benchmarks/anchors.py --threads 1
    python benchmarks/anchors.py --threads 1 --model models/smollm2 --gates checkpoints/smollm2-135m \
        --data held_out.jsonl --calibration train.jsonl --lengths 640 1280 2560 --budget 256 --name anchors_smollm2

* ``plan``: the anchors that `seergate anchors` finds for each number of anchors, with the recall of the gates' and of
  the oracle's selections.
* ``anchors``: gate, Quest and oracle, each with these anchors: the next-token KL from dense attention on texts that
  the plan was not measured on, the bytes read per step, and those of them that are read for selection. The oracle's KL
  is the loss due to sharing alone.
* ``times``: of a step of each.
* ``rules``: the gate with a token budget, with a share of the context and with a threshold, at equal bytes read over
  texts of different lengths.
* ``trained``: gates of `seergate train --anchors`, given by ``--trained``, each with its own anchors and with the
  dense layers of ``--gates``.
* ``needles``: accuracy in runs of `seergate eval`, given by ``--needles``; ``anchors`` is 0 for gates in all layers.

With ``--parts``, only the named parts are measured again and replaced in the file of results.
Without ``--data``, texts are solved problems of chain_sum, which the tiny reasoner is trained for.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from collect import rows_of
from common import CPU, arguments, described, parsed, save, timed_in_turns
from torch import Tensor
from transformers import DynamicCache

import seergate
from seergate import GateBank, methods
from seergate.eval.calibration.anchors import SharedRecall, shared_recall
from seergate.eval.calibration.matching import nearest
from seergate.eval.report.load import load_sweeps
from seergate.eval.tasks.chain_sum import make_problem
from seergate.eval.tasks.retrieval import SETTLING, texts_of
from seergate.models.names import TINY, bank_for, load_model, model_path
from seergate.pretrained import load_tokenizer

METHODS = ("gate", "quest", "oracle")
Plans = dict[int, tuple[int, ...]]
"""Number of anchors -> the anchors."""
Row = dict[str, Any]
FIGURES = ("bytes_read_per_step", "bytes_scored_per_step", "state_bytes", "tokens_per_head")


def solved(count: int, variables: int, seed: int) -> list[str]:
    """Problems of chain_sum with their solutions."""
    problems = (make_problem(variables, random.Random(f"{seed}/{number}")) for number in range(count))
    return [f"{problem.question} {problem.solution}" for problem in problems]


class Bench:
    """A model with its gates, the texts, and dense attention's log-probabilities on them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, path = options, model_path(options.model)
        bank = bank_for(options.model, options.gates)
        assert bank is not None, "--gates names no gates"
        self.bank: GateBank = bank
        self.model, self.tokenizer = load_model(path, "float32", "cpu"), load_tokenizer(path)
        lengths = [options.lengths[i % len(options.lengths)] for i in range(options.texts)]
        self.texts = self._texts(options.data, 1, lengths)
        self.dense = [self._log_probs(ids) for ids in self.texts]
        self.known: dict[str, dict[str, Any]] = {}

    def _texts(self, data: str | None, seed: int, lengths: Sequence[int]) -> list[Tensor]:
        """Token ids ``[1, S]`` of different texts; text n is cut to ``lengths[n]``."""
        every = solved(4 * len(lengths), 75, seed) if data is None else texts_of(data)
        texts = list[Tensor]()
        for text in every:
            if len(texts) == len(lengths):
                break
            ids = self.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
            if ids.shape[1] >= lengths[len(texts)]:
                texts.append(ids[:, : lengths[len(texts)]])
        assert len(texts) == len(lengths), f"{len(texts)} texts are long enough; {len(lengths)} are needed"
        return texts

    def _log_probs(self, ids: Tensor) -> Tensor:
        """Log-probabilities ``[N, V]`` at the scored tokens, with the method that is attached."""
        start = ids.shape[1] - self.options.scored - SETTLING
        logits = seergate.score(self.model, ids, start=start, logits=True).logits
        assert logits is not None
        return logits[0, SETTLING:].float().log_softmax(-1)

    def method(self, name: str, rule: dict[str, Any], anchors: Sequence[int] = ()) -> methods.SelectingMethod:
        """A method with a budget rule, and with the block size, sink blocks and dense layers of the gates."""
        gate = methods.Gate.with_gates(self.bank, anchors=tuple(anchors), **rule)
        if name == "gate":
            return gate
        options: dict[str, Any] = {"block_size": gate.block_size, "sink_blocks": self.bank.config.sink_blocks}
        options |= {"dense_layers": gate.dense_layers, "anchors": gate.anchors}
        method = methods.make_method(name, **options, **rule)
        assert isinstance(method, methods.SelectingMethod)
        return method

    def measured(self, method: methods.SelectingMethod, texts: int | None = None) -> dict[str, Any]:
        """KL in nats per token with its standard error over texts, and `FIGURES`, on the first ``texts`` texts."""
        key = f"{method} {texts}"
        if key not in self.known:
            kls = list[float]()
            with seergate.attached(self.model, method) as handle:
                for ids, dense in list(zip(self.texts, self.dense, strict=True))[:texts]:
                    kls.append(float((dense.exp() * (dense - self._log_probs(ids))).double().sum(-1).mean()))
                stats = handle.stats()
            each = torch.tensor(kls, dtype=torch.float64)
            error = float(each.std() / len(each) ** 0.5) if len(each) > 1 else None
            self.known[key] = {"kl": float(each.mean()), "kl_se": error, **{name: stats[name] for name in FIGURES}}
        return self.known[key]

    def recall(self, name: str) -> SharedRecall:
        """Recall of a method's selections, on calibration texts."""
        options = self.options
        texts = self._texts(options.calibration, 2, [max(options.lengths)] * options.calibration_texts)
        rule = {"token_budget": options.budget}
        return shared_recall(self.model, self.method(name, rule), [ids[0] for ids in texts], options.rows)


def times(bench: Bench, plans: Plans) -> Iterator[Row]:
    """Milliseconds of a decode step of one row after the longest text; settings take turns."""
    rule = {"token_budget": bench.options.budget}
    settings: dict[str, methods.Method] = {"dense": methods.Dense()}
    settings |= {f"{name} {n}": bench.method(name, rule, plan) for name in METHODS for n, plan in plans.items()}
    model, ids = bench.model, max(bench.texts, key=lambda ids: ids.shape[1])
    caches = {name: DynamicCache(config=model.config) for name in settings}

    def steps(name: str, count: int, given: Tensor) -> None:
        with seergate.attached(model, settings[name]):
            for _ in range(count):
                model(given, past_key_values=caches[name], use_cache=True, logits_to_keep=1)

    for name in settings:
        steps(name, 1, ids)
        steps(name, 1, ids[:, :1])
    runs = {name: partial(steps, name, bench.options.steps, ids[:, :1]) for name in settings}
    seconds = timed_in_turns(runs, bench.options.rounds, CPU)
    for setting, statistics in seconds.items():
        name, _, count = setting.partition(" ")
        shared = {"anchors": int(count)} if count else {}
        step_ms = {key: value / bench.options.steps for key, value in statistics.items()}
        yield {"part": "times", "method": name, **shared, "step_ms": step_ms}


def plan(bench: Bench, _: Plans) -> Iterator[Row]:
    """The anchors if all, a half, a quarter or an eighth of the layers are anchors, with their recall."""
    recalls = {name: bench.recall(name) for name in ("gate", "oracle")}
    gates = recalls["gate"]
    for count in dict.fromkeys(-(-len(gates.layers) // part) for part in (1, 2, 4, 8)):
        layers = gates.anchors(count)
        recall = {f"{name}_recall": recall_of.mean(layers) for name, recall_of in recalls.items()}
        yield {"part": "plan", "anchors": count, "layers": list(layers), **recall}


def anchors(bench: Bench, plans: Plans) -> Iterator[Row]:
    """What sharing costs each method."""
    for name in METHODS:
        for count, layers in plans.items():
            method = bench.method(name, {"token_budget": bench.options.budget}, layers)
            yield {"part": "anchors", "method": name, "anchors": count, **bench.measured(method)}


def rules(bench: Bench, _: Plans) -> Iterator[Row]:
    """The share and the threshold whose bytes read, over one text of each length, are nearest to the budget's."""
    texts, budget = len(bench.options.lengths), {"token_budget": bench.options.budget}
    target = bench.measured(bench.method("gate", budget), texts)["bytes_read_per_step"]
    for option in (*budget, *methods.Gate.searched_values()):

        def bytes_of(value: float, option: str = option) -> float:
            return float(bench.measured(bench.method("gate", {option: value}), texts)["bytes_read_per_step"])

        values = methods.Gate.searched_values().get(option)
        # without the ends of the range, which take as long as dense attention; nearest tries only a few values
        middle = values and values[len(values) // 50 : len(values) * 2 // 3]
        value = nearest(middle, bytes_of, target) if middle else bench.options.budget
        metrics = bench.measured(bench.method("gate", {option: value}))
        yield {"part": "rules", "rule": option, "value": value, **metrics}


def trained(bench: Bench, _: Plans) -> Iterator[Row]:
    """Gates that learned as anchors."""
    dense = methods.Gate.with_gates(bench.bank).dense_layers
    for directory in bench.options.trained:
        bank = GateBank.from_pretrained(directory)
        method = methods.Gate.with_gates(bank, token_budget=bench.options.budget, dense_layers=dense)
        layers = method.anchors or [layer for layer in bank.geometry.layers if layer not in dense]
        yield {"part": "trained", "anchors": len(layers), "layers": list(layers), **bench.measured(method)}


def needles(bench: Bench, _: Plans) -> Iterator[Row]:
    """Right answers in runs of `seergate eval`."""
    for directory in bench.options.needles:
        (sweep,) = load_sweeps(Path(directory))
        for setting, row in zip(sweep.settings, rows_of(sweep), strict=True):
            yield {"part": "needles", "anchors": len(setting.config["method"].get("anchors", ())), **row}


PARTS = {part.__name__: part for part in (plan, anchors, times, rules, trained, needles)}


def main() -> None:
    """Parse the command line, measure, print, save."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default=TINY, help="preset, directory or Hub id [%(default)s]")
    parser.add_argument("--gates", help="directory or Hub id [gates/ of the model]")
    parser.add_argument("--data", help=".jsonl of texts to measure on [chain_sum]")
    parser.add_argument("--calibration", help=".jsonl of texts to find anchors on [chain_sum]")
    parser.add_argument("--lengths", type=int, nargs="+", default=[400, 700, 1000], help="tokens of texts, in turn")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--scored", type=int, default=128, help="last tokens of each text")
    parser.add_argument("--calibration-texts", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="tokens of each of them that choose")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["plan", "anchors", "times", "rules"])
    parser.add_argument("--trained", nargs="+", default=[], metavar="DIR", help="gates for the part of this name")
    parser.add_argument("--rounds", type=int, default=5, help="of the times")
    parser.add_argument("--steps", type=int, default=8, help="of each setting in a round")
    parser.add_argument("--needles", nargs="+", default=[], metavar="DIR", help="runs for the part of this name")
    parser.add_argument("--name", default="anchors", help="of the file of results")
    options = parsed(parser)
    settings = described(options, "name", "parts", "trained", "needles")
    for key in ("model", "gates", "data", "calibration"):
        settings[key] = settings[key] and Path(settings[key]).name
    file = options.output / f"{options.name}.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": [], "options": settings}
    rows = [row for row in record["rows"] if row["part"] not in options.parts]
    if rows and record["options"] != settings:
        parser.error(f"{file} was made with {record['options']}; use the same, or another --name")
    if not any(row["part"] == "plan" for row in rows) and "plan" not in options.parts:
        parser.error(f"{file} has no plan; name it among --parts")
    with torch.no_grad():
        bench = Bench(options)
        for part in (part for part in PARTS if part in options.parts):
            plans = {row["anchors"]: tuple(row["layers"]) for row in rows if row["part"] == "plan"}
            for row in PARTS[part](bench, plans):
                rows.append(row)
                print(row, flush=True)
            print("saved", save(options.name, settings, rows, options.output), flush=True)


if __name__ == "__main__":
    main()
