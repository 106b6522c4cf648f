"""Inference mode may begin and end between two calls: caches, counters and copies outlive it."""

import pytest
import torch
from transformers import DynamicCache

import seergate
from tests.decode.test_decode import gates
from tests.support.models import prompt


@pytest.mark.parametrize("method", ["gates", "quest", "h2o", "kv4bit"])
def test_inference_mode_may_end_between_two_calls(model, method):
    options = {} if method == "kv4bit" else {"token_budget": 32}
    with seergate.attached(model, gates(model) if method == "gates" else method, **options):

        def texts(first):
            cache = DynamicCache()
            with first:
                model(prompt(60), past_key_values=cache)
                model(prompt(1, 3), past_key_values=cache)
            with torch.no_grad():
                steps = [model(prompt(1, step), past_key_values=cache).logits for step in range(20)]
            return torch.stack(steps)

        assert torch.equal(texts(torch.inference_mode()), texts(torch.no_grad()))


EVERYWHERE = {
    "plain": ({}, {}),
    "rectified": ({"correction": seergate.Rectify(4)}, {}),
    "offloaded": ({"storage": seergate.Offload(1 << 20)}, {}),
    "paged": ({"storage": seergate.Paging()}, {}),
    "static": ({}, {"cache_implementation": "static"}),
    "assisted": ({}, {"prompt_lookup_num_tokens": 3}),
    "beams": ({}, {"num_beams": 2}),
}
"""Options of `attach`, options of `generate`."""


@pytest.mark.parametrize(("way", "method"), [*((way, "gates") for way in EVERYWHERE), ("static", "quest")])
def test_the_whole_of_generate_in_inference_mode(model, method, way):
    attaching, generating = EVERYWHERE[way]
    if method != "gates":
        attaching = {"block_size": 8, **attaching}
    with seergate.attached(model, gates(model) if method == "gates" else method, token_budget=32, **attaching):
        sequences = []
        for inside in (True, False, True):
            with torch.inference_mode(inside):
                sequences.append(model.generate(prompt(60), max_new_tokens=40, **generating).clone())
    assert torch.equal(sequences[0], sequences[1]) and torch.equal(sequences[0], sequences[2])
