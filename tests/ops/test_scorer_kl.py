"""The loss of any scorer against any target: the torch backend against the reference, and both against numbers."""

import math

import pytest
import torch

from seergate import ops
from seergate.config import TARGETS
from seergate.ops import reference
from tests.ops.test_teacher import two_heads_with_these_probabilities
from tests.support.op_inputs import Pack, relative

BOTH = pytest.mark.parametrize("scorer_kl", [reference.scorer_kl, ops.scorer_kl], ids=["reference", "torch"])
SIZE = 8


def per_block(queries, keys):
    """One dot product per block and KV head, as `gate_kl` has it."""
    return queries @ keys.transpose(-1, -2) / math.sqrt(keys.shape[-1])


def per_token(queries, keys):
    """Two heads on shared keys of tokens, rectified and summed; the same for both KV heads. No block is alike."""
    products = (queries @ keys.transpose(-1, -2)).relu().sum(1, keepdim=True) / math.sqrt(keys.shape[-1])
    return products.unflatten(-1, (-1, SIZE)).amax(-1).expand(-1, 2, -1, -1)


SCORES = {"per_block": (per_block, SIZE), "per_token": (per_token, 1)}


def packed(lengths, group, kind):
    """A random pack; keys of tokens in place of those of blocks for a scorer that wants them."""
    pack = Pack.random(lengths, block_size=SIZE, group=group, dim=8, gate_dim=6)
    if kind == "per_token":
        pack.kg = torch.randn(sum(lengths), 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return pack, dict(zip(("scores", "entry_tokens"), SCORES[kind], strict=True))


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("lengths", "group"), [([1, 63, 0, 40], 1), ([45], 4), ([1], 5), ([33, 17], 7), ([25], 8)])
def test_against_the_reference(kind, target, lengths, group):
    pack, options = packed(lengths, group, kind)
    options |= {"target": target, "row_start": 0.3, "recall_budgets": (8, 16, 1000)}
    for more in ({"reduction": "published"}, {"sink_blocks": 1}, {"row_stride": 3, "row_shift": 4}, {}):
        want = pack.run(reference.scorer_kl, **options, **more)
        got = pack.run(ops.scorer_kl, **options, **more)
        for a, b in zip((got[0], *got[1], *got[2:]), (want[0], *want[1], *want[2:]), strict=True):
            assert relative(a, b) < 1e-10
    narrow = pack.to(torch.float32).run(ops.scorer_kl, **options)
    for a, b in zip((narrow[0], *narrow[2:]), (want[0], *want[2:]), strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("target", TARGETS)
def test_sinks_softcap_and_a_known_normaliser(target):
    pack, options = packed([45, 9], 2, "per_token")
    more = {"sinks": torch.randn(4).double(), "softcap": 5.0, "sm_scale": 0.7}
    options |= {"target": target, **more}
    want = pack.run(reference.scorer_kl, **options)
    lse = reference.attention_with_block_targets(pack.q, pack.k, pack.k, pack.cu, SIZE, **more).lse
    for normaliser in ({}, {"lse": lse}):
        got = pack.run(ops.scorer_kl, **options, **normaliser)
        assert relative(got[0], want[0]) < 1e-10 and relative(got[2], want[2]) < 1e-10


def test_many_chunks_are_as_one(monkeypatch):
    pack, options = packed([100, 30], 2, "per_token")
    whole = pack.run(ops.scorer_kl, **options, target="sum")
    monkeypatch.setattr("seergate.ops.torch_impl.teacher.CHUNK_BYTES_CPU", 1)
    parts = pack.run(ops.scorer_kl, **options, target="sum")
    for a, b in zip((parts[0], *parts[2:]), (whole[0], *whole[2:]), strict=True):
        assert relative(a, b) < 1e-10


def test_scores_of_many_heads_fit_into_the_buffer_too(monkeypatch):
    pack, options = packed([200], 2, "per_token")
    pack.qg = torch.randn(200, 8, 6, dtype=torch.float64)
    limit, sizes = 8 * 200 * 40 * 8, []  # of 40 rows
    monkeypatch.setattr("seergate.ops.torch_impl.teacher.CHUNK_BYTES_CPU", limit)

    def scores(queries, keys):
        sizes.append(queries.shape[1] * queries.shape[2] * keys.shape[2] * 8)
        return per_token(queries, keys)

    pack.run(ops.scorer_kl, **(options | {"scores": scores}))
    assert limit / 2 < max(sizes) <= limit


def test_one_dot_product_per_block_and_the_largest_probability_are_gate_kl():
    pack, options = packed([63, 1, 40], 2, "per_block")
    shared = {"row_start": 0.5, "recall_budgets": (8, 16, 24), "sink_blocks": 1, "row_stride": 5, "row_shift": 2}
    want, got = pack.run(ops.gate_kl, **shared), pack.run(ops.scorer_kl, **options, **shared)
    for a, b in zip((got[0], *got[1], *got[2:]), (want[0], *want[1], *want[2:]), strict=True):
        assert relative(a, b) < 1e-10


@BOTH
def test_targets_by_hand(scorer_kl):
    q, k, cu = two_heads_with_these_probabilities()
    probabilities = (q[5, :, None] * k[:, 0]).sum(-1).softmax(-1)  # [heads, tokens] of the last row, one KV head
    mass = probabilities.unflatten(-1, (3, 2))[:, :2].sum((0, 2))
    p = (mass / mass.sum()).tolist()
    options = {"scores": per_block, "entry_tokens": 2, "row_start": 5 / 6, "sm_scale": 1.0}
    for logits in ((1.0, 3.0), (0.5, -2.0)):
        qs = torch.ones(6, 1, 1).double().requires_grad_()
        ks = torch.tensor([*logits, math.nan]).double()[:, None, None].requires_grad_()
        loss, stats = scorer_kl(q, k, qs, ks, cu, 2, **options, target="sum", recall_budgets=(4,))
        pi = torch.tensor(logits).double().softmax(0).tolist()
        assert loss.item() == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, pi, strict=True)))
        assert stats.recall.item() == pytest.approx(p[logits.index(max(logits))])
        loss.backward()
        assert ks.grad[:2, 0, 0].tolist() == pytest.approx([b - a for a, b in zip(p, pi, strict=True)])
