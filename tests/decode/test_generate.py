"""The ways of stock `generate` under a method: what is drawn, searched, streamed and piped is what it should be."""

import warnings

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, pipeline

import seergate
from seergate.paths import shipped
from tests.decode.test_decode import BLOCK, gates
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.running import refused

EVERYTHING, LITTLE = 4096, 2 * BLOCK
"""Token budgets."""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(shipped("checkpoints/tiny-reasoner"))


@pytest.fixture(scope="module")
def speaker(tokenizer):
    """A random model with the tokenizer's vocabulary, which does not stop by itself; and gates for it."""
    torch.manual_seed(0)
    model = tiny_model("qwen3", vocab_size=len(tokenizer), eos_token_id=None)
    return model, gates(model)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 1.5},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0, "top_p": 0.9},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_what_is_drawn_is_what_the_plain_model_draws(speaker, options):
    """From the same random numbers, with a budget for everything; with a small one something else, the same twice."""
    model, bank = speaker
    inputs = left_padded([prompt(30, 1), prompt(47, 2)])

    def generate():
        torch.manual_seed(7)
        return model.generate(**inputs, max_new_tokens=12, **options)

    plain = generate()
    assert plain.shape == (2 * options.get("num_return_sequences", 1), 47 + 12)
    with seergate.attached(model, bank, token_budget=EVERYTHING):
        assert torch.equal(generate(), plain)
    with seergate.attached(model, bank, token_budget=LITTLE) as handle:
        little = generate()
        assert torch.equal(generate(), little) and not torch.equal(little, plain)
        assert handle.stats()["density"] < 0.6
    if options.get("num_return_sequences") == 3:
        assert len({tuple(row.tolist()) for row in plain[:3]}) == 3, "the samples of a prompt differ"


def test_a_pipeline_says_what_generate_says(speaker, tokenizer):
    model, bank = speaker
    question = "[a1] 3 [a2] a1 4 [a3] a2 5 [a4] a3 1 answer start a4:"
    eight = GenerationConfig(max_new_tokens=8)

    def piped():
        says = pipeline("text-generation", model=model, tokenizer=tokenizer)
        (output,) = says(question, generation_config=eight, clean_up_tokenization_spaces=False)
        assert output["generated_text"].startswith(question)
        return output["generated_text"].removeprefix(question).strip()

    plain = piped()
    with seergate.attached(model, bank, token_budget=EVERYTHING):
        assert piped() == plain
    with seergate.attached(model, bank, token_budget=2 * BLOCK):
        little = piped()
        inputs = tokenizer(question, return_tensors="pt")
        output = model.generate(**inputs, generation_config=eight)[0, inputs["input_ids"].shape[1] :]
    assert little == tokenizer.decode(output, skip_special_tokens=True).strip() != plain


def test_without_a_cache_the_method_has_no_effect_and_that_is_said(speaker):
    model, bank = speaker
    options = {"input_ids": prompt(30), "max_new_tokens": 6}
    plain = model.generate(**options)
    with seergate.attached(model, bank, token_budget=2 * BLOCK) as handle:
        with pytest.warns(UserWarning, match="use_cache=False, so the attached method has nothing to choose from"):
            assert torch.equal(model.generate(**options, use_cache=False), plain)
        assert handle.stats()["steps"] == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not torch.equal(model.generate(**options), plain)
            model(input_ids=prompt(30), use_cache=False)  # the way to score a text densely
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("default")
            for _ in range(3):
                model.generate(**options, use_cache=False)
        assert len(records) == 1, "once, not at every call"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**options, use_cache=False)  # the plain model has nothing to say


def test_an_offloaded_cache_of_transformers_is_refused_with_the_one_there_is():
    model = tiny_model("qwen3")
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # the argument makes a CUDA stream, which builds for CUDA refuse without a driver
    with seergate.attached(model, "quest", token_budget=16, block_size=8):
        refused(r"attach with storage=seergate\.Off", model, prompt(20), past_key_values=cache)
