"""The record of the tokens that evicting methods keep, against attention and the simulations."""

import pytest
import torch

import seergate
from seergate.eval.papers.kept import drawn_layer, kept_tokens
from tests.support.evictors import EVICTORS, model_of
from tests.support.models import prompt
from tests.support.naive import RaaS, Simulation


@pytest.mark.parametrize("name", EVICTORS)
def test_the_record_of_what_is_kept_is_what_attention_saw(name):
    model = model_of(4)
    ids, method = prompt(30, 5), EVICTORS[name].method(model)
    kept = kept_tokens(model, method, ids[0].tolist(), max_new_tokens=50)
    assert (kept.prompt, kept.tokens) == (30, 79)
    resident = kept.resident(1, 0)
    assert resident.shape == (49, 79)
    per_layer = kept.summary()["resident_tokens_per_layer"]
    for layer in range(2):
        assert per_layer[layer] == pytest.approx(kept.resident(layer, 1).sum(1).mean())
    assert not (resident[1:] & ~resident[:-1])[:, :30].any(), "what has left does not come back"
    if EVICTORS[name].pins_prompt:
        assert resident[:, :30].all()


def test_the_layer_that_is_drawn():
    chosen = [drawn_layer(heads) for heads in ({0: 2, 1: 2}, {0: 2, 2: 2, 5: 2}, {5: 2}, {0: 2})]
    assert chosen == [1, 2, 5, 0]


def test_the_record_agrees_with_the_simulation():
    model, ids = model_of(4, torch.float64), prompt(30, 5)
    kept = kept_tokens(model, EVICTORS["raas"].method(model), ids[0].tolist(), max_new_tokens=60)
    with seergate.attached(model, EVICTORS["raas"].method(model)):
        generated = model.generate(input_ids=ids, max_new_tokens=60)[0, 30:]
    with Simulation(model, RaaS(24, 4)) as simulation, torch.inference_mode():
        simulation.logits(ids, generated[:-1])
    for layer, past in simulation.layers.items():
        for head in range(2):
            assert ((kept.lifetimes(layer, head) > kept.tokens) == past.alive[head]).all()
