"""``seergate anchors``: finds the layers that can choose for others, and keeps their gates."""

from __future__ import annotations

import argparse
from pathlib import Path

from seergate.checks import check_counts
from seergate.cli.arguments import model_args, run_args

HELP = (
    "find the layers that can choose blocks for others, and write an adapter with their gates alone",
    "The model reads texts, densely. The blocks that each layer's gate would choose there are held against the\n"
    "attention of every layer above it: how much of it would they recall? Of all plans with so many anchors the one\n"
    "with the highest mean recall is taken. The adapter that is written names the anchors, so that it decodes with\n"
    "them wherever it is loaded: other layers read what the nearest anchor below them chose.",
    [
        "seergate anchors --model tiny-reasoner --count 2 --budget 128",
        "seergate anchors --model ./Qwen3-8B --gates org/Qwen3-8B-gates --count 9 --data texts.jsonl",
    ],
)

ROWS = 200
"""Rows of the data of which the longest texts are taken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    model_args(parser)
    parser.add_argument("--count", type=int, required=True, metavar="N", help="number of anchors")
    parser.add_argument("--budget", type=int, metavar="N", help="token budget of the choices [what the gates ask for]")
    parser.add_argument("--data", metavar="FILE", help="texts, as `seergate train` takes them [the preset's]")
    parser.add_argument("--texts", type=int, default=8, metavar="N", help="the longest of 200 rows [%(default)s]")
    parser.add_argument("--max-length", type=int, default=4096, metavar="N", help="tokens of a text [%(default)s]")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="tokens of each that choose [%(default)s]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="[runs/MODEL-anchors-N]")
    run_args(parser)


def run(options: argparse.Namespace) -> int:
    """Load, measure, choose, write."""
    from seergate.cli.models import bank_or_refuse, load_model, model_path, new_directory
    from seergate.distill.config import load_train_config
    from seergate.distill.data import prepare_data
    from seergate.hf.anchors import shared_recall
    from seergate.hf.loading import load_tokenizer
    from seergate.methods import Gate

    check_counts(options, count=1, texts=1, rows=1, max_length=1)
    bank = bank_or_refuse(options.model, options.gates)
    out = new_directory(options.out, f"{Path(options.model).name}-anchors-{options.count}")
    method = Gate.with_gates(bank, **({} if options.budget is None else {"token_budget": options.budget}))
    path = model_path(options.model)
    given = {"max_length": options.max_length, "block_size": bank.config.block_size, "data_limit": ROWS}
    config = load_train_config(options.model, given | ({"data": options.data} if options.data else {}))
    samples = prepare_data(config, load_tokenizer(path), one_sample=True).samples
    longest = samples.lengths.argsort()[::-1][: options.texts]
    model = load_model(path, options.dtype, options.device)

    import torch

    texts = [torch.from_numpy(samples[int(i)]) for i in longest]
    print(f"{len(texts)} texts of {config.data}, {sum(map(len, texts)):,} tokens; {method.nominal} tokens per step")
    found = shared_recall(model, method, texts, options.rows)
    anchors = found.anchors(options.count)
    for count in sorted({options.count, *(-(-len(found.layers) // part) for part in (1, 2, 4, 8))}, reverse=True):
        plan = found.anchors(count)
        print(f"{count:4} anchors  recall {found.mean(plan):.4f}  {'+'.join(map(str, plan))}")
    figures = {"anchor_recall": found.mean(anchors), "own_recall": found.mean(found.layers)}
    made = {**figures, "recall_measured_on": f"{config.data}, {found.rows} rows at {method.nominal}"}
    bank.with_anchors(anchors, **made).save_pretrained(out)
    print(f"written: {out} (anchors {', '.join(map(str, anchors))}; other layers read what they choose)")
    return 0
