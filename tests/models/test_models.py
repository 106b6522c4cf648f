"""The tiny models themselves: each builds, generates, is reproducible, and pays attention to something."""

import pytest
import torch

from tests.support.models import FAMILIES, PAD, left_padded, prompt, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_builds_and_generates(family: str) -> None:
    model = tiny_model(family)
    assert all(torch.isfinite(p).all() for p in model.parameters()), "a weight was never initialised"
    out = model.generate(prompt(40), max_new_tokens=4)
    assert out.shape == (1, 44)
    again = tiny_model(family)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_far_tokens_matter(family: str) -> None:
    """Otherwise no test on these models could tell a right selection from a wrong one."""
    model = tiny_model(family)
    near = prompt(96)
    far = near.clone()
    far[0, :8] = prompt(8, seed=1)
    difference = (model(near).logits - model(far).logits)[0, -1].abs().max()
    assert difference > 1e-3 * model(near).logits[0, -1].abs().max()


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "gemma3_text", "phi3", "gpt_oss"])
def test_left_padding_changes_nothing_when_dense(family: str) -> None:
    """The premise of the tests that compare batched with single runs."""
    model = tiny_model(family)
    prompts = [prompt(50, seed=1), prompt(23, seed=2)]
    batch = left_padded(prompts)
    assert (batch["input_ids"][1, :27] == PAD).all()
    together = model.generate(**batch, max_new_tokens=6)[:, 50:]
    alone = [model.generate(p, max_new_tokens=6)[:, p.shape[1] :] for p in prompts]
    assert torch.equal(together, torch.cat(alone))


def test_unwritten_memory_is_nan() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()
    assert torch.ones(2).new_empty(3).isnan().all()
    assert torch.empty(3, requires_grad=True).isnan().all()
    assert torch.equal(torch.empty(3, out=torch.ones(3)), torch.ones(3))
