"""Registers, spills, shared memory, tensor cores and wide loads of the kernels on every architecture.

Compiling everything takes long, so `benchmarks/kernel_resources.py` saves its results. The saved table is checked
against the rules and the sources, and one configuration of each kernel is compiled anew.
"""

import json
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import yaml

triton = pytest.importorskip("triton")

from benchmarks.kernels.ahead_of_time import compiled, fingerprint, launches, shipped, specialisation  # noqa: E402
from benchmarks.kernels.data_sheets import GPUS, H200, KnownGpu  # noqa: E402
from benchmarks.kernels.examples import meta, select_example, sparse_example, update_example  # noqa: E402
from benchmarks.kernels.machine_code import Resources, faults, resources  # noqa: E402
from seergate.ops.attention import Pack  # noqa: E402
from seergate.ops.losses import LossOptions  # noqa: E402
from seergate.ops.triton_impl import gate_kl  # noqa: E402
from tests.support.op_inputs import cu_seqlens, grid  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks/results/kernel_resources.json"
RENEW = "run `python benchmarks/kernel_resources.py`"
GPU = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.target)


@cache
def table():
    """(Triton, GPU) -> rows."""
    rows_by_column = {}
    for row in json.loads(TABLE.read_text())["rows"]:
        rows_by_column.setdefault((row["triton"], row["gpu"]), []).append(row)
    return rows_by_column


@cache
def now(gpu):
    """Examples and launches that ship for a GPU, in the table's order."""
    return list(shipped(gpu))


COLUMNS = [(release, gpu) for release, name in table() for gpu in GPUS if gpu.name == name]
COLUMN = pytest.mark.parametrize(("release", "gpu"), COLUMNS, ids=lambda x: getattr(x, "target", x))


def test_the_table_is_made_with_what_pytorch_ships():
    """CUDA builds of PyTorch 2.11 bring Triton 3.6.0, those of 2.13 bring 3.7.1; 3.9.0 may come with the next."""
    assert {("3.6.0", "H200"), ("3.7.1", "H200"), ("3.9.0", "H200")} <= set(table())
    depths = {tuple((row["waits"], row["serialised"]) for row in rows) for rows in table().values()}
    assert len(depths) == 1  # loops wait alike in every release, as docs/status.md says


@COLUMN
def test_the_table_has_every_kernel_as_it_is_now_and_without_a_fault(release, gpu):
    """All buffers of decode's pipeline exist: an index that the loop must wait for, or a branch, would leave fewer."""
    rows = table()[release, gpu.name]
    entries = [(row["example"], row["kernel"], row["fingerprint"]) for row in rows]
    shipped_now = [(example.name, launch.kernel.__name__, fingerprint(launch)) for example, launch in now(gpu)]
    assert entries == shipped_now, RENEW
    for row, (example, launch) in zip(rows, now(gpu), strict=True):
        kernel, given = launch.kernel.__name__, launch.arguments
        wrong = faults(Resources(**{name: row[name] for name in Resources._fields}), gpu, **example.required(kernel))
        assert not wrong, (example.name, kernel, wrong)
        if kernel == "decode_kernel" and gpu.backend == "cuda":
            tile = given["TILE"] * (given["PADDED_DIM"] + given["PADDED_VALUE_DIM"]) * given["k_ptr"].element_size()
            assert row["shared"] >= (launch.options["num_stages"] - 1) * tile and row["ahead"], example.name
    assert "decode_kernel" in {row["kernel"] for row in rows}


@cache
def of_table(gpu):
    """The specialisations of the table's launches, by which Triton tells kernels apart."""
    return {specialisation(launch) for _, launch in now(gpu)}


def lesson(architecture, gpu, lengths, block_size=64, *, sink_blocks=0, row_stride=1, gradients=True):
    """The launches of `gate_kl` in a layer: bf16 model, fp32 gates as wide as its heads, the layer's strides."""
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
    pack, options = Pack(q, k, cu_seqlens(lengths), dim**-0.5), (0.5, "row_mean", (1024, 2048, 4096))
    call = partial(
        gate_kl.evaluate, pack, *gate_kl.in_registers(qg, kg), block_size, dim**-0.5,
        LossOptions(*options, sink_blocks, row_stride), lse, gradients, gradients,
    )  # fmt: skip
    return launches(call, gpu)


