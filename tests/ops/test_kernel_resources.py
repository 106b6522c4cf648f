"""What the interpreter hides: registers, spills, shared memory, tensor cores, wide loads, on every architecture.

Compiling everything takes long, so `benchmarks/kernel_resources.py` saves what it found. Here the saved table is held
to the rules and to the sources, and one configuration of each kernel is compiled anew.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import yaml

triton = pytest.importorskip("triton")

from benchmarks.kernels import ahead_of_time  # noqa: E402
from benchmarks.kernels.ahead_of_time import compiled, fingerprint, launches, shipped, specialisation  # noqa: E402
from benchmarks.kernels.data_sheets import GPUS, H200  # noqa: E402
from benchmarks.kernels.examples import gate_kl_example, meta, select_example, sparse_example, update_example  # noqa: E402
from benchmarks.kernels.machine_code import Resources, faults, resources  # noqa: E402
from seergate.ops.triton_impl import gate_kl  # noqa: E402
from tests.support.op_inputs import cu_seqlens  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks/results/kernel_resources.json"
RENEW = "run `python benchmarks/kernel_resources.py`"
GPU = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.target)


@cache
def table():
    """(Triton, GPU) -> rows."""
    found = {}
    for row in json.loads(TABLE.read_text())["rows"]:
        found.setdefault((row["triton"], row["gpu"]), []).append(row)
    return found


@cache
def now(gpu):
    """What ships for a GPU: examples and launches, as the table has them."""
    return list(shipped(gpu))


COLUMNS = [(release, gpu) for release, name in table() for gpu in GPUS if gpu.name == name]
COLUMN = pytest.mark.parametrize(("release", "gpu"), COLUMNS, ids=lambda x: getattr(x, "target", x))


def saved(release, gpu):
    """The table's rows, each with the example and the launch that it is of."""
    return list(zip(table()[release, gpu.name], now(gpu), strict=True))


def test_the_table_is_made_with_what_pytorch_ships():
    """CUDA builds of PyTorch 2.11 bring Triton 3.6.0, those of 2.13 bring 3.7.1; 3.9.0 may come with the next."""
    assert {("3.6.0", "H200"), ("3.7.1", "H200"), ("3.9.0", "H200")} <= set(table())


def test_loops_wait_alike_whatever_the_release():
    """`docs/status.md` says so."""
    depths = {tuple((row["waits"], row["serialised"]) for row in rows) for rows in table().values()}
    assert len(depths) == 1


@COLUMN
def test_the_table_has_every_kernel_as_it_is_now(release, gpu):
    rows = [(row["example"], row["kernel"], row["fingerprint"]) for row in table()[release, gpu.name]]
    assert rows == [(example.name, launch.kernel.__name__, fingerprint(launch)) for example, launch in now(gpu)], RENEW


@COLUMN
def test_no_kernel_of_the_table_has_a_fault(release, gpu):
    for row, (example, launch) in saved(release, gpu):
        kernel, used = launch.kernel.__name__, Resources(**{field: row[field] for field in Resources._fields})
        wrong = faults(used, gpu, **example.required(kernel))
        assert not wrong, (example.name, kernel, wrong)


@cache
def of_table(gpu):
    """What Triton tells the table's launches apart by."""
    return {specialisation(launch) for _, launch in now(gpu)}


