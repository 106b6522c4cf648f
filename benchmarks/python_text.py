"""Every method on natural text: how near dense attention it comes on modules that its model was not trained on.

    python benchmarks/python_text.py

The model of `checkpoints/python-text` reads a piece of a held-out module of Python's standard library as its prompt,
and is then given the tokens that follow one by one, under each method. Compared with dense attention are its
predictions: KL, perplexity, and how often the most probable token is the same. The first sixteen do not count: until
then some methods have dropped nothing. Nothing is generated, so errors do not build up.

1. `budget`: each method at each token budget.
2. `bytes`: each method with the budget at which it reads a given share of the bytes that dense attention reads.
3. `attention`: where dense attention falls, in this model and in the tiny reasoner: how much of it as many tokens get
   as a budget has: the first four and the newest; those that the sixteen tokens before attended to most, and what came
   since; those that get most. And `look_ups`: how often a head gives more than half to one token that is neither
   among the first four nor among the newest.

``kl_minus_gate`` is the paired difference from the gate at the same budget or share, with its 95 % interval over
modules.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import arguments, save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.chain_sum import make_problems
from seergate.cli.models import load_gates, load_model, model_path
from seergate.eval.forced import SETTLING, Forced, pieces
from seergate.eval.recurrence import query_centres
from seergate.eval.settings import grid
from seergate.hf.loading import load_tokenizer
from seergate.python_text import modules

TEXT, TINY = "checkpoints/python-text", "checkpoints/tiny-reasoner"
METHODS = (
    *("dense", "kv4bit:residual=32", "oracle", "gate", "quest", "resa:block_size=8", "random"),
    *("streaming_llm:interval=16", "h2o:interval=16", "tova:interval=16", "snapkv:window=16:interval=16"),
    *("r_kv:window=8:interval=16", "raas:block_size=8:prompt=evictable", "lazy_eviction:window=16:alpha=0.01"),
    *("tri_attention:centres=auto:interval=16:prompt=evictable", "random_evict:interval=16:prompt=evictable"),
    "rpc:interval=16:window=8:ratio=4",
)
"""Intervals, windows and alpha are smaller than the papers', as the texts are shorter. Budgets bind the prompt too,
but for RPC, which never drops it."""
SINKS, WINDOW = 4, 16
PLACES = ("first_and_newest", "attended_before", "most_attended", "look_ups")
CALIBRATED_ON = 16
"""One module in so many of the training split is what TriAttention's centres are measured on."""


@torch.inference_mode()
def where_attention_falls(
    model: PreTrainedModel, texts: list[tuple[list[int], int]], budgets: list[int]
) -> dict[str, Any]:
    """Part three, of one model: shares of attention, means over layers, query heads and tokens.

    Args:
        model: in eval mode.
        texts: tokens, and from which on they count.
        budgets: how many tokens the shares are of.
    """
    model.set_attn_implementation("eager")
    shares: dict[str, dict[int, list[float]]] = {name: {budget: [] for budget in budgets} for name in PLACES}
    for ids, first in texts:
        key_T = torch.arange(len(ids))
        for (maps,) in model(input_ids=torch.tensor([ids]), use_cache=False, output_attentions=True).attentions:
            for start in range(first, len(ids) - WINDOW + 1, WINDOW):
                p_HQT, before_HT = maps[:, start : start + WINDOW], maps[:, start - WINDOW : start].sum(1)
                before_HT[:, start - WINDOW : start] = torch.inf  # those that looked stay
                age_QT = torch.arange(start, start + WINDOW)[:, None] - key_T
                for budget in budgets:
                    seen_QT = (key_T < SINKS) | (age_QT < budget - SINKS)
                    chosen = before_HT.topk(budget).indices
                    kept_HT = torch.zeros_like(before_HT, dtype=torch.bool).scatter(1, chosen, True) | (key_T >= start)
                    for name, share_HQ in (
                        ("first_and_newest", (p_HQT * seen_QT).sum(-1)),
                        ("attended_before", (p_HQT * kept_HT[:, None]).sum(-1)),
                        ("most_attended", p_HQT.topk(budget).values.sum(-1)),
                        ("look_ups", ((p_HQT * ~seen_QT).amax(-1) > 0.5).float()),
                    ):
                        shares[name][budget].append(share_HQ.mean().item())
    return {name: {budget: sum(of) / len(of) for budget, of in found.items()} for name, found in shares.items()}


def solutions(tokenizer: PreTrainedTokenizerBase, problems: int) -> list[tuple[list[int], int]]:
    """Problems of the tiny reasoner's task with their solutions, as tokens, and where the solutions begin."""
    found = []
    for problem in make_problems(problems, variables=20, seed=0):
        prompt = tokenizer.apply_chat_template(problem.messages[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(problem.messages, tokenize=False)
        found.append((tokenizer(whole)["input_ids"], len(tokenizer(prompt)["input_ids"])))
    return found


def main() -> None:
    """Parse the command line, measure, print, save."""
    parser = arguments(__doc__)
    parser.add_argument("--modules", type=int, default=12, help="that were held out, spread evenly [%(default)s]")
    parser.add_argument("--prompt", type=int, default=384, help="tokens of each that are read at once [%(default)s]")
    parser.add_argument("--steps", type=int, default=48, help="tokens of each that are scored [%(default)s]")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.25], help="of dense attention's bytes")
    parser.add_argument(
        "--problems", type=int, default=16, help="of the tiny reasoner, for its attention [%(default)s]"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = model_path(TEXT)
    model, tokenizer, bank = load_model(path, "float32", "cpu"), load_tokenizer(path), load_gates(f"{TEXT}/gates")
    length = options.prompt + SETTLING + options.steps + 1
    ids = pieces(tokenizer, list(modules(held_out=True).values()), length, options.modules)
    others = pieces(tokenizer, list(modules(held_out=False).values())[::CALIBRATED_ON], options.prompt)
    rows = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        centres = Path(folder) / "centres.safetensors"
        query_centres(model, others.tolist()).save(centres)
        specs = [
            replace(spec, calibrated={"centres": str(centres)}) if spec.uncalibrated else spec
            for spec in grid(list(METHODS), options.budgets, bank.config.block_size)
        ]
        forced = Forced(model, {"gate": bank}, ids, options.prompt)
        equal = (forced.at_bytes(specs, share, bank.config.block_size) for share in options.shares)
        for row in itertools.chain(forced.at_budgets(specs), *equal):
            keep(row)
    tiny, words = load_model(model_path(TINY), device="cpu"), load_tokenizer(model_path(TINY))
    for name, of, texts in (
        (TEXT, model, [(row[:-1], options.prompt) for row in ids.tolist()]),
        (TINY, tiny, solutions(words, options.problems)),
    ):
        keep({"part": "attention", "model": Path(name).name, **where_attention_falls(of, texts, options.budgets)})
    described = {k: v for k, v in vars(options).items() if k != "output"} | {"modules": len(ids), "methods": METHODS}
    print("saved to", save("python_text", torch.device("cpu"), described, rows, options.output))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
