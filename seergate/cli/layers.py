"""The commands ``anchors`` and ``dense-layers``, which select layers by measurement and write gates that name them."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from seergate.checks import check_count, check_counts
from seergate.cli.arguments import Command, eval_args, given, model_args
from seergate.cli.generate import TINY_BUDGET
from seergate.distill.config import load_train_config
from seergate.durable import check_writable
from seergate.errors import SeergateError
from seergate.models.names import bank_for, is_tiny, load_model, model_path
from seergate.paths import model_name

if TYPE_CHECKING:
    from torch import Tensor

    from seergate.methods import Gate
    from seergate.models.gate_bank import GateBank


def _shared_arguments(parser: argparse.ArgumentParser, what: str, command: str) -> None:
    model_args(parser)
    parser.add_argument("--count", type=int, required=True, metavar="N", help=f"number of {what}")
    budget = f"token budget of the selection [the gates'; tiny: {TINY_BUDGET}]"
    parser.add_argument("--budget", type=int, metavar="N", help=budget)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"[runs/MODEL-{command}-N]")
    eval_args(parser, "dtype", "device")


def _prepared(options: argparse.Namespace, command: str) -> tuple[GateBank, Gate, str, Path]:
    """The gates, the method that decodes with them, the model's path and the output directory."""
    from seergate.methods import Gate

    check_counts(options, count=1)
    if (bank := bank_for(options.model, options.gates)) is None:
        raise SeergateError("there are no gates beside the model; give their directory or Hub id with --gates")
    out = options.out or Path("runs") / f"{model_name(options.model)}-{command}-{options.count}"
    check_writable(out)
    if any(out.iterdir()):
        raise SeergateError(f"{out} is not empty; name a new directory with --out")
    budget = TINY_BUDGET if options.budget is None and is_tiny(options.model) else options.budget
    method = Gate.with_gates(bank, **({} if budget is None else {"token_budget": budget}))
    return bank, method, model_path(options.model), out


ANCHORS_HELP = (
    "find the layers that can choose blocks for others, and write an adapter with their gates alone",
    "The model reads texts densely. For the blocks that each layer's gate selects, the command measures how much of\n"
    "the attention of every higher layer they recall. It takes the anchors with the highest mean recall, and writes\n"
    "an adapter that names them. Wherever it is loaded, other layers read the blocks that the nearest anchor below\n"
    "them selected.",
    [
        "seergate anchors --model tiny-reasoner --count 2 --budget 128",
        "seergate anchors --model ./Qwen3-8B --gates org/Qwen3-8B-gates --count 9 --data texts.jsonl",
    ],
)

ROWS = 200
"""Number of rows of the data from which the longest texts are taken."""


def _anchors_arguments(parser: argparse.ArgumentParser) -> None:
    _shared_arguments(parser, "anchors", "anchors")
    parser.add_argument("--data", metavar="FILE", help="texts, as `seergate train` takes them [the preset's]")
    parser.add_argument(
        "--texts", type=int, default=8, metavar="N", help="longest of the first 200 rows [%(default)s]"
    )
    parser.add_argument("--max-length", type=int, default=4096, metavar="N", help="tokens of a text [%(default)s]")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="queries per text [%(default)s]")


