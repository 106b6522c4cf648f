"""Invariant 8 of the evicting methods: scores from attention are computed in float32, whatever the cache holds."""

import pytest
import torch

from seergate import methods
from seergate.models import families
from seergate.models.rope import Rotary
from tests.support.evictors import EVICTORS, attention, model_of
from tests.support.steps import spec, step

UNSCORED = ("streaming_llm", "random_evict", "kv4bit", "fast_kvzip", "trim_kv")
"""Kinds that go by age, by chance, or by something other than attention."""
SCORED = [name for name in EVICTORS if name.split(" ")[0] not in UNSCORED and not name.endswith("and gate")]


def evicting(method, q_BHSD, k_BKSD, prompt, rotary=None):
    """The state after these queries and keys, ``prompt`` of them at once; tokens ``[K, T]`` after each eviction."""
    kv_heads, width = k_BKSD.shape[1], k_BKSD.shape[3]
    state = method.new_state(spec(k_BKSD, q_BHSD.shape[1], rotary))
    keys, tokens_KT, left = k_BKSD[:, :, :0], torch.zeros(kv_heads, 0, dtype=torch.long), []
    for first, last in [(0, prompt), *((i, i + 1) for i in range(prompt, k_BKSD.shape[2]))]:
        keys = torch.cat((keys, k_BKSD[:, :, first:last]), 2)
        tokens_KT = torch.cat((tokens_KT, torch.arange(first, last).expand(kv_heads, -1)), 1)
        now = step(q_BHSD[:, :, first:last], keys, new=last - first, sm_scale=width**-0.5)
        state.append(now)
        if last - first == 1:
            attention(state, now)
        eviction = state.select_kept(now)
        if eviction is not None:
            index_KT = eviction.index[0, :, : eviction.lengths[0]]
            tokens_KT = tokens_KT.gather(1, index_KT)
            keys = keys.gather(2, index_KT[None, ..., None].expand(-1, -1, -1, width))
            state.on_evict(eviction, keys.shape[2])
            left.append(tokens_KT)
    return state, left


@pytest.mark.parametrize("name", SCORED)
def test_a_cache_in_half_precision_loses_the_same_tokens(name):
    """The tokens that a cache with the same numbers in float32 loses, at every eviction in 240 steps. The inputs are
    such that bfloat16 scores, of three digits, choose otherwise; H2O's sums need later keys that draw more attention.
    """
    seed, trend = (4, 4) if name == "h2o" else (2, 0)
    random, model = torch.Generator().manual_seed(seed), model_of(4)
    q, k = (torch.randn(1, heads, 280, 16, generator=random) for heads in (8, 2))
    q[..., 0] += trend / 2
    k[..., 0] += torch.linspace(0, trend, 280)
    q, k = q.bfloat16(), k.bfloat16()
    _, attention = families.full_attention_modules(model)[0]
    rotary = Rotary(families.decoder_of(model), attention, "full_attention")
    method = EVICTORS[name].method(model)
    _, half = evicting(method, q, k, 40, rotary)
    _, whole = evicting(method, q.float(), k.float(), 40, rotary)
    assert len(whole) >= 19
    assert [tokens_KT.tolist() for tokens_KT in half] == [tokens_KT.tolist() for tokens_KT in whole]


def test_the_mass_of_h2o_does_not_stall_in_half_precision():
    """600 queries that attend evenly to 9 residents: in float16 the sum would be off by an eighth."""
    q = k = torch.zeros(1, 1, 608, 4, dtype=torch.float16)
    state, left = evicting(methods.H2O(token_budget=8, recent_tokens=1), q, k, 8)
    assert left[-1][0, 0] == 0, "the token that all have seen is the heaviest"
    expected = sum(1 / n for n in range(1, 9)) + 600 / 9
    assert state.rows["mass"][0, 0, 0].item() == pytest.approx(expected, rel=1e-5)
