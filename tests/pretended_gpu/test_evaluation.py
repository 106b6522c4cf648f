"""The evaluation's engine on the pretended GPU answers as on a CPU."""

import copy

import pytest
import torch

from tests.eval.test_engine import LONG, arguments_of, run, tokens
from tests.pretended_gpu.device import pretended
from tests.support import evaluation as support


@pytest.mark.parametrize("method", ["dense", "gate", "h2o"])
def test_answers(method: str) -> None:
    """Rows of different length, which come and go."""
    model = support.model()
    options = {"batch_size": 3, "max_new_tokens": 10}
    torch.manual_seed(0)  # gates are drawn
    want = tokens(run(model, LONG[:5], **options, **arguments_of(method, model)))
    with pretended() as device:
        gpu = copy.deepcopy(model).to(device)
        torch.manual_seed(0)
        got = tokens(run(gpu, LONG[:5], **options, **arguments_of(method, gpu)))
    assert got == want
