"""A frozen model divided among two processes: the same run, to the last bit, and each holds half of the weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Qwen3Config, Qwen3ForCausalLM

from seergate.distill import TrainConfig, load_train_config, run_distillation
from seergate.distill.plan import make_plan
from seergate.errors import SeergateError
from tests.distill.pairs import ROOT, free_port, pair
from tests.distill.test_processes import state
from tests.distill.test_trainer import assert_identical, config, model_dir, weights  # noqa: F401 (fixtures)

RUNS = """
import os, sys
from seergate.cli.train import main
for port, file in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    os.environ["MASTER_PORT"] = port
    assert main(["--config", file]) == 0
sys.stdout.flush()
os._exit(0)
"""

LOADS = """
import gc, json, os, re, sys
from dataclasses import replace
from seergate.cli.train import resolve
from seergate.distill.base_model import load_frozen
from seergate.distill.distributed import join_world
from transformers.utils import logging

logging.disable_progress_bar()
config, world = resolve({"config": sys.argv[1]}), join_world(deepspeed=False)
found = {}

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

for shard in (True, False):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = memory("VmRSS")
    model = load_frozen(config.model, replace(config, shard_base=shard), world)
    tensors = [getattr(x, "_local_tensor", x) for x in model.parameters()]
    found[str(shard)] = {
        "held": sum(x.nbytes for x in tensors),
        "peak": memory("VmHWM") - before,
    }
    del model, tensors
    gc.collect()
print(json.dumps(found), flush=True)
world.leave()
os._exit(0)
"""


@pytest.fixture
def reasoner(tmp_path: Path) -> TrainConfig:
    """A short run on the tiny reasoner. Of the one pack that is held out, the second process has nothing."""
    options = {
        "output_dir": str(tmp_path / "alone"),
        "token_cache": str(tmp_path / "tokens"),
        "data_limit": 60,
        "chain_sum_variables": (8, 14),
        "max_length": 640,
        "max_steps": 2,
        "eval_steps": 1,
        "eval_packs": 1,
    }
    return load_train_config("tiny-reasoner", options)


def logged(run: Path, name: str) -> list[float]:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.value for event in events.Scalars(name)]


def assert_same_run(one: Path, other: Path) -> None:
    """Gates, moments (and so the gradients), losses and evaluations are equal bit for bit."""
    for part in (".", "best"):
        assert_identical(weights(one / part), weights(other / part))
    assert_identical(*(state(run) for run in (one, other)))
    for name in ("loss", "grad_norm", "held_out/kl"):
        assert logged(one, name) == logged(other, name), name


def train(runs: list[TrainConfig], tmp_path: Path) -> str:
    """Both processes do one run after the other, each on a port of its own; returns what the first one prints."""
    for run in runs:
        run.save(tmp_path / f"{run.run_dir.name}.yaml")
    ports = [(str(free_port()), str(tmp_path / f"{run.run_dir.name}.yaml")) for run in runs]
    done = pair(["-c", RUNS, *(text for both in ports for text in both)], seconds=280)
    assert [one.returncode for one in done] == [0, 0], done
    return done[0].stdout


def test_a_divided_model_trains_the_same_gates_bit_for_bit(reasoner: TrainConfig, tmp_path: Path) -> None:
    """Two packs a step, which two processes add up in any order alike; then one, of which the second has nothing."""
    runs = [replace(reasoner, packs_per_step=packs) for packs in (2, 1)]
    alone = [run_distillation(replace(run, output_dir=f"{run.output_dir}-{run.packs_per_step}")) for run in runs]
    divided = [
        replace(run, shard_base=True, output_dir=str(tmp_path / f"divided-{run.packs_per_step}")) for run in runs
    ]
    assert "the frozen model is divided among 2 processes" in train(divided, tmp_path)
    for run, other in zip(divided, alone, strict=True):
        assert_same_run(run.run_dir, other)


@pytest.mark.soak
@pytest.mark.timeout(900)  # DeepSpeed may compile first
def test_a_divided_model_under_zero_2(reasoner: TrainConfig, tmp_path: Path) -> None:
    """Three packs a step: the second process accompanies the third."""
    pytest.importorskip("deepspeed")
    zero = replace(reasoner, packs_per_step=3, deepspeed=str(ROOT / "ds_configs/zero2.json"))
    runs = [replace(zero, shard_base=shard, output_dir=str(tmp_path / f"zero-{shard}")) for shard in (False, True)]
    for run in runs:  # DeepSpeed starts once in a process
        train([run], tmp_path)
    assert_same_run(runs[0].run_dir, runs[1].run_dir)


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's files")
def test_each_process_reads_and_holds_its_half(config: TrainConfig, tmp_path: Path) -> None:  # noqa: F811
    """150 MB of weights in float32; before that, neither has anything of the size."""
    shape = Qwen3Config(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=8192, dtype="bfloat16",
    )  # fmt: skip
    Qwen3ForCausalLM._from_config(shape, dtype="bfloat16").save_pretrained(tmp_path / "model")
    run = replace(config, model=str(tmp_path / "model"), dtype="float32", shard_base=True)
    plan = make_plan(run, processes=2, device="cpu", measure=False).memory
    run.save(tmp_path / "run.yaml")
    for done in pair(["-c", LOADS, str(tmp_path / "run.yaml")]):
        assert done.returncode == 0, done
        found = json.loads(done.stdout.splitlines()[-1])
        divided, whole = found["True"], found["False"]
        assert divided["held"] == pytest.approx(plan.base, rel=1e-3)
        assert whole["held"] == pytest.approx(plan.base + plan.base_elsewhere, rel=1e-3)
        assert divided["peak"] < 0.75 * whole["peak"], found


def test_who_cannot_divide_is_told(config: TrainConfig) -> None:  # noqa: F811
    with pytest.raises(SeergateError, match="shard_base is true; it needs several processes"):
        run_distillation(replace(config, shard_base=True, data="/does/not/exist.jsonl"))
    with pytest.raises(ValueError, match="shard_base is true; it must be left out with base_memory_gb or quantize"):
        replace(config, shard_base=True, quantize="bnb-4bit")


def test_the_plan_divides_what_does_not_fit_whole() -> None:
    run = load_train_config("qwen3-32b")
    alone, eight = (make_plan(run, memory_gb=48, processes=n, measure=False) for n in (1, 8))
    assert not alone.fits and alone.memory.gathered == 0 and not alone.config.shard_base
    assert eight.fits and eight.config.shard_base
    assert eight.memory.base == pytest.approx(alone.memory.base / 8, rel=1e-6)
    assert eight.memory.base + eight.memory.base_elsewhere == alone.memory.base
    assert "frozen model (bfloat16, without LM head), 1/8" in eight.text() and "processes: 8" in eight.text()
    roomy = make_plan(run, memory_gb=96, processes=8, measure=False)
    assert roomy.fits and not roomy.config.shard_base
    whole = make_plan(replace(run, shard_base=False), memory_gb=48, processes=8, measure=False)
    assert not whole.fits and whole.memory.base == alone.memory.base
