"""The plan is made from shapes, and agrees with what runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.common import peak_bytes
from seergate import GateBank, resources
from seergate.distill import load_train_config
from seergate.distill.distributed import DistributedState
from seergate.distill.engines import PlainEngine
from seergate.distill.estimate import loss_pairs, make_plan, pack_flop, pairs
from seergate.distill.losses.teacher_forward import distill_step
from seergate.distill.memory import WORKING_BYTES, activation_bytes, capacity, estimate_memory
from seergate.models.families import head_dim_of
from seergate.models.names import presets
from tests.support.running import ROOT, output_of, refusal, run_seergate

CPU = torch.device("cpu")
RESULTS = ROOT / "benchmarks" / "results"
PARAMETERS = {
    "qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "r1-distill-llama-8b": 8.03, "qwq-32b": 32.76,
    "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.09, "llama-3.3-70b": 70.55, "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83, "smollm2-135m": 0.1345,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_can_be_planned_without_network_or_weights(name: str) -> None:
    plan = make_plan(load_train_config(name), memory_gb=1000, tflops=400, processes=2)
    assert plan.fits and plan.libraries == 71_000_000_000  # 7 % and 1 GB
    if name in PARAMETERS:  # as published, in billions; two bytes each
        assert (plan.memory.base + plan.memory.loading) / 2e9 == pytest.approx(PARAMETERS[name], rel=2e-3)
    assert plan.memory.gradients == 2 * plan.memory.gates and plan.checkpoint == 3 * plan.memory.gates


def test_a_container_limits_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = capacity(CPU, 2)
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    for limit, expected in (("1000000000\n", 500_000_000), ("max\n", whole), (f"{4 * whole}\n", whole)):
        (tmp_path / "memory.max").write_text(limit)
        assert capacity(CPU, 2) == expected


def test_the_plan_divides_what_does_not_fit_whole() -> None:
    run = load_train_config("qwen3-32b")
    alone, eight = (make_plan(run, memory_gb=48, processes=n) for n in (1, 8))
    assert not alone.fits and alone.memory.gathered == 0 and not alone.config.shard_base
    assert eight.fits and eight.config.shard_base
    assert eight.memory.base == pytest.approx(alone.memory.base / 8, rel=1e-6)
    assert eight.memory.base + eight.memory.base_elsewhere == alone.memory.base
    assert "frozen model (bfloat16, without LM head), 1/8" in eight.text() and "processes: 8" in eight.text()
    roomy = make_plan(run, memory_gb=96, processes=8)
    assert roomy.fits and not roomy.config.shard_base
    whole = make_plan(replace(run, shard_base=False), memory_gb=48, processes=8)
    assert not whole.fits and whole.memory.base == alone.memory.base
    huge = load_train_config("qwen3-235b-a22b")  # CUDA, NCCL and fragmentation leave less for tensors
    tensors = make_plan(huge, memory_gb=1000, processes=16).memory.total
    room = [make_plan(huge, memory_gb=(tensors + more) / 0.93e9, processes=16) for more in (1.1e9, 0.9e9)]
    assert [plan.config.shard_base for plan in room] == [False, True]


def test_a_step_takes_as_long_as_the_process_with_most_packs() -> None:
    run = load_train_config("qwen3-8b")
    single = make_plan(replace(run, packs_per_step=1), memory_gb=80, tflops=300)
    one = single.step_flop / 300e12
    for processes, most, lines in (
        (3, 6, ["16 packs a step: one less for 2 of 3 processes"]),
        (16, 1, []),
        (24, 1, ["16 packs a step: none for 8 of 24 processes"]),
        (64, 1, ["16 packs a step: none for 48 of 64 processes"]),
    ):
        plan = make_plan(run, memory_gb=80, tflops=300, processes=processes)
        assert plan.step_seconds == pytest.approx(most * one)
        hours = 800 * most * one / 3600
        assert f"{hours:,.2f} hours ({processes * hours:,.2f} device-hours)" in plan.text()
        assert [line for line in plan.text().splitlines() if "packs a step: " in line] == lines
    run = load_train_config("smollm2-135m")  # so many packs for each process
    alone, both = (make_plan(run, memory_gb=80, tflops=300, processes=n).step_seconds for n in (1, 2))
    assert alone == both


def test_what_does_not_fit_names_the_options_that_need_less() -> None:
    run = load_train_config("qwen3-14b")
    plan = make_plan(run, memory_gb=24)
    assert "does NOT fit in 24.0 GB: --quantize" in plan.text() and not plan.fits
    small = replace(plan, capacity=plan.libraries)
    assert "does NOT fit" in small.text() and "--quantize" not in small.text()
    assert plan.step_seconds is None and "time: `seergate plan --tflops` computes it" in plan.text()
    assert make_plan(replace(run, quantize="bnb-4bit"), memory_gb=24).fits
    assert make_plan(run, memory_gb=24, processes=2).fits
    shorter = make_plan(replace(run, max_length=8192), memory_gb=24).memory
    assert plan.memory.activations > 3 * shorter.activations and plan.memory.base == shorter.base
    sharded = make_plan(replace(run, deepspeed="ds_configs/zero2.json"), processes=8, memory_gb=24)
    assert sharded.memory.moments == plan.memory.moments // 4 and sharded.memory.buckets == 80e6


@pytest.mark.parametrize(
    ("own", "share", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, 0.5625, "(awq,"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.125, "(bitsandbytes,"),
        ({"quant_method": "fp8"}, 1.125, "(fp8,"),
        ({"quant_method": "compressed-tensors"}, 2.0, "(counted as bfloat16, not compressed-tensors,"),
    ],
)
def test_a_quantised_checkpoint_is_counted_so_and_not_divided(tmp_path, own, share, words) -> None:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = Qwen3Config(vocab_size=100, num_key_value_heads=2, quantization_config=own, **shape)
    config.save_pretrained(tmp_path)
    run = load_train_config(str(tmp_path), {"max_length": 4096})
    plan = make_plan(run, memory_gb=1.1, processes=8)
    linear, rest = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96), 64 * 100 + 64 + 2 * (2 * 64 + 2 * 16)
    assert plan.memory.base == share * linear + 2 * rest
    assert words in plan.text() and "NOT fit in 1.1 GB: a smaller --max-length" in plan.text()
    limited = make_plan(replace(run, base_memory_gb=0.001), memory_gb=1.1)
    assert "NOT fit in 1.1 GB: a smaller --base-memory-gb or a smaller --max-length" in limited.text()
    Qwen3Config(**{**config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}).save_pretrained(tmp_path)
    assert "NOT fit in 1.1 GB: more processes or a smaller" in make_plan(run, memory_gb=1.1).text()
    config.save_pretrained(tmp_path)
    for option in ({"quantize": "bnb-4bit"}, {"shard_base": True}):
        with pytest.raises(ValueError, match=f"^{next(iter(option))} is .*; it must be left out for .* quantised"):
            make_plan(replace(run, **option), memory_gb=24, processes=8)


def test_on_a_processor_weights_are_pages_of_their_file():
    """Measured on a Qwen3-8B cut to two layers: 1.9 GB at its own precision, 10.2 GB when it had to be converted."""
    runs = [load_train_config("qwen3-8b", {"dtype": dtype}) for dtype in ("bfloat16", "float32")]
    own, wider = (make_plan(run, device="cpu").memory for run in runs)
    embedding = 151936 * 4096
    assert own.loading == 0 and wider.loading == 4 * embedding + 2 * 8_190_735_360
    assert wider.base == pytest.approx(2 * own.base + 4 * embedding)


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32, "bos_token_id": None}


def qwen3(**shape):
    return Qwen3Config(**SMALL | shape)


EXPERTS = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
SHAPES = {
    "wide attention": qwen3(num_attention_heads=8, intermediate_size=128, num_key_value_heads=4, head_dim=32),
    "wide MLP": qwen3(intermediate_size=640, num_key_value_heads=2, head_dim=16),
    "llama": LlamaConfig(**SMALL, intermediate_size=192, num_key_value_heads=1, eos_token_id=None),
    "experts": Qwen3MoeConfig(**SMALL, **EXPERTS, num_key_value_heads=1, head_dim=16),
}


def random_model(shape: PretrainedConfig, dtype: str = "float32"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))
    return model.eval().requires_grad_(False)


@pytest.mark.plain_empty
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_agree_with_the_allocator(shape: str) -> None:
    dtype = "bfloat16" if shape == "wide attention" else "float32"
    run = load_train_config("qwen3-8b", {"max_length": 6144, "block_size": 64, "dtype": dtype})
    model = random_model(SHAPES[shape], dtype)
    bank = GateBank.for_model(model, run.gates(head_dim_of(model)))
    ids = torch.randint(0, 32, (1, 6144))
    measured = peak_bytes(lambda: distill_step(bank, model, ids, row_start=0.5))
    assert activation_bytes(model, bank, run, CPU) == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
@pytest.mark.plain_empty
def test_the_total_of_a_step_agrees_with_the_allocator() -> None:
    """The widths of Qwen3-0.6B: a pack, the optimizer's first step, and everything that is held beside them."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    shape = qwen3(hidden_size=1024, intermediate_size=3072, **heads)
    values = {"max_length": 4096, "block_size": 64, "dtype": "bfloat16", "packs_per_step": 1}
    run, model = load_train_config("qwen3-0.6b", values), random_model(shape, "bfloat16")
    bank = GateBank.for_model(model, run.gates(head_dim_of(model)))
    planned = estimate_memory(model, bank, run, CPU, processes=1)
    ids = torch.randint(0, 32, (1, 4096))

    def step() -> None:
        engine = PlainEngine(bank, run, DistributedState(0, 1, 0, CPU))
        engine.accumulate(distill_step(bank, model, ids, **run.loss_options).loss)
        engine.update(lr=1e-3)

    parameter_bytes = sum(p.nbytes for module in (model.model, bank) for p in module.parameters())
    assert planned.base + planned.gates == pytest.approx(parameter_bytes, rel=0.01)
    assert planned.total == pytest.approx(parameter_bytes + peak_bytes(step), rel=0.1)


