"""Attention of a pack and its log-sum-exp, by whatever kernel, against the reference in float64; and which kernel."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from seergate import ops
from seergate.ops import reference
from seergate.ops.torch_impl import packed_attention as torch_impl
from tests.support.op_inputs import Pack

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
EXTRAS = {
    "plain": {},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "all": {"window": 37, "sinks": True, "softcap": 3.0},
}


def inputs(dtype, group=4, lengths=(97, 0, 1, 17), device="cpu", dim=24, v_dim=None):
    pack = Pack.random(list(lengths), group=group, dim=dim, dtype=dtype)
    v = torch.randn(len(pack.k), 2, v_dim or dim).to(dtype)
    return *(x.to(device) for x in (pack.q, pack.k, v)), pack.cu


def check(q, k, v, cu, *, sm_scale=0.3, sinks=False, **extras):
    extras["sinks"] = torch.tensor([-math.inf, *range(-2, q.shape[1] - 3)], device=q.device) if sinks else None
    got = ops.packed_attention(q, k, v, cu, sm_scale, **extras)
    exact = {name: x.double().cpu() if isinstance(x, torch.Tensor) else x for name, x in extras.items()}
    want = reference.packed_attention(*(x.double().cpu() for x in (q, k, v)), cu, sm_scale, **exact)
    assert got.output.dtype == v.dtype and got.lse.dtype == torch.float32
    tolerance = TOLERANCE[v.dtype]
    torch.testing.assert_close(got.lse.double().cpu(), want.lse, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.output.double().cpu(), want.output, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows_sinks_and_caps(dtype, extras):
    check(*inputs(dtype), **extras)


@pytest.mark.parametrize("group", [1, 5, 7, 8])
def test_any_group(group):
    check(*inputs(torch.float32, group))
    check(*inputs(torch.float32, group, (50,)), window=9)


@pytest.mark.parametrize("v_dim", [24, 8])
def test_without_a_fused_kernel(v_dim, monkeypatch):
    """Switched off by the caller, or values of another width than keys; several chunks of rows."""
    monkeypatch.setattr(torch_impl, "CHUNK_BYTES", 8 * 97 * 4 * 30)
    with sdpa_kernel(SDPBackend.MATH):
        check(*inputs(torch.float32, v_dim=v_dim))
        check(*inputs(torch.float32, v_dim=v_dim), window=25)
    check(*inputs(torch.float32, v_dim=v_dim), softcap=1.5)


def test_strides_do_not_matter():
    q, k, v, cu = inputs(torch.float32)
    want = ops.packed_attention(q, k, v, cu)
    odd = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    assert odd[0].stride(-1) != 1
    torch.testing.assert_close(ops.packed_attention(*odd, cu), want)


@pytest.mark.parametrize("wrong", ["group", "lse"])
def test_a_kernel_of_the_processor_that_gives_something_else_is_not_used(wrong, monkeypatch):
    real = torch_impl.flash_on_cpu

    def another(q, k, v, scale):
        if wrong == "group":  # query head h belongs to KV head h % 2
            k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        output, lse = real(q, k, v, scale)
        return output, lse if wrong == "group" else lse * math.log2(math.e)

    gives_lse = torch_impl.gives_lse.__wrapped__
    assert gives_lse("cpu", torch.device("cpu"))
    monkeypatch.setattr(torch_impl, "flash_on_cpu", another)
    assert not gives_lse("cpu", torch.device("cpu"))


CUDA, BF16 = torch.device("cuda"), torch.bfloat16


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "dims", "extras", "kernel"),
    [
        ("cpu", None, torch.float32, (64, 64), {}, "cpu"),
        ("cpu", None, BF16, (64, 64), {"window": 9}, None),
        ("cpu", None, BF16, (64, 32), {}, None),
        ("cuda", (9, 0), BF16, (128, 128), {}, "varlen"),
        ("cuda", (8, 0), torch.float16, (256, 256), {"window": 9}, "varlen"),
        ("cuda", (9, 0), BF16, (128, 128), {"softcap": 50.0}, None),
        ("cuda", (9, 0), BF16, (512, 512), {}, "efficient"),
        ("cuda", (9, 0), BF16, (192, 128), {}, "efficient"),
        ("cuda", (9, 0), BF16, (100, 100), {}, None),
        ("cuda", (9, 0), torch.float32, (128, 128), {}, "efficient"),
        ("cuda", (9, 0), torch.float32, (128, 128), {"window": 9}, None),
        ("cuda", (7, 5), torch.float16, (128, 128), {}, "efficient"),
        ("cuda", (7, 5), torch.float16, (128, 128), {"window": 9}, None),
        ("cuda", (7, 5), BF16, (128, 128), {}, None),
        ("meta", None, BF16, (128, 128), {}, None),
    ],
    ids=str,
)
def test_which_kernel_of_pytorch_runs(device, capability, dtype, dims, extras, kernel, monkeypatch):
    monkeypatch.setattr(torch_impl, "capability", lambda device: capability)
    monkeypatch.setattr(torch_impl, "gives_lse", lambda kernel, device: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    options = {"window": None, "softcap": None} | extras
    assert torch_impl.fused_kernel(torch.device(device), dtype, *dims, **options) == kernel


def test_kernels_that_are_missing_or_switched_off_are_not_chosen(monkeypatch):
    monkeypatch.setattr(torch_impl, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch_impl, "gives_lse", lambda kernel, device: False)
    choose = lambda: torch_impl.fused_kernel(CUDA, BF16, 128, 128, window=None, softcap=None)  # noqa: E731
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert choose() == "efficient"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert choose() == "efficient"
    monkeypatch.setattr(torch_impl, "gives_lse", lambda kernel, device: True)
    assert choose() == "varlen"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose() == "efficient"
    with sdpa_kernel(SDPBackend.MATH):
        assert choose() is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choose() is None


@pytest.mark.parametrize(("layout", "used"), [("packed", True), ("padded", False), ("base 2", False), ("gone", False)])
def test_a_kernel_of_gpus_with_another_log_sum_exp_is_not_used(layout, used, monkeypatch):
    """``[H, T]`` is known; some releases have ``[segments, H, longest]``."""

    def varlen(q, k, v, cu, scale, window):
        if layout == "gone":
            raise RuntimeError("no such operator")
        outputs, sums = [], []
        for a, b in zip(cu.tolist(), cu.tolist()[1:], strict=False):
            output, lse = torch_impl.chunked(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), scale, None, None)
            outputs.append(output[0].transpose(0, 1))
            sums.append(lse[0])
        lse = torch.nn.utils.rnn.pad_sequence([x.T for x in sums]) if layout == "padded" else torch.cat(sums, 1).T
        return torch.cat(outputs), lse * math.log2(math.e) if layout == "base 2" else lse

    monkeypatch.setattr(torch_impl, "varlen", varlen)
    assert torch_impl.gives_lse.__wrapped__("varlen", torch.device("cpu")) is used


@pytest.mark.parametrize("window", [None, 9])
def test_the_calls_of_gpu_kernels_have_the_arguments_and_results_of_this_pytorch(window):
    """On meta tensors: their values are for `pytest -m gpu`."""
    q, k, v, cu = inputs(BF16, device="meta")
    output, lse = torch_impl.varlen(q, k, v, cu, 0.3, window)
    assert output.shape == q.shape and lse.shape == q.shape[:2] and lse.dtype == torch.float32
    own = [x.transpose(0, 1)[None] for x in (q, k, v)]
    output, lse = torch_impl.efficient(*own, 0.3)
    assert output.shape == own[0].shape and lse.shape == own[0].shape[:3] and lse.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256, 100])
def test_on_a_gpu(dim, dtype, extras):
    check(*inputs(dtype, lengths=(300, 0, 1, 128, 77), device="cuda", dim=dim), **extras)
