"""Cost of training several variants from one forward pass: processor time of a pack, relative to one variant.

    python benchmarks/variants.py --threads 1

Measures targets, losses and gradients of all gates on one sequence, with random weights, without optimizers and files.
The numbers of variants take turns, and the minimum of each counts. Processor time is least affected by other programs.
First, gates trained together must get exactly the loss and the gradients that they get alone.
"""

from __future__ import annotations

import sys
import time

import torch
from common import arguments, described, parsed, random_model, save

from seergate import GateBank, GateConfig
from seergate.distill.losses.distill_loss import DistillSpec
from seergate.distill.losses.teacher_forward import distill_steps


def main() -> None:
    """Check, measure, print and save."""
    parser = arguments(__doc__)
    parser.add_argument("--length", type=int, default=4096, help="tokens of the pack")
    parser.add_argument("--variants", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=2)
    for name, size in {"hidden-size": 1024, "layers": 2, "heads": 16, "kv-heads": 8, "head-dim": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="of the model [Qwen3-0.6B's; two layers]")
    options = parsed(parser)
    shape = {name: getattr(options, name) for name in ("hidden_size", "layers", "heads", "kv_heads", "head_dim")}
    model, ids = random_model(**shape), torch.arange(options.length)[None] * 37 % 1024
    banks = []
    for seed in range(max(options.variants)):
        torch.manual_seed(seed)
        banks.append(GateBank.for_model(model, GateConfig()))

    def losses(some: list[GateBank]) -> list[float]:
        outcomes = distill_steps([DistillSpec(bank) for bank in some], model, ids)
        for outcome in outcomes:
            outcome.loss.backward()
        return [float(outcome.loss.detach()) for outcome in outcomes]

    def gradient(bank: GateBank) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in bank.parameters() if p.grad is not None])

    together, last = losses(banks)[-1], gradient(banks[-1])
    banks[-1].zero_grad()
    if losses(banks[-1:]) != [together] or not torch.equal(gradient(banks[-1]), last):
        sys.exit("gates that learn together do not get what they get alone: nothing is measured")
    seconds: dict[int, list[float]] = {number: [] for number in sorted({1, *options.variants})}
    for _ in range(options.rounds):
        for number, times in seconds.items():
            begun = time.process_time()
            losses(banks[:number])
            times.append(time.process_time() - begun)
    one = min(seconds[1])
    rows = [{"variants": n, "seconds": round(min(x), 6), "ratio": round(min(x) / one, 2)} for n, x in seconds.items()]
    print(*rows, sep="\n")
    name = f"variants-cpu-float32-{options.threads}t"
    print("saved", save(name, described(options), rows, options.output))


if __name__ == "__main__":
    main()
