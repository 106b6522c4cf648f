"""``seergate dense-layers``: finds the layers that lose facts when they read sparsely."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from seergate.checks import check_counts
from seergate.cli.arguments import model_args, run_args
from seergate.cli.models import bank_or_refuse, new_directory

if TYPE_CHECKING:
    from torch import Tensor

HELP = (
    "find the layers that lose facts when they are sparse, and write gates that keep them dense",
    "Each problem's prompt is read once. Its right answer is then fed to the model from the same cache, with one\n"
    "layer after the other dense, and compared with dense attention. The layer that comes nearest is kept dense, and\n"
    "so on. The adapter that is written has all gates and names the layers, so that it decodes with them wherever it\n"
    "is loaded; dense_layers=() makes all layers sparse again.",
    [
        "seergate dense-layers --model ./SmolLM2 --gates checkpoints/smollm2-135m --count 2 --budget 512",
        "seergate dense-layers --model ./Qwen3-8B --gates org/Qwen3-8B-gates --count 2"
        " --task needle:keys=4:length=16384:problems=16:chat=true",
    ],
)
TASK = "needle:keys=4:length=3584:problems=24:seed=1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    model_args(parser)
    parser.add_argument("--count", type=int, required=True, metavar="N", help="number of dense layers")
    parser.add_argument("--budget", type=int, metavar="N", help="token budget [what the gates ask for]")
    parser.add_argument("--task", default=TASK, help="whose answers are compared [%(default)s]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="[runs/MODEL-dense-layers-N]")
    run_args(parser)


def run(options: argparse.Namespace) -> int:
    """Load, measure, choose, write."""
    from seergate.cli.models import load_model, model_path
    from seergate.eval.dense_layers import answered, find_dense_layers
    from seergate.eval.tasks import make_task
    from seergate.hf.loading import load_tokenizer
    from seergate.methods import Gate

    check_counts(options, count=1)
    bank, task = bank_or_refuse(options.model, options.gates), make_task(options.task)
    out = new_directory(options.out, f"{Path(options.model).name}-dense-layers-{options.count}")
    method = Gate.with_gates(bank, **({} if options.budget is None else {"token_budget": options.budget}))
    path = model_path(options.model)
    texts = answered(load_tokenizer(path), task)
    model = load_model(path, options.dtype, options.device)

    def report(plan: tuple[int, ...], kl: Tensor) -> None:
        named = "+".join(map(str, plan)) or "none"
        print(f"dense layers {named:>10}  KL {float(kl.mean()):.4f}", flush=True)

    print(f"{len(texts)} answers of {task.name}; KL from dense attention at {method.nominal} tokens", flush=True)
    layers = find_dense_layers(model, method, texts, options.count, report)
    made = {**bank.training_record, "dense_layers_found_on": f"{options.task}, at {method.nominal}"}
    defaults = {**bank.decode_defaults, "dense_layers": list(layers)}
    bank.derived(decode_defaults=defaults, training=made, results=()).save_pretrained(out)
    print(f"written: {out} (dense layers {', '.join(map(str, layers))})")
    return 0
