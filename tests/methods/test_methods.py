"""Numeric examples of each method's equations; the shared invariants are in tests/decode/test_decode.py."""

import pytest
import torch

from seergate import DecodeConfig, methods, ops
from seergate.methods.base import LayerSpec
from seergate.methods.controls import random_bits
from seergate.methods.gate import published_selection
from seergate.models import families
from seergate.models.rope import Rotary
from tests.support.models import tiny_model
from tests.support.steps import fed, spec, step


def test_quest_bound_by_hand():
    keys = torch.tensor([[[[1.0, 1.0], [2.0, -1.0], [0.0, 3.0]]]])
    q = torch.tensor([[[1.0, -2.0]]])
    state, last = fed(methods.Quest(token_budget=64, block_size=3), q, keys, [3])
    assert state.rows["high"][0, 0, 0].tolist() == [2, 3] and state.rows["low"][0, 0, 0].tolist() == [0, -1]
    assert state.scores(last)[..., 0].tolist() == [[4.0]]


@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize("chunks", [[50], [1] * 50, [7, 1, 1, 20, 1, 20], [16, 34]])
def test_quest_bounds_every_key_however_it_came(group, chunks):
    keys, q = torch.randn(2, 3, 50, 6), torch.randn(2, 3 * group, 6)
    state, last = fed(methods.Quest(token_budget=64, block_size=8), q, keys, chunks)
    bound = state.scores(last)[..., :7]
    dots = (q.unflatten(1, (3, group)) @ keys.transpose(-1, -2)).amax(2)
    best = torch.nn.functional.pad(dots, (0, 6), value=-torch.inf).unflatten(-1, (7, 8)).amax(-1)
    assert (bound >= best - 1e-5).all()
    whole, last = fed(methods.Quest(token_budget=64, block_size=8), q, keys, [50])
    torch.testing.assert_close(bound, whole.scores(last)[..., :7])
    single, last = fed(methods.Quest(token_budget=64, block_size=1), q, keys, chunks)
    torch.testing.assert_close(single.scores(last)[..., :50], dots, msg="the bound of a page of one key is tight")


def test_quest_takes_the_probabilities_of_a_threshold_at_the_scale_of_attention():
    keys, q = torch.randn(1, 1, 65, 16), torch.randn(1, 2, 16)
    state, last = fed(methods.Quest(threshold=0.05, block_size=8, dense_layers=()), q, keys, [65])
    pages, query = keys[0, :, :64].unflatten(1, (8, 8)), q[0, :, None]
    bounds = torch.maximum(query * pages.amax(2), query * pages.amin(2)).sum(-1).amax(0)
    last.sm_scale = 0.25
    expected = (0.25 * bounds).softmax(0).gt(0.05).nonzero().flatten().tolist()
    assert 1 < len(expected) < 8 and expected != bounds.softmax(0).gt(0.05).nonzero().flatten().tolist()
    selection = state.method.select(state, last)
    assert selection.indices.flatten().tolist() == [*expected, 8]
    last.softcap = 0.5
    capped = 0.5 * torch.tanh(0.25 * bounds / 0.5)
    assert expected != (now := capped.softmax(0).gt(0.05).nonzero().flatten().tolist())
    assert state.method.select(state, last).indices.flatten().tolist() == [*now, 8]
    torch.testing.assert_close(state.logits(last)[0, 0, :8], capped)


@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_oracle_scores_are_the_training_targets(group, with_sinks):
    keys, q = torch.randn(1, 2, 45, 6), torch.randn(1, 2 * group, 6)
    sinks = torch.randn(2 * group) if with_sinks else None
    state, last = fed(methods.Oracle(token_budget=64, block_size=8), q, keys, [45])
    last.sinks = sinks
    scores = state.scores(last)[..., :5].softmax(-1)
    rows, borders = q.expand(45, -1, -1), torch.tensor([0, 45], dtype=torch.int32)
    targets = ops.block_targets(rows, keys[0].transpose(0, 1), borders, 8, 1.0, sinks=sinks)
    torch.testing.assert_close(scores[0], targets[-1, :, :5])