PRESETS = sorted({path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"tiny-reasoner", "smollm2-135m"})
PACKS = ([32768], [9001, 20011, 3001], [5000, 4999, 4001, 17], [8191] * 4)
"""Lengths of samples: the numbers of tokens, tiles and blocks are odd in some, multiples of 16 in others."""
RECIPE = yaml.safe_load((ROOT / "configs/recipes/recommended.yaml").read_text())
RECOMMENDED = {name: RECIPE[name] for name in ("block_size", "sink_blocks", "row_stride")}
RUNS = [
    *((preset, H200, PACKS, {}) for preset in PRESETS),
    *(("qwen3-8b", gpu, PACKS, {}) for gpu in GPUS),
    *(("qwen3-4b", gpu, [[32768]], {"block_size": n}) for n, gpu in {16: H200, 32: GPUS[0], 128: GPUS[-1]}.items()),
    ("smollm2-135m", H200, [[4096], [2009, 2055, 17]], RECOMMENDED),
    ("qwen3-8b", H200, [[32768], [16345, 16391, 17]], RECOMMENDED),
]


@pytest.mark.parametrize(("architecture", "gpu", "packs", "options"), RUNS)
def test_training_and_evaluation_launch_only_what_is_in_the_table(architecture, gpu, packs, options):
    """The presets of the paper, the ablation of the block size, and the recommended recipe."""
    table = of_table(gpu)
    for lengths in packs:
        for gradients in (True, False):
            launched = lesson(architecture, gpu, lengths, gradients=gradients, **options)
            names = {launch.kernel.__name__ for launch in launched}
            assert names >= {"maxima_kernel", "rows_kernel", "recall_kernel"}
            assert ("columns_kernel" in names) == gradients
            missing = [launch for launch in launched if specialisation(launch) not in table]
            assert not missing, (lengths, gradients, missing[0].kernel.__name__, missing[0].arguments)


def test_packs_of_any_samples_launch_the_same_kernels():
    """Nothing is compiled in the middle of a run."""
    variants = [
        {specialisation(launch) for launch in lesson("qwen3-8b", H200, lengths, gradients=gradients)}
        for lengths in ([32768], [16000, 16001], [4096] * 8, [700] * 46, [20000, 333, 9000], [32767])
        for gradients in (True, False)
    ]
    assert len({one for some in variants for one in some if one[0] == "recall_kernel"}) == 1
    assert set.union(*variants) == variants[0] | variants[1]


@GPU
def test_default_and_published_decoding_launch_what_is_in_the_table(gpu):
    table = of_table(gpu)
    for example in (
        select_example(torch.float32, 512, {"token_budget": 4096}, sink_blocks=0),
        update_example(torch.bfloat16, 128, 64, gate_dtype=torch.float32),
        update_example(torch.bfloat16, 128, 64, position_offset=63),
    ):
        assert {specialisation(launch) for launch in launches(example.call, gpu)} <= table, example.name


def test_no_kernel_takes_a_wide_float():
    """Older releases of Triton make it fp32."""
    kernels = {launch.kernel for _, launch in now(H200)}
    assert not [x for kernel in kernels for x in kernel.params if x.annotation_type.startswith(("fp", "bf"))]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("gpu", grid([(H200,)], GPUS), ids=lambda gpu: gpu.target)
def test_one_configuration_of_each_kernel_compiled_anew(gpu):
    first = {launch.kernel.__name__: (example, launch) for example, launch in reversed(list(shipped(gpu)))}
    assert len(first) >= 4
    for kernel, (example, launch) in first.items():
        used = resources(compiled(launch, gpu), gpu)
        assert not faults(used, gpu, **example.required(kernel)), (example, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [86, 89, 120])
def test_the_teacher_fits_the_shared_memory_of_small_gpus(arch):
    """Of an RTX 3090, L40S and RTX 5090, which are not in the table."""
    gpu = KnownGpu("cuda", arch, 84, 99 << 10, 32, "small")
    launched = {specialisation(x): x for _, x in shipped(gpu) if x.kernel.__name__ == "attention_kernel"}
    assert launched
    for launch in launched.values():
        assert resources(compiled(launch, gpu), gpu).shared <= gpu.shared_memory


def test_spills_are_seen_in_machine_code():
    """Of a tile that no processor can hold."""
    launch = launches(sparse_example(torch.float32, 128, 64).call, H200)[0]
    launch.arguments["TILE"] = 32
    launch.options["num_warps"] = 4
    used = resources(compiled(launch, H200), H200)
    assert used.spills and used.stack and used.registers == 255
    assert faults(used, H200, products=False, wide=False, ahead=False)
