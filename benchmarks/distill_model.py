"""Memory and time of a training step with one and two layers of Qwen3-8B's geometry, and the memory as planned.

    python benchmarks/distill_model.py
    python benchmarks/distill_model.py --lengths 8192 32768 --sample-tokens 8192    # less attention, so much faster

The model has real widths, random weights and a tiny vocabulary; by default one sequence fills the pack, the slowest
case. Each cell of the table runs in its own process. It loads the model from a directory like a training run and takes
a step of a short pack, so that weights, libraries and optimizer state are in memory; then it measures one step. Ways:

* `seergate`: `distill_step`, `PlainEngine.accumulate` and `.update`, which `seergate train` repeats;
* `frozen`: the forward pass of the model by transformers, without gates; the rest is the cost of distillation;
* `materialised`: the published data flow in the same model. In each layer, attention pooled to blocks, targets, logits
  and their log-softmax are whole tensors, and autograd keeps its saved tensors until all layers have run.

Memory is the resident memory of the process (Linux only), so it includes libraries' buffers and memory that the
allocator retains. ``peak`` is the peak of the step above the memory before it; ``lesson`` is the peak of targets, loss
and gradients of one gate, above the memory before them; ``process`` is the peak of the process. The last rows compare:
the memory of a second layer, the memory of distillation above the frozen forward pass, and the prediction of `seergate
plan` from the configuration alone. ``others_cpu`` is the number of cores that other programs used meanwhile: in a row
that is ``loaded``, times are too long but memory is right.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from common import CPU, TOLERANCE, arguments, described, in_memory, parsed, save, shown
from distill import materialised_loss, prove
from torch import Tensor

from seergate import GateBank
from seergate.distill import TrainConfig, load_train_config
from seergate.distill.base_model import load_frozen
from seergate.distill.distributed import DistributedState
from seergate.distill.engines import PlainEngine
from seergate.distill.estimate import make_plan
from seergate.distill.losses import block_loss, teacher_forward
from seergate.distill.memory import WORKING_BYTES
from seergate.models import families
from seergate.models.packed_forward import TeacherCall
from seergate.ops import GateKLStats
from seergate.paths import shipped

WAYS = ("seergate", "frozen", "materialised")
VOCABULARY = 256
SHORT = 256
"""Tokens of the warm-up pack."""
TARGET_GB = 0.6
"""Limit of the extra memory per layer at 32k tokens and blocks of 64."""
BUSY = 0.1
"""A row counts as loaded if other programs use more cores than this."""
GB = 1e9


class Resident:
    """The resident memory of the process as Linux counts it, and its peak since the last `restart`, in bytes."""

    def __init__(self) -> None:
        self.most = 0

    def peak(self) -> int:
        """The peak since the last `restart`; also updates ``most``, the peak over all restarts."""
        peak = in_memory("VmHWM")
        self.most = max(self.most, peak)
        return peak

    def restart(self) -> int:
        """Reset the peak, and return the current bytes."""
        self.peak()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        return in_memory("VmRSS")


class Materialising(block_loss.BlockLoss):
    """The loss as in the published code: no gradients in the forward pass, and one autograd graph over all layers."""

    def learn(self, call: TeacherCall, lse_TH: Tensor) -> None:
        gate = self.bank.gate(call.layer)
        assert call.q_pre_BHSD is not None and call.k_pre_BKSD is not None
        query, key = (x[0].transpose(0, 1) for x in (call.query_BHSD, call.key_BKSD))
        begin = int(len(query) * self.spec.row_start)
        with torch.enable_grad():
            positions, _, entries, pooled = self.indices(query.device)
            queries = gate.queries(call.q_pre_BHSD, positions)[0].transpose(0, 1)
            keys = gate.keys(gate.pool(call.k_pre_BKSD[:, :, pooled]), entries)[0].transpose(0, 1)
            self.losses.append(materialised_loss(query, key, queries, keys, self.bank.config.block_size, begin))
        heads = key.shape[1]
        nothing = torch.zeros(len(self.spec.recall_budgets), heads)  # the published code does not report it
        self.stats.append(GateKLStats(torch.zeros(heads), torch.tensor(len(query) - begin), nothing))


@contextmanager
def lessons_watched(resident: Resident, sizes: list[int]) -> Iterator[None]:
    """Append to ``sizes`` the peak bytes of each layer's `learn`, above the memory when it begins."""
    kind = block_loss.BlockLoss
    teach = kind.learn

    def watched(self: Any, *args: Any) -> None:
        before = resident.restart()
        teach(self, *args)
        sizes.append(resident.peak() - before)
        resident.restart()

    kind.learn = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.learn = teach  # type: ignore[method-assign]


