"""A frozen model divided among two processes: the same run, to the last bit, and each holds half of the weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

from seergate.distill import TrainConfig, load_train_config, run_distillation
from seergate.distill.base_model import load_frozen
from seergate.distill.distributed import DistributedState
from seergate.distill.estimate import make_plan
from seergate.errors import SeergateError
from seergate.models.families import decoder_of
from tests.distill.conftest import PLAIN, assert_same, byte_tokenizer, scalars
from tests.support.models import tiny_model
from tests.support.pairs import ROOT, free_port, pair

heads_are_planned = pytest.mark.skipif(
    not hasattr(DistributedConfig, "fsdp_plan"), reason="this transformers divides language models only"
)

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
from seergate.distill.distributed import init_distributed
from transformers.utils import logging

logging.disable_progress_bar()
config, world = resolve({"config": sys.argv[1]}), init_distributed()
found = {}

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

for shard in (True, False, True, False):  # what is imported at the first time counts for neither
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = memory("VmRSS")
    model = load_frozen(config.model, replace(config, shard_base=shard), world)
    tensors = [getattr(x, "_local_tensor", x) for x in model.parameters()]
    found[str(shard)] = {"held": sum(x.nbytes for x in tensors), "peak": memory("VmHWM") - before}
    del model, tensors
    gc.collect()
print(json.dumps(found), flush=True)
world.leave()
os._exit(0)
"""


def seeing(kind: str, directory: Path) -> str:
    """A model as Gemma 3 and Gemma 4 are published: the language model is part of a model that sees images."""
    tokenizer = byte_tokenizer(PLAIN)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "gemma3":
        own, whole = {}, {"mm_tokens_per_image": 4}
        vision |= {"image_size": 28, "patch_size": 14}
    else:
        own, whole = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tokenizer)}, {}
        vision |= {"num_key_value_heads": 2, "head_dim": 16}
    text = tiny_model(f"{kind}_text", vocab_size=len(tokenizer), **own).config.to_dict()
    shape = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **whole)
    AutoModelForImageTextToText.from_config(shape).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def reasoner(tmp_path: Path) -> TrainConfig:
    """A short run on the tiny reasoner. Of the one pack that is held out, the second process has nothing."""
    options = {"output_dir": str(tmp_path / "alone"), "token_cache": str(tmp_path / "tokens"), "data_limit": 60}
    options |= {"chain_sum_variables": (8, 14), "max_length": 640, "max_steps": 2, "eval_steps": 1, "eval_packs": 1}
    return load_train_config("tiny-reasoner", options)


def assert_same_run(one: Path, other: Path) -> None:
    """Gates, moments (and so the gradients), losses and evaluations are equal bit for bit."""
    assert_same(one, other)
    for name in ("loss", "grad_norm", "held_out/kl"):
        assert scalars(one, name) == scalars(other, name), name


def train(runs: list[TrainConfig], tmp_path: Path) -> str:
    """Both processes do one run after the other, each on a port of its own; returns what the first one prints."""
    for run in runs:
        run.save(tmp_path / f"{run.run_dir.name}.yaml")
    ports = [(str(free_port()), str(tmp_path / f"{run.run_dir.name}.yaml")) for run in runs]
    done = pair(["-c", RUNS, *(text for both in ports for text in both)], seconds=280)
    assert [one.returncode for one in done] == [0, 0], done
    return done[0].stdout


@pytest.mark.slow
@pytest.mark.timeout(600)  # four runs
def test_a_divided_model_trains_the_same_gates_bit_for_bit(reasoner: TrainConfig, tmp_path: Path) -> None:
    """Two packs a step, which two processes add up in any order alike; then one, of which the second has nothing."""
    runs = [replace(reasoner, packs_per_step=packs) for packs in (2, 1)]
    alone = [run_distillation(replace(run, output_dir=f"{run.output_dir}-{run.packs_per_step}")) for run in runs]
    places = [str(tmp_path / f"divided-{packs}") for packs in (2, 1)]
    divided = [replace(run, shard_base=True, output_dir=place) for run, place in zip(runs, places, strict=True)]
    assert "the frozen model is divided among 2 processes" in train(divided, tmp_path)
    for run, other in zip(divided, alone, strict=True):
        assert_same_run(run.run_dir, other)


@heads_are_planned
@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_every_part_of_a_decoder_that_is_part_of_a_model_is_divided(kind, config, tmp_path, monkeypatch):
    """Between processes that are not there: how a model is divided is settled before anything is sent."""
    run = replace(config, model=seeing(kind, tmp_path / kind), shard_base=True)
    world = DistributedState(0, 2, 0, torch.device("cpu"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for part in decoder_of(load_frozen(run.model, run, world)).parameters():
            assert len(part.to_local()) == -(-len(part) // 2)
        monkeypatch.delattr(DistributedConfig, "fsdp_plan")
        with pytest.raises(SeergateError, match="shard_base is true; for a Gemma.* it needs a newer transformers"):
            load_frozen(run.model, run, world)
    finally:
        dist.destroy_process_group()


@heads_are_planned
@pytest.mark.soak
def test_models_that_see_images_are_divided_bit_for_bit(config: TrainConfig, tmp_path: Path) -> None:
    short = replace(config, max_steps=2, eval_steps=1)
    runs = [
        replace(short, model=seeing(kind, tmp_path / f"{kind}-model"), output_dir=str(tmp_path / kind))
        for kind in ("gemma3", "gemma4")
    ]
    divided = [replace(run, shard_base=True, output_dir=f"{run.output_dir}-divided") for run in runs]
    train(divided, tmp_path)
    for run, other in zip(runs, divided, strict=True):
        assert_same_run(run_distillation(run), other.run_dir)


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
def test_each_process_reads_and_holds_its_half(config: TrainConfig, tmp_path: Path) -> None:
    """150 MB of weights in float32; before that, neither has anything of the size."""
    shape = Qwen3Config(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=8192, dtype="bfloat16",
    )  # fmt: skip
    Qwen3ForCausalLM._from_config(shape, dtype="bfloat16").save_pretrained(tmp_path / "model")
    run = replace(config, model=str(tmp_path / "model"), dtype="float32", shard_base=True)
    plan = make_plan(run, processes=2, device="cpu").memory
    run.save(tmp_path / "run.yaml")
    for done in pair(["-c", LOADS, str(tmp_path / "run.yaml")]):
        assert done.returncode == 0, done
        memory = json.loads(done.stdout.splitlines()[-1])
        divided, whole = memory["True"], memory["False"]
        assert divided["held"] == pytest.approx(plan.base, rel=1e-3)
        assert whole["held"] == pytest.approx(plan.base + plan.base_elsewhere, rel=1e-3)
        assert divided["peak"] < 0.75 * whole["peak"], memory


def test_who_cannot_divide_is_told(config: TrainConfig) -> None:
    with pytest.raises(SeergateError, match="shard_base is true; it needs several processes"):
        run_distillation(replace(config, shard_base=True, data="/does/not/exist.jsonl"))
