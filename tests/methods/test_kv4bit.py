"""Rounding to four bits, and the gate on what an evictor leaves. Token for token they are in `evictors`."""

import numpy as np
import pytest
import torch

import seergate
from seergate import methods
from seergate.eval.generation.batch import Batch
from seergate.eval.generation.costs import RowStats
from seergate.methods.base import AttentionOutput
from seergate.methods.h2o import H2OState
from seergate.methods.kv4bit import packed_pairs, rounded, unpacked, widened
from tests.support import naive_views
from tests.support.evictors import model_of
from tests.support.models import prompt
from tests.support.running import invalid, refused


def test_rounding_by_hand():
    keys = torch.tensor([[0.0, 10.0], [15.0, 10.0], [7.4, 10.0]])[None, None, None]  # one group of three tokens
    codes, span = rounded(keys, None)
    assert codes[0, 0, 0].tolist() == [[0, 0], [15, 0], [7, 0]]
    assert span.dtype == torch.float16
    assert span[0, 0, 0].tolist() == [[0.0, 10.0], [1.0, 0.0]]
    assert widened(codes, span, None)[0, 0, 0].tolist() == [[0.0, 10.0], [15.0, 10.0], [7.0, 10.0]]
    codes, span = rounded(keys, 2)  # each token is a group of its own
    assert codes[0, 0, 0].tolist() == [[0, 15], [15, 0], [0, 15]]
    assert span[0, 0, 0, 0, :, 0].tolist() == pytest.approx([0.0, 10.0, 7.4], abs=2e-3)


