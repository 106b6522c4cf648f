"""Given text, scored as if it had been generated."""

import warnings

import pytest
import torch

import seergate
from seergate import GateBank, GateConfig
from seergate.cache.forward import VERIFIED_TOKENS
from tests.support.decoding import Decoding
from tests.support.models import prompt, tiny_model
from tests.support.reasoning import Words, repeating
from tests.support.running import invalid, refused

LENGTH, START = 30 + 2 * VERIFIED_TOKENS + 7, 30


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3").double()


def one_by_one(model, ids, start):
    """Log-probabilities ``[B, S - start]`` by a loop over single tokens."""
    rows = Decoding(model, ids[:, :start])
    logits = [rows.logits[:, -1:], *(rows.read(ids[:, i : i + 1]) for i in range(start, ids.shape[1] - 1))]
    log_probs = torch.cat(logits, 1).float().log_softmax(-1)
    return log_probs.gather(-1, ids[:, start:, None])[..., 0]


METHODS = {
    "quest": {"token_budget": 16, "block_size": 8, "dense_layers": ()},
    "oracle": {"token_budget": 16, "block_size": 8},
    "gate": {"token_budget": 16},
    "h2o": {"token_budget": 20, "interval": 4},
    "dense": {},
}


@torch.no_grad()
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("start", [1, START, LENGTH - 1])
def test_it_is_what_decoding_token_by_token_says(model, name, start):
    method = GateBank.for_model(model, GateConfig(8, 16)).double() if name == "gate" else name
    ids = torch.cat([prompt(LENGTH, 1), prompt(LENGTH, 2)])
    with seergate.attached(model, method, **METHODS[name]) as handle:
        expected, steps = one_by_one(model, ids, start), handle.stats()
        handle.reset_stats()
        scores = seergate.score(model, ids, start=torch.tensor(start), logits=True)  # as from mask.sum()
        assert scores.log_probs.shape == (2, LENGTH - start) and scores.logits.shape[:2] == (2, LENGTH - start)
        torch.testing.assert_close(scores.log_probs, expected, rtol=0, atol=1e-6)
        counted = handle.stats()
        assert counted["steps"] == steps["steps"] and counted["density"] == steps["density"], "the same choices"
    dense = seergate.score(model, ids, start=start).log_probs
    assert (name == "dense" or start > START) == bool((scores.log_probs - dense).abs().max() < 1e-5)


@torch.no_grad()
def test_blocks_are_shared_before_the_next_token(model):
    ids = repeating(7, 12)
    with seergate.attached(model, "reason_cache", tokenizer=Words(), block_size=4, warm_up=0) as handle:
        expected = one_by_one(model, ids, 5)
        assert handle.stats()["sharing"]["shared_blocks"] > 5
        torch.testing.assert_close(seergate.score(model, ids, start=5).log_probs, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_padding_on_either_side_changes_nothing(model):
    ids, mask = torch.cat([prompt(LENGTH, 3), prompt(LENGTH, 4)]), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :9], mask[1, LENGTH - 11 :] = 0, 0
    with seergate.attached(model, "quest", **METHODS["quest"]):
        log_probs = seergate.score(model, ids, mask, start=START).log_probs
        first = seergate.score(model, ids[:1, 9:], start=START - 9).log_probs
        second = seergate.score(model, ids[1:, : LENGTH - 11], start=START).log_probs
    torch.testing.assert_close(log_probs[:1], first, rtol=0, atol=1e-6)
    torch.testing.assert_close(log_probs[1:, :-11], second, rtol=0, atol=1e-6)
    assert log_probs[1, -11:].isnan().all() and not log_probs[0].isnan().any()


