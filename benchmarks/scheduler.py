"""Throughput of continuous refill against static batches, on answers whose lengths have a long tail.

    python benchmarks/scheduler.py --threads 1

With the defaults it takes about two minutes on a quiet core; ``--seconds`` bounds it.

All decode the same samples with the same model, at the same number of rows, so with the same memory for keys and
values. ``static`` is what harnesses do: `model.generate` on left-padded batches, in the order of the prompts, each
waiting for its longest answer. ``static_stock`` is the same on the cache of transformers, which copies itself at every
token; what the schedule gains is the ratio to ``static``, which decodes with our cache as ``refill`` does. Lengths are
drawn from a log-normal distribution and forced by giving each sample a limit of its own, so that no trained model is
needed; every token is really computed.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from common import RESULTS, save
from small_model import VOCABULARY, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, StoppingCriteria, StoppingCriteriaList

from seergate.eval.engine import Engine, Generation, Limit, Request
from seergate.eval.sampling import Sampling
from seergate.hf.attach import attached


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words ``t0`` .. are the tokens."""
    raw = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="t0")


class LimitedEngine(Engine):
    """An `Engine` whose samples end at lengths that are given: the request's key."""

    def _next(self, source):  # type: ignore[no-untyped-def]
        row = super()._next(source)
        if row is not None:
            row.limit = row.request.key[1]
        return row


class AllEnded(StoppingCriteria):
    """Each row of a static batch ends at its own length."""

    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        self.prompt, self.lengths = prompt, torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """Which rows have ended."""
        return (input_ids.shape[1] - self.prompt >= self.lengths).to(input_ids.device)


def run_refill(model: Qwen3ForCausalLM, requests: list[Request], rows: int, method: str) -> tuple[float, int]:
    """Seconds and tokens of the engine."""
    done: list[Generation] = []
    with attached(model, method) as handle:
        engine = LimitedEngine(
            model,
            make_tokenizer(),
            batch_size=rows,
            limit=Limit(10**6),
            sampling=Sampling(),
            on_finished=done.append,
            handle=handle,
        )
        engine.ends = set()
        began = time.perf_counter()
        engine.run(requests)
        spent = time.perf_counter() - began
    assert sorted(g.n_tokens for g in done) == sorted(r.key[1] for r in requests)
    return spent, sum(g.n_tokens for g in done)


@torch.inference_mode()
def run_static(model: Qwen3ForCausalLM, requests: list[Request], rows: int, method: str | None) -> tuple[float, int]:
    """Seconds and tokens that were asked for of `generate` on static batches; without a method, on the stock cache."""
    with attached(model, method) if method else nullcontext():
        began = time.perf_counter()
        tokens = answer_in_batches(model, requests, rows)
        return time.perf_counter() - began, tokens


def answer_in_batches(model: Qwen3ForCausalLM, requests: list[Request], rows: int) -> int:
    """Tokens that were asked for."""
    tokenizer, tokens = make_tokenizer(), 0
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        ids = [tokenizer(request.prompt)["input_ids"] for request in batch]
        width, lengths = max(map(len, ids)), [request.key[1] for request in batch]
        model.generate(
            torch.tensor([[0] * (width - len(i)) + i for i in ids]),
            attention_mask=torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in ids]),
            max_new_tokens=max(lengths),
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([AllEnded(width, lengths)]),
        )
        tokens += sum(lengths)
    return tokens


def main() -> None:
    """Parse the command line, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16, help="samples that run together")
    parser.add_argument("--median", type=int, default=100, help="of the lengths")
    parser.add_argument("--sigma", type=float, default=0.9, help="of the lengths' logarithm")
    parser.add_argument("--longest", type=int, default=1000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150, help="no further repeat is begun that would not fit")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record [%(default)s]")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rng, model = random.Random(0), make_model(options.width, options.layers)
    lengths = [
        max(1, min(options.longest, round(options.median * math.exp(rng.gauss(0, options.sigma)))))
        for _ in range(options.samples)
    ]
    requests = [
        Request((i, n), " ".join(f"t{rng.randrange(1, VOCABULARY)}" for _ in range(rng.randrange(20, 60))), i)
        for i, n in enumerate(lengths)
    ]
    rows = []
    runs = {
        "refill": lambda: run_refill(model, requests, options.rows, "dense"),
        "static": lambda: run_static(model, requests, options.rows, "dense"),
        "static_stock": lambda: run_static(model, requests, options.rows, None),
    }
    run_refill(model, requests[:2], options.rows, "dense")  # what happens once is in no time
    run_static(model, requests[:2], options.rows, None)
    best: dict[str, float] = dict.fromkeys(runs, 0.0)
    began = time.perf_counter()
    for repeat in range(options.repeats):  # in turn, so that a busy moment of the machine meets all
        spent = time.perf_counter() - began
        if repeat and spent * (repeat + 1) / repeat > options.seconds:
            break
        for name, run in runs.items():
            seconds, tokens = run()
            speed = round(tokens / seconds, 1)
            best[name] = max(best[name], speed)
            rows.append({"scheduler": name, "seconds": round(seconds, 3), "tokens_per_second": speed})
            print(rows[-1], flush=True)
    for other in ("static", "static_stock"):
        ratio = round(best["refill"] / best[other], 2)
        print(f"refill is {ratio} times as fast as {other} ({best['refill']} against {best[other]} tokens/s)")
        rows.append({"scheduler": f"refill over {other}, the best of each", "speedup": ratio})
    record = {name: value for name, value in vars(options).items() if name != "out"}
    record["mean_length"] = round(sum(lengths) / len(lengths), 1)
    print("saved", save(f"scheduler-{options.threads}t", torch.device("cpu"), record, rows, options.out))


if __name__ == "__main__":
    main()
