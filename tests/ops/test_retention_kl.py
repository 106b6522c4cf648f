"""The loss of Fast KVzip's gates: the torch backend against the reference, and both against numbers."""

import math

import pytest
import torch

from seergate import ops
from seergate.ops import reference
from tests.support.op_inputs import Pack

BOTH = pytest.mark.parametrize("retention_kl", [reference.retention_kl, ops.retention_kl], ids=["reference", "torch"])


def pack(lengths, group=2):
    made = Pack.random(lengths, group=group, dim=8, spread=1.0)
    return made.q, made.k, torch.rand(sum(lengths), 2, dtype=torch.float64).requires_grad_(), made.cu


@pytest.mark.parametrize("lengths", [[1], [63], [5, 0, 40, 1, 17]])
@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize(
    "options", [{}, {"row_start": 0.5}, {"softcap": 3.0, "sm_scale": 0.7}, {"recall_budgets": (4, 9)}, {"sinks": 1}]
)
def test_against_the_reference(lengths, group, options):
    for distance in (1, 4):
        q, k, scores, borders = pack(lengths, group)
        options = options | ({"sinks": torch.linspace(-1, 2, q.shape[1]).double()} if "sinks" in options else {})
        results = []
        for run in (reference.retention_kl, ops.retention_kl):
            loss, stats = run(q, k, scores, borders, distance, **options)
            results.append((loss.detach(), *stats, torch.autograd.grad(loss, scores)[0]))
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        loss, stats = ops.retention_kl(q.float(), k.float(), scores.float(), borders, distance, **options)
        torch.testing.assert_close(loss.double(), results[0][0], rtol=1e-4, atol=1e-6)


def test_a_long_pack_in_chunks(monkeypatch):
    q, k, scores, borders = pack([300, 41])
    want = ops.retention_kl(q, k, scores, borders, 3, recall_budgets=(50,))
    monkeypatch.setattr("seergate.ops.torch_impl.teacher.CHUNK_BYTES_CPU", 4096)
    got = ops.retention_kl(q, k, scores, borders, 3, recall_budgets=(50,))
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1].recall, want[1].recall)


@BOTH
def test_targets_of_0_and_1_have_gradients(retention_kl):
    q = torch.full((4, 1, 1), 20.0)
    k = torch.tensor([20.0, -20.0, 0.0, 0.0]).view(4, 1, 1)  # the first gets everything
    scores = torch.full((4, 1), 0.3, requires_grad=True)
    loss, _ = retention_kl(q, k, scores, torch.tensor([0, 4]), 1, sm_scale=1.0)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient.flatten().tolist() == pytest.approx([-1 / 0.3 / 3, 1 / 0.7 / 3, 1 / 0.7 / 3, 0.0])


@BOTH
def test_by_hand(retention_kl):
    """Three tokens, rows see the scores [0], [0, ln 3] and [ln 2, 0, 0]: of distance 1, token 0 gets at most 1/2."""
    q = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]])
    k = torch.tensor([[[0.0, 0.0, math.log(2)]], [[0.0, math.log(3), 0.0]], [[0.0, 0.0, 0.0]]])
    scores, borders = torch.tensor([[0.5], [0.2], [0.9]]), torch.tensor([0, 3], dtype=torch.int32)
    loss, stats = retention_kl(q, k, scores, borders, 1, sm_scale=1.0, recall_budgets=(2,))
    # Row 1: 1/4, 3/4. Row 2: 1/2, 1/4, 1/4. So token 0 gets 1/2 and token 1 gets 1/4; nobody follows token 2.
    second = 0.25 * math.log(0.25 / 0.2) + 0.75 * math.log(0.75 / 0.8)
    assert loss.item() == pytest.approx(second / 2, rel=1e-5)
    assert stats.rows.item() == 2 and stats.recall.item() == pytest.approx(2 / 3)
    loss, stats = retention_kl(q, k, scores, borders, 2, sm_scale=1.0)
    assert loss.item() == pytest.approx(0, abs=1e-7) and stats.rows.item() == 1
