"""Which implementation runs."""

import sys
from contextlib import contextmanager

import pytest
import torch

from seergate import ops
from seergate.ops import backend, reference
from tests.support.op_inputs import Pack

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _nothing_forced(monkeypatch):
    monkeypatch.delenv("SEERGATE_BACKEND", raising=False)


@pytest.mark.parametrize("op", backend.FILES)
def test_cpu_tensors_go_to_torch(op):
    assert backend._loaded(op, CPU) == (f"seergate.ops.torch_impl.{backend.FILES[op]}",)


def test_cuda_tensors_go_to_triton_where_it_is_installed(monkeypatch):
    for installed, chosen in ((True, "triton"), (False, "torch")):
        monkeypatch.setattr(backend, "has_triton", lambda installed=installed: installed)
        assert backend.choose(CUDA) == chosen


@pytest.mark.parametrize("op", backend.FILES)
def test_every_op_runs_on_a_gpu(op, monkeypatch):
    """By a kernel, or in torch where it is said to have none."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "choose", lambda device: "triton")
    package = "torch_impl" if op in backend.WITHOUT_KERNEL else "triton_impl"
    first = backend._loaded(op, CPU)[0]
    assert first == f"seergate.ops.{package}.{backend.FILES[op]}" and hasattr(sys.modules[first], op)


def calls():
    """Arguments for every op, in float64."""
    torch.manual_seed(0)
    pack, cache = Pack.random([30]), torch.randn(1, 2, 16, 4, dtype=torch.float64)
    teacher, lengths, weight = (pack.q, pack.k), torch.tensor([16]), torch.randn(2, 12, 6, dtype=torch.float64)
    beta = torch.rand(30, 2, dtype=torch.float64)
    scores = {"scores": lambda queries, keys: queries @ keys.transpose(-1, -2), "entry_tokens": 8}
    recent, compressed = cache.clone(), torch.zeros(1, 2, 2, 6, dtype=torch.float64)
    return {
        "attention_with_block_targets": ((*teacher, pack.k, pack.cu, 8), {"softcap": 3.0}),
        "block_targets": ((*teacher, pack.cu, 8), {}),
        "dense_decode": ((cache[:, :, 0], cache, cache, lengths), {"softcap": 3.0}),
        "gate_kl": ((*teacher, pack.qg, pack.kg, pack.cu, 8), {"recall_budgets": (16,), "sink_blocks": 1}),
        "packed_attention": ((*teacher, pack.k, pack.cu), {"window": 9}),
        "pool_keys": ((cache, 8), {"kinds": ("avg",), "lengths": torch.tensor([11])}),
        "retained_attention": ((*teacher, pack.k, beta.log(), pack.cu), {"window": 9}),
        "retention_kl": ((*teacher, beta, pack.cu, 4), {"recall_budgets": (8,)}),
        "score_blocks": ((cache[:, :, 0], lengths, compressed + 1, weight.view(2, 1, 12, 6)[:, :, :4], 8), {}),
        "scorer_kl": ((*teacher, pack.qg, pack.kg, pack.cu, 8), scores | {"target": "sum", "row_start": 0.2}),
        "select_blocks": ((cache[..., 0], lengths), {"block_size": 1, "threshold": 0.01, "sink_blocks": 1}),
        "sparse_decode": ((cache[:, :, 0], cache, cache, torch.tensor([[[0, 1], [1, -1]]]), lengths, 8), {}),
        "update_compressed_keys": ((cache[:, :, 3], lengths, recent, compressed, weight, 8), {"position_offset": 1}),
    }


def results(op):
    """What an op returns, or has changed in place."""
    given, options = calls()[op]
    result = getattr(ops, op)(*given, **options)
    return given[2:4] if result is None else result


def equal(got, want):
    """Two results agree: tensors, and tuples of them."""
    if isinstance(want, torch.Tensor):
        return got.dtype == want.dtype and torch.allclose(got, want, rtol=1e-9, atol=1e-12)
    return len(got) == len(want) and all(map(equal, got, want))


@pytest.mark.parametrize("op", backend.FILES)
def test_the_reference_runs_in_place_of_every_op(op, monkeypatch):
    want, forced, called = results(op), getattr(reference, op), []
    monkeypatch.setenv("SEERGATE_BACKEND", "reference")
    monkeypatch.setattr(reference, op, lambda **given: called.append(op) or forced(**given))
    assert equal(results(op), want) and called == [op]
    monkeypatch.setenv("SEERGATE_BACKEND", "")  # as if unset
    assert backend.choose(CPU) == "torch"


@pytest.mark.parametrize("op", sorted(set(calls()) - {"select_blocks"}))
def test_torch_runs_what_a_kernel_leaves_to_it(op, monkeypatch):
    """No kernel takes float64 (but for scores, in fp32), so none is launched, which here would fail."""
    pytest.importorskip("triton")
    want = results(op)
    monkeypatch.setattr(backend, "choose", lambda device: "triton")
    assert equal(results(op), want)


@pytest.mark.parametrize(
    ("forced", "installed", "message"),
    [
        ("cuda", True, "is 'cuda'; it must be one of reference, torch, triton"),
        ("triton", False, "is 'triton', which is not installed here"),
        ("triton", True, "is 'triton' and a tensor is on cpu; it must be on a GPU"),
    ],
)
def test_backends_that_cannot_be_forced(forced, installed, message, monkeypatch):
    monkeypatch.setenv("SEERGATE_BACKEND", forced)
    monkeypatch.setattr(backend, "has_triton", lambda: installed)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"SEERGATE_BACKEND {message}"):
        ops.pool_keys(torch.zeros(1, 1, 8, 2), 8)


def test_an_op_runs_with_its_tensors_device_as_the_current_one(monkeypatch):
    """There is no second GPU here: what would make it the current one is recorded instead."""
    current = []

    @contextmanager
    def device(target):
        current.append(target)
        yield
        current.append(None)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setenv("SEERGATE_BACKEND", "reference")
    second = torch.device("cuda:1")
    pooled = backend.run("pool_keys", second, k=torch.ones(1, 1, 8, 2), block_size=8, kinds=("max",))
    assert current == [second, None] and pooled.shape == (1, 1, 1, 2)
