"""What seergate asks PyTorch for in an eager decode step, counted per layer; a count needs no quiet machine."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import seergate
from seergate import GateBank, GateConfig
from tests.support.models import prompt, tiny_model

ROOT, BLOCK, BUDGET, LENGTH = str(Path(seergate.__file__).parent), 8, 32, 75
QUEST = {"block_size": BLOCK, "dense_layers": ()}
CASES = [
    ("gates", 1, False, 54, 28, {}),
    ("gates", 16, False, 55, 29, {}),
    ("gates", 16, True, 58, 32, {}),
    ("gates with norm", 1, False, 60, 34, {}),
    ("gates with norm", 16, True, 64, 38, {}),
    ("quest", 1, False, 50, 24, QUEST),
    ("quest", 16, True, 58, 35, QUEST),
    ("h2o", 16, False, 36, 22, {}),
    ("h2o", 16, True, 37, 22, {}),
    ("h2o", 16, True, 40, 25, {"token_budget": LENGTH + 1}),  # some rows evict, others have room
    ("tova", 16, True, 34, 18, {}),
    ("streaming_llm", 1, False, 36, 16, {}),
    ("streaming_llm", 16, True, 37, 17, {}),
]
"""Method, rows, whether their lengths differ; the most operators per layer, those of them that compute (are not
views), and options."""


class Counting(TorchDispatchMode):
    """Counts the operators that code of seergate asks for, all and those that are not views."""

    def __init__(self):
        super().__init__()
        self.all = self.computing = 0
        self.where = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(ROOT):
            frame = frame.f_back
        if frame is not None:
            first = out[0] if isinstance(out, (tuple, list)) and out else out
            given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            in_place = str(function).split(".")[1].endswith("_")
            shares = isinstance(first, torch.Tensor) and first.untyped_storage().data_ptr() in given
            self.all += 1
            self.computing += not (shares and not in_place)
            self.where[f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_lineno}"] += 1
        return out


@torch.no_grad()
def counted(model, rows, ragged):
    ids = torch.cat([prompt(LENGTH, seed) for seed in range(rows)])
    mask = torch.ones(rows, LENGTH + 4, dtype=torch.long)
    for row in range(rows if ragged else 0):
        mask[row, : row % 5] = 0
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=mask[:, :LENGTH], past_key_values=cache)
    for step in range(3):
        model(ids[:, :1], attention_mask=mask[:, : LENGTH + step + 1], past_key_values=cache)
    with Counting() as count:
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
    return count


@pytest.mark.parametrize(("name", "rows", "ragged", "most", "computing", "options"), CASES)
def test_operators_per_layer(name, rows, ragged, most, computing, options):
    layers = 30
    model = tiny_model("qwen3", num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    gates = GateBank.for_model(model, GateConfig(block_size=BLOCK, gate_dim=16, qk_norm="norm" in name))
    with seergate.attached(model, gates if "gates" in name else name, **{"token_budget": BUDGET} | options):
        count = counted(model, rows, ragged)

    assert count.all <= most * layers, count.where.most_common()
    assert count.computing <= computing * layers, count.where.most_common()