def lesson(architecture, gpu, lengths, block_size=64, *, sink_blocks=0, row_stride=1, gradients=True):
    """What `gate_kl` launches in one layer of a training run (``gradients``), or of an evaluation in it.

    The model in bf16, the gates in fp32 and as wide as its heads, the tensors laid out as the layer gives them.
    """
    shape = json.loads((ROOT / "configs/architectures" / f"{architecture}.json").read_text())
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape.get("head_dim") or shape["hidden_size"] // heads
    tokens, blocks = sum(lengths), sum(-(-length // block_size) for length in lengths)
    q, k = (
        meta(1, tokens, n, dim, dtype=torch.bfloat16).transpose(1, 2)[0].transpose(0, 1) for n in (heads, kv_heads)
    )
    qg = meta(tokens, kv_heads, dim, dtype=torch.float32)
    kg = meta(kv_heads, blocks, dim, dtype=torch.float32).transpose(0, 1)
    lse = meta(heads, tokens, dtype=torch.float32).T
    call = partial(
        gate_kl.evaluate, q, k, *gate_kl.in_registers(qg, kg), cu_seqlens(lengths), block_size, dim**-0.5, dim**-0.5,
        0.5, "row_mean", [1024, 2048, 4096], sink_blocks, row_stride, 0, None, None, lse, gradients, gradients,
    )  # fmt: skip
    return launches(call, gpu)


PRESETS = sorted({path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"tiny-reasoner", "smollm2-135m"})
"""Of the paper's recipe."""
PACKS = ([32768], [9001, 20011, 3001], [5000, 4999, 4001, 17], [8191] * 4)
"""Of lengths of samples, such that the numbers of tokens, tiles and blocks are now odd, now multiples of 16."""


@pytest.mark.parametrize(("preset", "gpu"), [(name, H200) for name in PRESETS] + [("qwen3-8b", gpu) for gpu in GPUS])
def test_a_training_run_of_a_preset_launches_only_what_is_in_the_table(preset, gpu):
    table = of_table(gpu)
    for lengths in PACKS:
        for gradients in (True, False):
            launched = lesson(preset, gpu, lengths, gradients=gradients)
            names = {launch.kernel.__name__ for launch in launched}
            assert names >= {"maxima_kernel", "rows_kernel", "recall_kernel"}
            assert ("columns_kernel" in names) == gradients
            missing = [launch for launch in launched if specialisation(launch) not in table]
            assert not missing, (lengths, gradients, missing[0].kernel.__name__, missing[0].arguments)


@pytest.mark.parametrize("architecture", ["smollm2-135m", "qwen3-8b"])
def test_so_does_the_recommended_recipe(architecture):
    recipe = yaml.safe_load((ROOT / "configs/recipes/recommended.yaml").read_text())
    options = {name: recipe[name] for name in ("sink_blocks", "row_stride")}
    limit = 4096 if architecture == "smollm2-135m" else 32768
    for lengths in ([limit], [limit // 2 - 39, limit // 2 + 7, 17]):
        for gradients in (True, False):
            launched = lesson(architecture, H200, lengths, recipe["block_size"], gradients=gradients, **options)
            assert {"maxima_kernel", "rows_kernel", "recall_kernel"} <= {x.kernel.__name__ for x in launched}
            assert {specialisation(launch) for launch in launched} <= of_table(H200)


def test_packs_of_any_samples_launch_the_same_kernels():
    """Nothing is compiled anew in the middle of a run, whatever the lengths of its samples."""
    variants = [
        {specialisation(launch) for launch in lesson("qwen3-8b", H200, lengths, gradients=gradients)}
        for lengths in ([32768], [16000, 16001], [4096] * 8, [700] * 46, [20000, 333, 9000], [32767])
        for gradients in (True, False)
    ]
    recalls = {one for some in variants for one in some if one[0] == "recall_kernel"}
    assert len(recalls) == 1
    assert set.union(*variants) == variants[0] | variants[1]


@pytest.mark.parametrize(("block_size", "gpu"), [(16, H200), (32, GPUS[0]), (128, GPUS[-1])])
def test_so_does_the_ablation_of_the_block_size(block_size, gpu):
    table = of_table(gpu)
    for gradients in (True, False):
        for launch in lesson("qwen3-4b", gpu, [32768], block_size, gradients=gradients):
            assert specialisation(launch) in table, (launch.kernel.__name__, launch.arguments)


@GPU
def test_default_and_published_decoding_launch_what_is_in_the_table(gpu):
    table = of_table(gpu)
    for example in (
        select_example(torch.float32, 512, {"token_budget": 4096}, sink_blocks=0),
        update_example(torch.bfloat16, 128, 64, gate_dtype=torch.float32),
        update_example(torch.bfloat16, 128, 64, position_offset=63),
    ):
        assert {specialisation(launch) for launch in launches(example.call, gpu)} <= table, example.name


@pytest.mark.skipif(triton.__version__ != "3.9.0", reason="asks a function of Triton's that other versions call else")
@pytest.mark.parametrize(
    "value",
    [0, 1, 7, 16, -16, 2**40, 1.5, None, meta(8, dtype=torch.bfloat16), meta(8, dtype=torch.bfloat16)[1:]],
    ids=str,
)
def test_arguments_are_specialised_as_triton_does_it(value):
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    kind, divisible = ahead_of_time._specialised(value, False)
    want, detail = native_specialize_impl(BaseBackend, value, False, True, True)
    assert (kind, divisible) == (want, detail == "D")


def test_no_kernel_takes_a_wide_float():
    """Whatever the annotation says, older releases of Triton make it fp32."""
    kernels = {launch.kernel for _, launch in now(H200)}
    assert not [x for kernel in kernels for x in kernel.params if x.annotation_type.startswith(("fp", "bf"))]


def test_a_single_kv_head_makes_other_kernels():
    """Triton makes a constant of an argument that is 1, so an example must not have one where a model has several."""
    few, many = (
        launches(gate_kl_example(torch.bfloat16, torch.float32, 128, 4, 64, 4096, 4096, kv_heads=n).call, H200)
        for n in (1, 2)
    )
    assert specialisation(few[0]) != specialisation(many[0])
    assert [specialisation(launch) for launch in few[1:]] == [specialisation(launch) for launch in many[1:]]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "gpu",
    [pytest.param(gpu, marks=() if gpu is H200 else pytest.mark.soak) for gpu in GPUS],
    ids=lambda gpu: gpu.target,
)
def test_one_configuration_of_each_kernel_compiled_anew(gpu):
    first = {launch.kernel.__name__: (example, launch) for example, launch in reversed(list(shipped(gpu)))}
    assert len(first) >= 4
    for kernel, (example, launch) in first.items():
        used = resources(compiled(launch, gpu), gpu)
        assert not faults(used, gpu, **example.required(kernel)), (example, kernel)


@pytest.mark.parametrize(("release", "gpu"), [column for column in COLUMNS if column[1].backend == "cuda"])
def test_decode_loads_ahead(release, gpu):
    """All buffers of the pipeline exist: an index that the loop must wait for, or a branch, would leave fewer."""
    found = [item for item in saved(release, gpu) if item[0]["kernel"] == "decode_kernel"]
    assert found
    for row, (example, launch) in found:
        given = launch.arguments
        tile = given["TILE"] * (given["PADDED_DIM"] + given["PADDED_VALUE_DIM"]) * given["k_ptr"].element_size()
        assert row["shared"] >= (launch.options["num_stages"] - 1) * tile and row["ahead"], example.name


def test_faults_are_found():
    clean = Resources(100, 0, 0, 1024, 8, 10, 8, 8, 500, 100, 1, 0)
    assert not faults(clean, H200, products=True, wide=True, ahead=True)
    for change in (
        {"spills": 1},
        {"stack": 8},
        {"shared": 228 << 10},
        {"matrix": 0},
        {"wide_loads": 0},
        {"waits": 0},
        {"ahead": 0, "waits": -1},
        {"serialised": 12},
    ):
        assert faults(clean._replace(**change), H200, products=True, wide=True, ahead=True)
    nothing = clean._replace(matrix=0, wide_loads=0, ahead=0, waits=-1)
    assert not faults(nothing, H200, products=False, wide=False, ahead=False)


def test_spills_are_seen_in_machine_code():
    """A tile that no processor can hold: the reader of machine code must notice."""
    launch = launches(sparse_example(torch.float32, 128, 64).call, H200)[0]
    launch.arguments["TILE"] = 32
    launch.options["num_warps"] = 4
    used = resources(compiled(launch, H200), H200)
    assert used.spills and used.stack and used.registers == 255