@pytest.mark.parametrize(
    ("mask", "start", "said"),
    [
        (None, 0, r"start is 0; it must be a tensor \[B, S\], start 1..S - 1"),
        (None, 8, "start is 8"),
        ([1] * 7, 4, r"attention_mask has the shape \(1, 7\)"),
        ([1, 1, 0, 1, 1, 1, 1, 1], 4, "padding inside of a row"),
        ([1, 1, 1, 1, 1, 0, 1, 1], 4, "padding inside of a row"),
        ([0, 0, 0, 0, 1, 1, 1, 1], 4, "padding inside of a row, or right at start, 4"),
    ],
)
def test_mistakes_are_told(model, mask, start, said):
    invalid(said, seergate.score, model, prompt(8), None if mask is None else torch.tensor([mask]), start=start)
    invalid(r"input_ids has the shape \(\)", seergate.score, model, [[5] * 8], start=4)


def test_a_model_in_training_mode_is_refused():
    """Its dropout would make the scores random."""
    model = tiny_model("qwen3", attention_dropout=0.5).train()
    refused("training mode", seergate.score, model, prompt(8), start=4)
    model.eval().model.layers[1].train()
    refused("training mode", seergate.score, model, prompt(8), start=4)
    assert torch.isfinite(seergate.score(model.eval(), prompt(8), start=4).log_probs).all()


@torch.no_grad()
def test_rectified_text_is_scored_token_by_token(model):
    ids = prompt(LENGTH, 5)
    with seergate.attached(model, "quest", **METHODS["quest"], correction=seergate.Rectify(8)) as handle:
        expected = one_by_one(model, ids, START)
        torch.testing.assert_close(seergate.score(model, ids, start=START).log_probs, expected, rtol=0, atol=1e-6)
        assert handle.stats()["rectification"]["passes"] > 2
        cache = model(ids[:, :START], use_cache=True).past_key_values
        with handle.passes.forced("decode"):
            refused("33 tokens are to be decoded", model, ids[:, START : START + 33], past_key_values=cache)
    with seergate.attached(model, "h2o", token_budget=32) as handle:
        for mode in ("decode", "dense"):  # a dense pass would read neither evicted nor quantised tokens
            refused(f"evicts decodes one token per pass, so '{mode}' cannot", handle.passes.forced, mode)
        invalid("mode is 'decoding'; it must be 'dense' or 'decode'", handle.passes.forced, "decoding")


@torch.no_grad()
def test_a_loss_of_many_tokens_is_told_to_be_dense(model):
    ids = prompt(60)
    with seergate.attached(model, "quest", token_budget=128):
        with pytest.warns(UserWarning, match="read densely.*says nothing of 'quest'; seergate.score"):
            model(ids, labels=ids)
        with warnings.catch_warnings():  # once
            warnings.simplefilter("error")
            model(ids, labels=ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, labels=ids)  # the plain model
        with seergate.attached(model, "quest", token_budget=128):
            model(ids)


@torch.no_grad()
def test_rope_that_changes_with_the_length():
    """Padding behind a row does not count, and a longer text is refused."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    changing = tiny_model("qwen3", rope_parameters=rope, max_position_embeddings=64)
    rows = [prompt(64, 1), prompt(40, 2)]
    ids, mask = torch.zeros(2, 2, 90, dtype=torch.long)
    for row, (text, first) in enumerate(zip(rows, (0, 24), strict=True)):  # the first 60 slots are read as prompts
        ids[row, first : first + text.shape[1]], mask[row, first : first + text.shape[1]] = text[0], 1
    with seergate.attached(changing, "quest", **METHODS["quest"] | {"token_budget": 512}):
        log_probs = seergate.score(changing, ids, mask, start=60).log_probs
        for row, (text, start) in enumerate(zip(rows, (60, 36), strict=True)):
            alone = changing(text, use_cache=False).logits.log_softmax(-1)[0, start - 1 : -1]
            expected = alone.gather(-1, text[0, start:, None])[:, 0]
            torch.testing.assert_close(log_probs[row, : len(expected)], expected, rtol=1e-4, atol=1e-4)
        refused("a text has 65 tokens; the model's dynamic RoPE", seergate.score, changing, prompt(65), start=10)
