"""The tiny models themselves: each pays attention to something."""

import pytest
import torch

from tests.support.models import FAMILIES, prompt, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_far_tokens_matter(family: str) -> None:
    """Otherwise no test on these models could tell a right selection from a wrong one."""
    model = tiny_model(family)
    near = prompt(96)
    far = near.clone()
    far[0, :8] = prompt(8, seed=1)
    difference = (model(near).logits - model(far).logits)[0, -1].abs().max()
    assert difference > 1e-3 * model(near).logits[0, -1].abs().max()


def test_unwritten_memory_is_nan() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()
    assert torch.ones(2).new_empty(3).isnan().all()
    assert torch.empty(3, requires_grad=True).isnan().all()
    assert torch.equal(torch.empty(3, out=torch.ones(3)), torch.ones(3))
