from __future__ import annotations

import pytest
import torch

from seergate.errors import SeergateError
from seergate.eval.engine import Request, generate, render
from seergate.eval.sampling import Sampling, SeededSampling, sample_seed
from tests.eval import support


def run(model, prompts, *, batch_size, max_new_tokens=12, sampling=None):
    batches: list[list] = []
    generate(
        model,
        support.tokenizer(),
        [Request(i, prompt, sample_seed(0, f"p{i}", 0)) for i, prompt in enumerate(prompts)],
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        on_finished=batches.append,
    )
    return batches, {g.request.key: g for batch in batches for g in batch}


PROMPTS = ["a1 1 a2 2", "a1 1 a2 2 a3 3 a4 4 a5 5 a6 6", "a9", "[a7] 3 [a8] 4 a9"]


def test_batches_are_handed_over_longest_first():
    batches, found = run(support.model(), PROMPTS, batch_size=2)
    assert [[g.request.key for g in batch] for batch in batches] == [[1, 3], [0, 2]] or [
        [g.request.key for g in batch] for batch in batches
    ] == [[1, 0], [3, 2]]
    assert [found[i].n_prompt_tokens for i in range(4)] == [4, 12, 1, 5]
    assert all(g.n_tokens == 12 and g.finish_reason == "length" for g in found.values())


def test_a_greedy_answer_does_not_depend_on_its_batch():
    model = support.model()
    _, together = run(model, PROMPTS, batch_size=4)
    _, alone = run(model, PROMPTS, batch_size=1)
    assert {k: g.token_ids for k, g in together.items()} == {k: g.token_ids for k, g in alone.items()}


def test_a_drawn_answer_does_not_depend_on_its_batch():
    model, sampling = support.model(), Sampling(temperature=1.0, top_p=0.95, top_k=50)
    _, together = run(model, PROMPTS, batch_size=4, sampling=sampling)
    _, alone = run(model, PROMPTS[::-1], batch_size=1, sampling=sampling)
    _, again = run(model, PROMPTS, batch_size=3, sampling=sampling)
    tokens = [g.token_ids for _, g in sorted(together.items())]
    assert tokens == [g.token_ids for _, g in sorted(again.items())]
    assert len(set(tokens)) == 4
    assert alone[1].token_ids != together[1].token_ids  # another seed, another draw
    _, greedy = run(model, PROMPTS, batch_size=4)
    assert tokens != [g.token_ids for _, g in sorted(greedy.items())]


def test_the_end_token_ends_an_answer():
    model = support.model()
    _, free = run(model, ["a1 1 a2 2"], batch_size=1)
    end = free[0].token_ids[4]
    model.generation_config.eos_token_id = [end]
    _, found = run(model, ["a1 1 a2 2", "a3 4 5"], batch_size=2)
    first = free[0].token_ids.index(end)
    assert found[0].token_ids == free[0].token_ids[: first + 1]
    assert found[0].finish_reason == "stop"
    assert len(found[0].completion.split()) == first  # the end token is counted but not part of the text


def test_draws_follow_the_softmax():
    scores = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).repeat(4000, 1)
    process = SeededSampling(Sampling(temperature=1.0), list(range(4000)), torch.device("cpu"))
    drawn = process(torch.zeros(4000, 1, dtype=torch.long), scores).argmax(-1)
    share = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(share, torch.softmax(scores[0], 0), atol=0.03, rtol=0)
    assert share[3] == 0


def test_top_k_and_temperature_are_applied():
    scores = torch.tensor([[0.0, 1.0, 2.0, 1.5]]).repeat(300, 1)
    process = SeededSampling(Sampling(temperature=0.7, top_k=2), list(range(300)), torch.device("cpu"))
    assert set(process(torch.zeros(300, 1, dtype=torch.long), scores).argmax(-1).tolist()) == {2, 3}


@pytest.mark.parametrize("field", [{"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"min_p": 1}])
def test_bad_sampling_is_refused(field):
    with pytest.raises(ValueError, match=f"{next(iter(field))} is"):
        Sampling(**field)


def test_a_tokenizer_without_chat_template_is_told():
    tokenizer = support.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(SeergateError, match="no chat template"):
        render(tokenizer, [{"role": "user", "content": "x"}])