@pytest.mark.parametrize("width", [1, 7, 16])
@pytest.mark.parametrize("by_token", [False, True])
def test_rounding_against_a_loop(width, by_token):
    x = torch.randn(1, 1, 3, 5, width, dtype=torch.float64) * torch.logspace(-3, 2, width, dtype=torch.float64)
    codes, span = rounded(x, max(n for n in range(1, 6) if width % n == 0) if by_token else None)
    each = codes.shape[-1] // span.shape[-1] if by_token else None
    values = widened(unpacked(packed_pairs(codes), width), span, each)
    for group in range(3):
        expected = x[0, 0, group].numpy().copy()
        if by_token:
            naive_views.rows_in_groups(expected, range(5), 5)
        else:
            expected = np.stack([naive_views.rounded(column) for column in expected.T], axis=1)
        np.testing.assert_allclose(values[0, 0, group].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_narrow_keys_are_rounded_in_float32():
    x = torch.randn(2, 3, 4, 32, 16, dtype=torch.bfloat16)
    assert all(map(torch.equal, rounded(x, None), rounded(x.float(), None)))


@pytest.mark.parametrize("outlier", [-7e4, 1.2e6])
def test_what_float16_cannot_hold_is_refused(outlier):
    """Logits would be NaN; 7e4 is within bfloat16's range."""
    x = torch.zeros(1, 1, 1, 4, 4, dtype=torch.bfloat16)
    x[0, 0, 0, 2, 1] = outlier
    refused("not in the range of float16, in which kv4bit stores minima", rounded, x, None)


def test_bytes_held_and_read_are_those_of_the_tensors():
    model, length, new = model_of(4), 300, 40
    stats = {}
    for name, method in (("dense", methods.Dense()), ("kv4bit", methods.KV4Bit(group=32, residual=32))):
        with seergate.attached(model, method) as handle:
            model.generate(input_ids=prompt(length), max_new_tokens=new)
            stats[name] = handle.stats()
    per_token = 2 * 2 * 16 * 4  # key and value, 2 heads of 16 channels in float32
    packed = 2 * 2 * 8 + 2 * 2 * 2 * 16 / 32 + 2 * 2 * 2 * 16 / 16  # codes; ranges of keys; ranges of values
    ours, theirs = stats["kv4bit"], stats["dense"]
    assert ours["density"] == theirs["density"] == 1.0
    totals = range(length + 1, length + new)
    old = [(total - 1 - 32) // 32 * 32 for total in totals]
    read = 2 * ((sum(totals) - sum(old)) * per_token + sum(old) * packed) / len(totals)  # in two layers
    assert ours["bytes_read_per_step"] == pytest.approx(read, rel=1e-6)
    assert ours["resident_bytes_mean"] < 0.45 * theirs["resident_bytes_mean"]


def test_what_the_gate_cannot_work_on():
    bank = naive_views.gate_for(model_of(4))
    gate, published = (methods.Gate(bank=bank, token_budget=16, compat=compat) for compat in (None, "published"))
    for evictor, chosen, message in (
        (methods.StreamingLLM(), gate, "replace that method's own"),
        (methods.KV4Bit(), gate, "evicts nothing"),
        (methods.GateOnEvictor(evictor=methods.H2O(), gate=gate), gate, "has a gate already"),
        (methods.H2O(), published, "whose code has no eviction"),
    ):
        invalid(message, methods.GateOnEvictor, evictor=evictor, gate=chosen)


def test_gate_on_evictor_by_name():
    bank = naive_views.gate_for(model_of(4))
    made = methods.make_method("snapkv+gate", bank=bank, token_budget=64, window=8, read_budget=32)
    assert (made.evictor, made.gate.token_budget) == (methods.SnapKV(token_budget=64, window=8), 32)
    assert made.nominal == "64, reads 32"
    for name, options, message in (
        ("quest+gate", {"bank": bank, "read_budget": 32}, "only a method that evicts"),
        ("h2o+gate", {"read_budget": 32}, "needs gates: pass bank=GateBank.from_pretrained"),
        ("h2o+gate", {"read_budget": 32, "bank": "org/gates"}, "bank is a str; it must be a GateBank"),
        ("h2o+gate", {"bank": bank}, "needs read_budget="),
        ("h2o+gate", {"bank": bank, "windows": 3}, "no option 'windows'; there are .*read_budget"),
        ("h2", {}, "did you mean 'h2o'"),
        ("h2o", {"bank": bank}, "has no gates"),
    ):
        invalid(message, methods.make_method, name, **options)


def test_reading_less_of_what_is_kept():
    """What the gate leaves out is not read, and the budget bounds it; the evictor holds what it holds alone."""
    model, bank = model_of(4), naive_views.gate_for(model_of(4))
    evictor, stats = methods.SnapKV(token_budget=48, window=6, interval=8), {}
    both = methods.GateOnEvictor(evictor=evictor, gate=methods.Gate(bank=bank, token_budget=16))
    for name, method in (("alone", evictor), ("gate", both)):
        with seergate.attached(model, method) as handle:
            model.generate(input_ids=prompt(60), max_new_tokens=80)
            stats[name] = handle.stats()
    assert stats["gate"]["resident_tokens_per_layer"] == stats["alone"]["resident_tokens_per_layer"]
    steps_mean_context = 60 + 40
    assert stats["gate"]["density"] * steps_mean_context <= 16.5
    assert stats["gate"]["density"] < 0.5 * stats["alone"]["density"]
    assert stats["gate"]["bytes_read_per_step"] < stats["alone"]["bytes_read_per_step"]
    wrong = naive_views.gate_for(model_of(5))
    with pytest.raises(ValueError, match="these gates are for another model"):
        seergate.attach(model, methods.GateOnEvictor(evictor=evictor, gate=methods.Gate(bank=wrong, token_budget=16)))


def test_tokens_in_the_cache_are_counted():
    """Per sample of an evaluation: an evictor's budget, and the rest of its interval on average."""
    model = model_of(4)
    with seergate.attached(model, methods.H2O(token_budget=24, interval=4)) as handle:
        stats = handle.count_with(RowStats)
        batch = Batch(model)
        batch.add([prompt(40, 1)[0].tolist(), prompt(20, 2)[0].tolist()])
        stats.add_rows(2)
        for token in prompt(40, 3)[0].tolist():
            batch.step([token, token])
        cached_tokens = [stats.of(row)["cached_tokens"] for row in range(2)]
    # 25, 26, 27, 28 in turn after an eviction; the second row grows from 21 to 28 first
    assert cached_tokens == [26.5, (sum(range(21, 25)) + 36 * 26.5) / 40]


def test_the_gate_never_drops_an_attention_of_the_evictors_own():
    """Whether the method names its states or makes them itself; such states without an attention are combined."""

    class NewestState(H2OState):
        def attend(self, step):
            return AttentionOutput(torch.zeros_like(step.q_BHSD[:, :, 0]), [1.0] * len(step.ends))

    class Newest(methods.H2O):
        state = NewestState

    class Making(methods.BudgetedMethod):
        name, made = "making", H2OState

        def new_state(self, spec):
            return self.made(spec, methods.H2O(token_budget=24))

    model = model_of(4)
    gate, refusal = methods.Gate(bank=naive_views.gate_for(model), token_budget=16), "would replace that method's own"
    invalid(refusal, methods.GateOnEvictor, evictor=Newest(), gate=gate)
    with seergate.attached(model, methods.GateOnEvictor(evictor=Making(), gate=gate)):
        assert model.generate(input_ids=prompt(20), max_new_tokens=3).shape[1] == 23
        Making.made = NewestState
        refused(refusal, model.generate, input_ids=prompt(20), max_new_tokens=3)