def _anchors(options: argparse.Namespace) -> None:
    """Measure how much attention each layer's blocks recall in higher layers, choose anchors, and write the gates."""
    import torch

    from seergate.distill.base_model import within_positions
    from seergate.distill.data import prepare_data
    from seergate.eval.calibration.anchors import shared_recall
    from seergate.models.loading import base_config, skeleton
    from seergate.pretrained import load_tokenizer

    check_counts(options, texts=1, rows=1, max_length=1)
    bank, method, path, out = _prepared(options, "anchors")
    check_count("count", options.count, 1, most := sum(map(method.selects_in, bank.geometry.layers)))
    data = {"max_length": options.max_length, "block_size": bank.config.block_size, "data_limit": ROWS}
    shape = base_config(path)
    config = within_positions(load_train_config(options.model, data | given(options, "data")), shape)
    vocabulary = skeleton(shape).get_input_embeddings().num_embeddings
    samples = prepare_data(config, load_tokenizer(path), one_sample=True, vocabulary=vocabulary).samples
    longest = samples.lengths.argsort()[::-1][: options.texts]
    model = load_model(path, options.dtype, options.device)

    texts = [torch.from_numpy(samples[int(i)]) for i in longest]
    count = f"{len(texts)} text{'s' if len(texts) > 1 else ''}"
    print(f"{count} of {config.data}, {sum(map(len, texts)):,} tokens; {method.nominal} tokens per step")
    recall = shared_recall(model, method, texts, options.rows)
    anchors = recall.anchors(options.count)
    for count in sorted({options.count, *(-(-most // part) for part in (1, 2, 4, 8))}, reverse=True):
        with suppress(SeergateError):  # few anchors cannot serve layers with different numbers of KV heads
            plan = recall.anchors(count)
            print(f"{count:4} anchors  recall {recall.mean(plan):.4f}  {'+'.join(map(str, plan))}")
    figures = {"anchor_recall": recall.mean(anchors), "own_recall": recall.mean(recall.layers)}
    figures = {name: value for name, value in figures.items() if math.isfinite(value)}  # not if a layer has no gate
    record = {**figures, "recall_measured_on": f"{config.data}, {recall.rows} rows at {method.nominal}"}
    bank.with_anchors(anchors, **record).save_pretrained(out)
    print(f"written: {out} (anchors {', '.join(map(str, anchors))}; other layers reuse their selections)")


ANCHORS = Command(ANCHORS_HELP, _anchors_arguments, _anchors)

DENSE_LAYERS_HELP = (
    "find the layers that lose facts when they are sparse, and write gates that keep them dense",
    "Each problem's prompt is read once. The right answer is then decoded from the same cache, each time with\n"
    "another layer dense, and compared with dense attention. The layer that helps most stays dense, and the search\n"
    "goes on. The adapter has all gates and names the dense layers, which then apply wherever it is loaded;\n"
    "dense_layers=() makes all layers sparse again.",
    [
        "seergate dense-layers --model ./SmolLM2 --gates checkpoints/smollm2-135m --count 2 --budget 512",
        "seergate dense-layers --model ./Qwen3-8B --gates org/Qwen3-8B-gates --count 2"
        " --task needle:keys=4:length=16384:problems=16:chat=true",
    ],
)
TASK = "needle:keys=4:length=3584:problems=24:seed=1"
TINY_TASK = "variable_tracking:length=2048:problems=8:seed=1"
"""For the tiny reasoner, to which a needle's number is one token."""


def _dense_layers_arguments(parser: argparse.ArgumentParser) -> None:
    _shared_arguments(parser, "dense layers", "dense-layers")
    parser.add_argument("--task", help=f"task whose answers are compared [{TASK}; tiny: {TINY_TASK}]")


def _dense_layers(options: argparse.Namespace) -> None:
    """Measure the KL with different layers dense, choose the dense layers, and write the gates."""
    from seergate.eval.calibration.dense_layers import answered, find_dense_layers
    from seergate.eval.run_plan import check_model
    from seergate.eval.tasks.registry import make_task
    from seergate.pretrained import load_tokenizer

    named = options.task or (TINY_TASK if is_tiny(options.model) else TASK)
    task = make_task(named)
    bank, method, path, out = _prepared(options, "dense-layers")
    check_model(path, [method], [bank])
    check_count("count", options.count, 1, len(bank.geometry.layers))
    texts = answered(load_tokenizer(path), task)
    model = load_model(path, options.dtype, options.device)

    def report(plan: tuple[int, ...], kl: Tensor) -> None:
        layers = "+".join(map(str, plan)) or "none"
        print(f"dense layers {layers:>10}  KL {float(kl.mean()):.4f}")

    print(f"{len(texts)} answers of {task.name}; KL from dense attention in nats per token, budget {method.nominal}")
    layers = find_dense_layers(model, method, texts, options.count, report)
    record = {**bank.training_record, "dense_layers_found_on": f"{named}, at {method.nominal}"}
    defaults = {**bank.decode_defaults, "dense_layers": list(layers)}
    bank.derived(decode_defaults=defaults, training=record, results=()).save_pretrained(out)
    print(f"written: {out} (dense layers {', '.join(map(str, layers))})")


DENSE_LAYERS = Command(DENSE_LAYERS_HELP, _dense_layers_arguments, _dense_layers)