def cores_used() -> tuple[float, float]:
    """Seconds of processor time so far, of all programs and of this one."""
    every, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = every.user + every.nice + every.system + every.irq + every.softirq + every.steal
    return busy, own.user + own.system


def write_base(folder: Path, layers: int, dtype: str, width: int) -> None:
    """Save a model with random weights: Qwen3-8B with fewer layers and a smaller vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = json.loads((shipped("configs") / "architectures" / "qwen3-8b.json").read_text(encoding="utf-8"))
    shape |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "dtype": dtype}
    config = AutoConfig.for_model(**shape | {"hidden_size": width, "intermediate_size": 3 * width})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def make_step(run: TrainConfig, way: str) -> Callable[[torch.Tensor, torch.Tensor], float | None]:
    """Load the model, and return a function that takes a training step on a pack, given its ids and borders, and
    returns the loss (``None`` without gates).
    """
    world = DistributedState(0, 1, 0, CPU)
    model = load_frozen(run.model, run, world)
    if way == "frozen":

        def forward(ids: torch.Tensor, borders: torch.Tensor) -> None:
            with torch.no_grad():  # one sequence, even if the pack has several samples
                families.decoder_of(model)(input_ids=ids, use_cache=False)

        return forward
    torch.manual_seed(1)
    bank = GateBank.for_model(model, run.gates(families.head_dim_of(model)))
    if way == "materialised":
        bank = bank.to(getattr(torch, run.dtype))  # as published
        block_loss.BlockLoss = Materialising  # type: ignore[misc]  # in this process only
    engine = PlainEngine(bank, run, world)

    def step(ids: torch.Tensor, borders: torch.Tensor) -> float:
        out = teacher_forward.distill_step(bank, model, ids, borders, **run.loss_options)
        engine.accumulate(out.loss)
        engine.update(lr=0.0)  # a whole step, but gates stay equal in all cells
        return float(out.loss)

    return step


def measure(way: str, layers: int, length: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell: a step, the memory of the process and, for ``seergate``, the plan's prediction."""
    torch.set_num_threads(options.threads)
    shape = {"max_length": length, "block_size": options.block_size, "dtype": options.dtype}
    run = load_train_config(str(folder), {"recipe": "paper", "packs_per_step": 1, **shape})
    plan = make_plan(run, device="cpu")  # before weights are loaded, as for a user
    step = make_step(run, way)
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (1, length), generator=random)
    borders = torch.tensor([*range(0, length, options.sample_tokens or length), length], dtype=torch.int32)
    step(ids[:, :SHORT], torch.tensor([0, SHORT], dtype=torch.int32))
    resident, lessons = Resident(), []
    before = resident.restart()
    resident.most = 0
    (busy, own), started = cores_used(), time.perf_counter()
    with lessons_watched(resident, lessons):
        loss = step(ids, borders)
    seconds = time.perf_counter() - started
    busy_after, own_after = cores_used()
    resident.peak()
    others = max(0.0, (busy_after - busy - (own_after - own)) / seconds)
    row: dict[str, Any] = {"way": way, "layers": layers, "length": length}
    row |= {"sample_tokens": options.sample_tokens or length}
    row |= {"seconds": round(seconds, 2), "others_cpu": round(others, 2), "loaded": others > BUSY}
    row |= {"peak_gb": round((resident.most - before) / GB, 3), "process_gb": round(resident.most / GB, 3)}
    if loss is not None:
        row |= {"loss": loss, "lesson_gb": round(max(lessons) / GB, 3)}
    if way == "seergate":
        planned_peak = plan.memory.activations + WORKING_BYTES
        row |= {
            "planned_peak_gb": round(planned_peak / GB, 3),
            "planned_process_gb": round(plan.total / GB, 3),
            "peak_ratio": round(planned_peak / (resident.most - before), 3),
            "process_ratio": round(plan.total / resident.most, 3),
        }
    return row


