"""A training step of a model with Qwen3-8B's geometry, cut to one and to two layers: is it as `seergate plan` says?

    python benchmarks/distill_model.py
    python benchmarks/distill_model.py --lengths 8192 32768 --sample-tokens 8192    # less attention, so much faster

Real widths, random weights, a tiny vocabulary; by default one sequence fills the pack, which is slowest. Each cell of
the table is a process of its own. It loads the model from a directory as a run does and takes one step of a short
pack, so that weights, libraries and the optimizer's state are in memory; then the step that counts, which is
`PlainEngine.accumulate` and `.update`, what `seergate train` repeats.

Memory is what the kernel counts as resident (Linux only), so it holds libraries' buffers and what the allocator does
not give back. ``peak`` is the most of the step above what was held before it; ``process`` is everything. Both, and the
seconds, stand beside what `seergate plan` had predicted from the configuration alone. ``others_cpu`` is how many cores
other programs used meanwhile: times of a row that is ``loaded`` are too long, its memory is right.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import arguments, resident, save
from distill import prove

from seergate import GateBank
from seergate.distill import TrainConfig, load_train_config
from seergate.distill.base_model import gate_config, load_frozen
from seergate.distill.distributed import World
from seergate.distill.engines import DistillModule, PlainEngine
from seergate.distill.packing import PackedBatch
from seergate.distill.plan import WORKING_BYTES, make_plan
from seergate.paths import shipped

VOCABULARY = 256
SHORT = 256
"""Tokens of the pack that comes before the one that is measured."""
BUSY = 0.1
"""Cores used by other programs from which on a row counts as loaded."""
GB = 1e9
CPU = torch.device("cpu")


def cores_used() -> tuple[float, float]:
    """Seconds of processor time so far: of all programs, of this one."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    own = resource.getrusage(resource.RUSAGE_SELF)
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), own.ru_utime + own.ru_stime


def write_base(folder: Path, layers: int, dtype: str) -> None:
    """Save a model of random weights: Qwen3-8B with fewer layers and words."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = json.loads((shipped("configs") / "architectures" / "qwen3-8b.json").read_text())
    config = AutoConfig.for_model(**shape | {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "dtype": dtype})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def make_run(folder: Path, length: int, options: argparse.Namespace) -> TrainConfig:
    """The recipe's run on a model, with one pack per step."""
    values = {"max_length": length, "block_size": options.block_size, "dtype": options.dtype, "packs_per_step": 1}
    return load_train_config(str(folder), values)


def make_engine(run: TrainConfig) -> PlainEngine:
    """Load the model, and make what takes its steps."""
    world = World(0, 1, 0, CPU)
    model = load_frozen(run.model, run, world)
    torch.manual_seed(1)
    bank = GateBank.for_model(model, gate_config(run, model))
    return PlainEngine(DistillModule(bank, model, run), run, world)


def take_step(engine: PlainEngine, pack: PackedBatch) -> float:
    """A whole step; its loss. Nothing is learnt, so that the gates of every cell stay alike."""
    loss = engine.accumulate(pack).loss
    engine.update(lr=0.0)
    return float(loss)


def measure(layers: int, length: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One cell: a step, what the process held, and what the plan says of it."""
    torch.set_num_threads(options.threads)
    run = make_run(folder, length, options)
    plan = make_plan(run, device="cpu", measure=False)  # before the weights, as a user would
    engine = make_engine(run)
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (1, length), generator=random)
    borders = torch.tensor([*range(0, length, options.sample_tokens or length), length], dtype=torch.int32)
    take_step(engine, PackedBatch(ids[:, :SHORT], torch.tensor([0, SHORT], dtype=torch.int32)))
    before = resident(reset_peak=True)
    (busy, own), started = cores_used(), time.perf_counter()
    loss = take_step(engine, PackedBatch(ids, borders))
    seconds = time.perf_counter() - started
    busy_after, own_after = cores_used()
    most = resident()
    others = max(0.0, (busy_after - busy - (own_after - own)) / seconds)
    planned = make_plan(run, device="cpu", sample_tokens=options.sample_tokens).step_seconds
    assert planned is not None
    planned_peak = plan.memory.activations + WORKING_BYTES
    return {
        "layers": layers,
        "length": length,
        "sample_tokens": options.sample_tokens or length,
        "seconds": round(seconds, 2),
        "others_cpu": round(others, 2),
        "loaded": others > BUSY,
        "peak_gb": round((most - before) / GB, 3),
        "process_gb": round(most / GB, 3),
        "loss": loss,
        "planned_peak_gb": round(planned_peak / GB, 3),
        "planned_process_gb": round(plan.total / GB, 3),
        "planned_seconds": round(planned, 2),
        "peak_ratio": round(planned_peak / (most - before), 3),
        "process_ratio": round(plan.total / most, 3),
        "seconds_ratio": round(planned / seconds, 3),
    }


def command_line() -> argparse.Namespace:
    """Options."""
    parser = arguments(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens of a pack")
    parser.add_argument("--two-layers-up-to", type=int, default=32768, help="longest pack through two layers too")
    parser.add_argument("--sample-tokens", type=int, help="tokens of each sequence in a pack [the whole pack]")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the frozen model")
    parser.add_argument("--layers", type=int, choices=(1, 2), nargs="+", default=[1, 2])
    options = parser.parse_args()
    if min(options.lengths) < 2 * options.block_size:
        parser.error(f"--lengths has {min(options.lengths)}; each must be at least two blocks")
    if not Path("/proc/self/clear_refs").exists():
        parser.error("this machine has no /proc/self/clear_refs; memory is measured by it, on Linux")
    return options


def main() -> None:
    """Prove, measure, print, save."""
    options = command_line()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = {"group": 4, "head_dim": 128, "gate_dim": 128}
    prove(options.block_size, SimpleNamespace(device="cpu", dtype=getattr(torch, options.dtype), **shape))
    print("proven", flush=True)
    described = {key: value for key, value in vars(options).items() if key != "output"}
    name, rows = f"distill_model-cpu-{options.dtype}-{options.threads}t", list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        # A process per cell, which begins with nothing in memory.
        workers: dict[str, Any] = {"mp_context": multiprocessing.get_context("spawn"), "max_tasks_per_child": 1}
        with ProcessPoolExecutor(1, **workers) as pool:
            for layers in options.layers:
                pool.submit(write_base, Path(scratch) / str(layers), layers, options.dtype).result()
            for length in options.lengths:
                for layers in (n for n in options.layers if n == 1 or length <= options.two_layers_up_to):
                    rows.append(pool.submit(measure, layers, length, Path(scratch) / str(layers), options).result())
                    print("  ".join(f"{field} {value}" for field, value in rows[-1].items()), flush=True)
                    path = save(name, CPU, described, rows, options.output)
    print("saved", path)


if __name__ == "__main__":
    main()