def test_what_was_measured_of_whole_processes_agrees_with_the_plan(tmp_path: Path) -> None:
    """By `benchmarks/distill_model.py`: what a step adds to what the process held, against what is planned today."""
    (table,) = RESULTS.glob("distill_model-cpu-*.json")
    rows = [row for row in json.loads(table.read_text())["rows"] if row.get("way") == "seergate"]
    assert {(row["length"], row["layers"]) for row in rows} >= {(8192, 1), (8192, 2), (32768, 1), (32768, 2)}
    whole = json.loads((ROOT / "configs/architectures/qwen3-8b.json").read_text())
    for row in rows:
        cut = {"num_hidden_layers": row["layers"], "layer_types": None, "vocab_size": 256, "eos_token_id": 1}
        AutoConfig.for_model(**whole | cut).save_pretrained(tmp_path)
        options = {"recipe": "paper", "block_size": 64, "max_length": row["length"]}
        options |= {"packs_per_step": 1, "dtype": "bfloat16"}
        plan = make_plan(load_train_config(str(tmp_path), options), device="cpu")
        assert plan.memory.activations + WORKING_BYTES == pytest.approx(row["peak_gb"] * 1e9, rel=0.15), row
        assert row["process_ratio"] == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(("shape", "stride"), [("llama", 1), ("experts", 1), ("llama", 8)])