def compare(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each kind of pack, the memory that distillation adds per layer, and the ratios to the published data flow,
    which must have the same loss.
    """
    cells = {(row["length"], row["sample_tokens"], row["layers"], row["way"]): row for row in rows}
    table = []
    for length, sample in sorted({key[:2] for key in cells}):
        for layers in (1, 2):
            ours, frozen, theirs = (cells.get((length, sample, layers, way)) for way in WAYS)
            if ours is None:
                continue
            out: dict[str, Any] = {"length": length, "sample_tokens": sample, "layers": layers}
            out["lesson_gb"] = ours["lesson_gb"]
            for way in WAYS:
                one, two = (cells.get((length, sample, n, way)) for n in (1, 2))
                if layers == 2 and one and two:
                    out[f"{way}_second_layer_gb"] = round(two["peak_gb"] - one["peak_gb"], 3)
            if frozen:
                out["above_frozen_gb"] = round(ours["peak_gb"] - frozen["peak_gb"], 3)
            if theirs:
                error = abs(theirs["loss"] - ours["loss"]) / ours["loss"]
                if not error < TOLERANCE[getattr(torch, options.dtype)]:
                    sys.exit(f"at {length} tokens the two losses differ by {error:.1e}: nothing is compared")
                out["materialised_loss_error"] = error
                out["peak_ratio_to_materialised"] = round(ours["peak_gb"] / theirs["peak_gb"], 3)
                out["lesson_ratio_to_materialised"] = round(ours["lesson_gb"] / theirs["lesson_gb"], 3)
                out["time_ratio_to_materialised"] = round(ours["seconds"] / theirs["seconds"], 3)
                out["times_loaded"] = ours["loaded"] or theirs["loaded"]
            if length == 32768 and options.block_size == 64:
                extra = [out[name] for name in ("lesson_gb", "seergate_second_layer_gb") if name in out]
                out |= {"target_gb": TARGET_GB, "within_target": max(extra) <= TARGET_GB}
            table.append(out)
    return table


def command_line() -> argparse.Namespace:
    """Parse the options."""
    parser = arguments(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens of a pack")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--two-layers-up-to", type=int, default=32768, help="longest pack through two layers too")
    parser.add_argument("--frozen-up-to", type=int, default=16384, help="longest pack without gates")
    parser.add_argument("--materialised-up-to", type=int, default=8192, help="longest pack of the published data flow")
    parser.add_argument("--sample-tokens", type=int, help="tokens of each sequence in a pack [the whole pack]")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=4096, help="of the frozen model [%(default)s]")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the frozen model")
    parser.add_argument("--layers", type=int, choices=(1, 2), nargs="+", default=[1, 2])
    parser.add_argument("--add", action="store_true", help="keep the cells of an earlier call on the same machine")
    options = parsed(parser)
    if min(options.lengths) < max(SHORT, 2 * options.block_size):
        parser.error(f"--lengths has {min(options.lengths)}; each must be at least {SHORT} and two blocks")
    if options.sample_tokens and "materialised" in options.ways and options.materialised_up_to > options.sample_tokens:
        parser.error("--materialised-up-to is above --sample-tokens; that way takes one sequence per pack")
    if not Path("/proc/self/clear_refs").exists():
        parser.error("this machine has no /proc/self/clear_refs; memory is measured by it, on Linux")
    return options


def main() -> None:
    """Check, measure, compare, print and save."""
    options = command_line()
    torch.manual_seed(0)
    shape = {"group": 4, "head_dim": 128, "gate_dim": 128}
    prove(options.block_size, SimpleNamespace(device="cpu", dtype=getattr(torch, options.dtype), **shape))
    print("proven", flush=True)
    longest = {"frozen": options.frozen_up_to, "materialised": options.materialised_up_to}
    settings = described(options)
    name, rows = f"distill_model-cpu-{options.dtype}-{options.threads}t", []
    if options.add:
        table = json.loads((options.output / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        rows = [row for row in table if "way" in row]
    with tempfile.TemporaryDirectory() as scratch:
        # Each cell has a new process, so memory of earlier cells does not count.
        workers: dict[str, Any] = {"mp_context": multiprocessing.get_context("spawn"), "max_tasks_per_child": 1}
        with ProcessPoolExecutor(1, **workers) as pool:
            for layers in options.layers:
                pool.submit(
                    write_base, Path(scratch) / str(layers), layers, options.dtype, options.hidden_size
                ).result()
            for length in options.lengths:
                for way in (way for way in WAYS if way in options.ways and length <= longest.get(way, length)):
                    for layers in (n for n in options.layers if n == 1 or length <= options.two_layers_up_to):
                        folder = Path(scratch) / str(layers)
                        rows.append(pool.submit(measure, way, layers, length, folder, options).result())
                        print(shown(rows[-1]), flush=True)
                        settings["loaded"] = any(row["loaded"] for row in rows)
                        path = save(name, settings, rows + compare(rows, options), options.output)
    print(*map(shown, compare(rows, options)), sep="\n")
    print("saved", path)


if __name__ == "__main__":
    main()
