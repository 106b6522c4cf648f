"""What the interpreter hides: registers, spills, shared memory, tensor cores, wide loads, on every architecture.

Compiling everything takes long, so `benchmarks/kernel_resources.py` saves what it found. Here the saved table is held
to the rules and to the sources, and one configuration of each kernel is compiled anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from seergate.ops.triton_impl.ahead_of_time import compiled, examples, fingerprint, launches, shipped  # noqa: E402
from seergate.ops.triton_impl.gpus import GPUS, H200  # noqa: E402
from seergate.ops.triton_impl.machine_code import Resources, faults, resources  # noqa: E402

TABLE = Path(__file__).resolve().parents[2] / "benchmarks/results/kernel_resources.json"
RENEW = "run `python benchmarks/kernel_resources.py`"
GPU = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.target)


def saved(gpu):
    """The table's rows for a GPU, each with the example and the launch that it is of, and the Triton that made it."""
    record = json.loads(TABLE.read_text())
    rows, now = [row for row in record["rows"] if row["gpu"] == gpu.name], list(shipped(gpu))
    names = [(example.name, launch.kernel.__name__) for example, launch in now]
    assert [(row["example"], row["kernel"]) for row in rows] == names, RENEW
    return list(zip(rows, now, strict=True)), record["options"]["triton"]


@GPU
def test_the_table_has_every_kernel_as_it_is_now(gpu):
    rows, version = saved(gpu)
    if version == triton.__version__:  # the fingerprint covers the parts of Triton that are written in Triton
        assert not [example.name for row, (example, now) in rows if row["fingerprint"] != fingerprint(now)], RENEW


@GPU
def test_no_kernel_of_the_table_has_a_fault(gpu):
    for row, (example, launch) in saved(gpu)[0]:
        kernel, used = launch.kernel.__name__, Resources(**{field: row[field] for field in Resources._fields})
        assert not faults(used, gpu, products=kernel in example.products, wide=kernel in example.wide), (
            example,
            kernel,
        )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@GPU
def test_one_configuration_of_each_kernel_compiled_anew(gpu):
    first = {launch.kernel.__name__: (example, launch) for example, launch in reversed(list(shipped(gpu)))}
    assert len(first) >= 4
    for kernel, (example, launch) in first.items():
        used = resources(compiled(launch, gpu), gpu)
        assert not faults(used, gpu, products=kernel in example.products, wide=kernel in example.wide), (
            example,
            kernel,
        )


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu.backend == "cuda"], ids=lambda gpu: gpu.target)
def test_decode_loads_ahead(gpu):
    """All buffers of the pipeline exist: an index that the loop must wait for, or a branch, would leave fewer."""
    found = [item for item in saved(gpu)[0] if item[0]["kernel"] == "decode_kernel"]
    assert found
    for row, (example, launch) in found:
        given = launch.arguments
        tile = given["TILE"] * (given["PADDED_DIM"] + given["PADDED_VALUE_DIM"]) * given["k_ptr"].element_size()
        assert row["shared"] >= (launch.options["num_stages"] - 1) * tile and row["ahead"], example.name


def test_faults_are_found():
    clean = Resources(100, 0, 0, 1024, 8, 10, 8, 8, 500, 100)
    assert not faults(clean, H200, products=True, wide=True)
    for change in ({"spills": 1}, {"stack": 8}, {"shared": 228 << 10}, {"matrix": 0}, {"wide_loads": 0}):
        assert faults(clean._replace(**change), H200, products=True, wide=True)
    assert not faults(clean._replace(matrix=0, wide_loads=0), H200, products=False, wide=False)


@pytest.mark.slow
def test_spills_are_seen_in_machine_code():
    """A tile that no processor can hold: the reader of machine code must notice."""
    example = next(e for e in examples(H200) if e.name.startswith("sparse_decode float32 d128 block 64"))
    launch = launches(example.call, H200)[0]
    launch.arguments["TILE"] = 32
    launch.options["num_warps"] = 4
    used = resources(compiled(launch, H200), H200)
    assert used.spills and used.stack and used.registers == 255
