"""The proxies: windows of reference answers are reached as in decoding."""

import pytest
import torch

import seergate
from seergate import methods
from seergate.eval import proxies
from seergate.eval.generation.batch import Batch
from seergate.eval.proxies import WINDOW_TOKENS, Window, _decoded, measure_proxies, windows_of
from tests.support import evaluation as support
from tests.support.models import prompt, tiny_model


def window(prompt_tokens, answer_tokens, seed):
    tokens = prompt(prompt_tokens + answer_tokens + WINDOW_TOKENS + 1, seed)[0].tolist()
    cut = prompt_tokens + answer_tokens
    return Window(tokens[:cut], tokens[cut:], prompt_tokens)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])  # rows of the second cannot join a batch
@pytest.mark.parametrize("replayed", [0, 9, 1024])
@torch.inference_mode()
def test_a_window_is_reached_as_in_decoding(family, replayed):
    model = tiny_model(family)
    windows = [window(20, 31, 1), window(33, 0, 2), window(11, 31, 3), window(16, 4, 4)]
    with seergate.attached(model, methods.H2O(token_budget=16, interval=3)):
        logits_by_window = {id(w): logits for w, logits in _decoded(model, windows, replayed)}
        assert len(logits_by_window) == len(windows)
        for w in windows:
            one_by_one = w.context[max(w.prompt, len(w.context) - replayed) :] if replayed else []
            batch = Batch(model)
            batch.add([w.context[: len(w.context) - len(one_by_one)]])
            for token in one_by_one:
                batch.step([token])
            expected = torch.stack([batch.step([token])[0] for token in w.tokens[:WINDOW_TOKENS]])
            torch.testing.assert_close(logits_by_window[id(w)], expected, rtol=1e-4, atol=1e-4)


TOKENIZER = support.tokenizer()
WORDS = [word for word in TOKENIZER.get_vocab() if not word.startswith("<")]


def test_a_method_that_pins_the_prompt_is_seen_to_evict():
    """All of the context as a prompt would be kept, and random eviction would look like dense attention."""
    answers = [" ".join(WORDS[(7 * i + j) % len(WORDS)] for j in range(90)) for i in range(4)]
    reference = [{"prompt": " ".join(WORDS[i : i + 12]), "completion": answer} for i, answer in enumerate(answers)]
    assert all(w.prompt == 12 and w.context[:12] for w in windows_of(TOKENIZER, reference))
    with seergate.attached(support.model(), methods.RandomEvict(token_budget=24, interval=4)) as handle:
        figures = measure_proxies(handle, TOKENIZER, reference)
    assert figures["next_token_kl"] > 1e-3 and figures["recall"] is None


@pytest.mark.parametrize(
    "method", [methods.Quest(token_budget=16, block_size=8, dense_layers=()), methods.H2O(token_budget=16, interval=4)]
)
def test_figures_do_not_depend_on_how_many_windows_are_decoded_together(method, monkeypatch):
    calls = []
    monkeypatch.setattr(proxies, "_decoded", lambda *arguments: calls.append(1) or _decoded(*arguments))
    reference = [
        {"prompt": " ".join(WORDS[i : i + 12]), "completion": " ".join(WORDS[7 * i : 7 * i + 60 + i])}
        for i in range(7)
    ]
    with seergate.attached(support.model(), method) as handle:
        one, some, more = (measure_proxies(handle, TOKENIZER, reference, rows) for rows in (1, 3, 16))
    assert one["next_token_kl"] > 1e-3 and len(calls) == 7 + 3 + 1
    for name in ("next_token_kl", "next_token_kl_p99", "perplexity", "agreement", "recall"):
        expected = pytest.approx(one[name] or 0, rel=1e-4)
        assert (some[name] or 0) == expected and (more[name] or 0) == expected


def test_windows_are_of_as_many_problems_as_there_are():
    reference = [
        {"prompt": WORDS[i], "completion": " ".join(WORDS[:90]), "problem_id": str(i), "sample_idx": sample}
        for i in range(10)
        for sample in range(16)
    ]
    firsts = [window.context[0] for window in windows_of(TOKENIZER, reference)]
    assert len(set(firsts[:10])) == 10


def test_of_a_short_answer_the_end_of_prompt_and_answer_is_measured():
    reference = [{"prompt": " ".join(WORDS[i : i + 60]), "completion": " ".join(WORDS[i : i + 3])} for i in range(2)]
    for i, proxy_window in enumerate(windows_of(TOKENIZER, reference)):
        ids = TOKENIZER.convert_tokens_to_ids([*WORDS[i : i + 60], *WORDS[i : i + 3]])
        assert proxy_window.context + proxy_window.tokens == ids and len(proxy_window.tokens) == WINDOW_TOKENS + 1
    with seergate.attached(support.model(), "quest", token_budget=16, block_size=8, dense_layers=()) as handle:
        assert 0 < measure_proxies(handle, TOKENIZER, reference)["recall"] < 1
        with pytest.warns(UserWarning, match="no recall was measured: prompts and answers are shorter than a window"):
            assert measure_proxies(handle, TOKENIZER, [{"prompt": WORDS[0], "completion": WORDS[1]}]) is None