def test_random_is_uniform_and_repeats():
    keys, q = torch.zeros(1, 2, 8 * 40, 4), torch.zeros(1, 2, 4)
    method = methods.Random(token_budget=8 * 10, block_size=8)
    state = method.new_state(spec(keys, 2))
    counts = torch.zeros(2, 40)
    for length in range(8 * 39 + 1, 8 * 40 + 1):
        first, chosen = (method.select(state, step(q, keys[:, :, :length])).indices[0] for _ in range(2))
        counts.scatter_add_(1, chosen.long(), torch.ones(2, 10))
        assert torch.equal(first, chosen)
    assert counts[:, 39].eq(8).all(), "the current block is always read"
    for layer in range(1, 400):
        state.spec = LayerSpec(layer, 1, 2, 2, 4, keys.dtype, keys.device, rotary=None)
        chosen = method.select(state, step(q, keys)).indices[0]
        counts.scatter_add_(1, chosen.long(), torch.ones(2, 10))
    share = counts[:, :39] / counts[:, 39:]
    assert share.mean().item() == pytest.approx(9 / 39)
    assert share.std().item() < 3 * (9 / 39 * 30 / 39 / 407) ** 0.5


@pytest.mark.parametrize("kind", [methods.Random, methods.RandomEvict])
def test_every_seed_that_is_accepted_can_be_hashed(kind):
    for seed in (-(2**43), 2**43):
        random_bits(torch.arange(4)[None], kind(seed=seed).seed, 99, 7)
    with pytest.raises(ValueError, match="seed is 8796093022209; it must be a whole number in"):
        kind(seed=2**43 + 1)


def model_rotary(**rope):
    model = tiny_model("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 100.0} | rope)
    return Rotary(families.decoder_of(model), families.full_attention_modules(model)[0][1], "full_attention")


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_streaming_llm_keeps_sinks_and_recent_tokens(positions):
    """sink 2, recent 3; tokens 0..5 seen and 6 arriving: 0, 1, 4, 5, 6 at positions 0..4, the query at 4."""
    rotary, kept, last_place = model_rotary(), [0, 1, 4, 5, 6], torch.tensor([[4]])
    keys, values, q = torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 4, 16)
    method = methods.StreamingLLM(token_budget=5, sink_tokens=2, positions=positions)
    assert method.stores_pre_rope == (positions == "cache")
    state = method.new_state(LayerSpec(0, 1, 4, 2, 16, torch.float32, torch.device("cpu"), rotary))
    last = step(q, keys, values)
    turned_k, turned_q = keys[:, :, kept], q[:, :, None]
    if positions == "original":
        last.q_pre_BHSD = last.k_pre_BKSD = None  # not needed
    else:
        turned_k, turned_q = rotary.rotate(turned_k, torch.arange(5)[None]), rotary.rotate(turned_q, last_place)
    weights = (turned_q.unflatten(1, (2, 2)) @ turned_k[:, :, None].transpose(-1, -2)).softmax(-1)
    expected = (weights @ values[:, :, None, kept])[..., 0, :].flatten(1, 2)
    torch.testing.assert_close(state.attend(last).output, expected)


def test_published_selection_by_hand():
    """Complete-block logits [.5, 2, -1, 1] and an open block: softmax [.1256, .5630, .0280, .2071, .0762]."""
    scores = torch.tensor([[[0.5, 2.0, -1.0, 1.0, 99.0, 99.0]]])
    for length, rule, expected in (
        (18, {"token_budget": 8}, [0, 1, 3, 4]),
        (18, {"threshold": 0.1}, [0, 1, 3, 4]),
        (18, {"threshold": 0.02}, [0, 1, 2, 3, 4]),
        (20, {"token_budget": 4}, [0, 4]),  # a block that has just closed competes with its own score
    ):
        chosen = published_selection(scores, torch.tensor([length]), 4, DecodeConfig(**rule))
        assert (chosen.indices.tolist(), chosen.counts.tolist()) == ([[expected]], [[len(expected)]])


def test_published_selection_breaks_ties_alike_in_any_batch():
    rule = DecodeConfig(token_budget=16, compat="published")
    alone = published_selection(torch.zeros(1, 1, 4), torch.tensor([30]), 8, rule)
    padded = torch.zeros(2, 1, 9)
    together = published_selection(padded, torch.tensor([30, 70]), 8, rule)
    assert alone.indices[0, 0].tolist() == [i for i in together.indices[0, 0].tolist() if i >= 0] == [0, 1, 3]