def test_operations_agree_with_a_count_of_them(shape: str, stride: int) -> None:
    given = {"max_length": 1024, "block_size": 64, "row_start": 0.0, "row_stride": stride}
    run = load_train_config("qwen3-8b", given)
    model = random_model(SHAPES[shape])
    if shape == "experts":
        model.set_experts_implementation("eager")  # the counter knows nothing of grouped products
    bank = GateBank.for_model(model, run.gates(head_dim_of(model)))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        distill_step(bank, model, torch.randint(0, 32, (1, 1024)), row_start=0.0, row_stride=stride)
    # Attention by plain matrix products is not causal but full, and the teacher's chunks run over some masked keys.
    counted = counter.get_total_flops() - 2 * 4 * 64 * pairs(1024)
    assert pack_flop(model, bank, run, 1024, len(bank)) == pytest.approx(counted, rel=0.1)


def test_gates_that_need_more_than_is_counted_are_said_to() -> None:
    texts = [
        make_plan(load_train_config("qwen3-8b", {"scorer": x}), memory_gb=80).text() for x in ("attn_gate", "msa")
    ]
    assert ["these gates need more" in text for text in texts] == [False, True]


def test_gates_of_anchors_are_counted_alone() -> None:
    runs = [load_train_config("qwen3-8b", {"anchors": anchors}) for anchors in (None, (0, 9, 18, 27))]
    whole, some = (make_plan(run, memory_gb=80) for run in runs)
    assert "36 with a gate" in whole.text() and "4 with a gate" in some.text()
    assert some.checkpoint == pytest.approx(whole.checkpoint / 9, rel=0.01)


def test_pairs() -> None:
    def counted(length: int, block_size: int, row_start: float, row_stride: int = 1) -> float:
        rows = {"block_size": block_size, "row_start": row_start, "row_stride": row_stride}
        return loss_pairs(length, load_train_config("qwen3-8b", rows))

    assert pairs(4) == 10 and counted(10, 8, 0.0) == 19 and counted(40, 8, 0.75) == pairs(40) - pairs(30)
    assert counted(100, 8, 0.5, 2) == (pairs(100) - pairs(50)) / 2 and counted(5, 8, 0.0) == 0


def test_the_command():
    text = output_of("plan", "--model", "qwen3-8b", "--memory-gb", "24", "--tflops", "300", "--processes", "8")
    words = "frozen model (bfloat16, without LM head)", "fits in 24.0 GB", "tokens/s", "device-hours", "419.4 M"
    assert all(word in text for word in words)


def test_what_cannot_be_planned_and_a_dry_run(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command, message in (
        (["plan", "--model", "qwen3-8b", "--memory-gb", "-1"], "memory_gb is -1.0; it must be positive"),
        (["plan", "--model", "qwen3-8b", "--device", "cuda"], "error: device is 'cuda' and this machine has no CUDA"),
        (["plan", "--model", str(tmp_path)], "gpt2"),
        (["plan", "--model", "tiny-reasoner", "--anchors", "0,9"], "anchors has [9]; it must name some of [0, 1,"),
        (["train", "--model", "qwen3-8b", "--deepspeed", "nope.json", "--dry-run"], "nope.json"),
    ):
        assert message in refusal(run_seergate(*command))
    text = output_of("train", "--model", "tiny-reasoner", "--max-steps", "7", "--dry-run")
    assert yaml.safe_load(text)["max_steps"] == 7 and "# memory of each process" in text
