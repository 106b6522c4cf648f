"""Methods on given texts, fed token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seergate.config import GateConfig
from seergate.eval.forced import SETTLING, Forced, pieces
from seergate.eval.settings import MethodSpec, grid, with_each
from seergate.hf.bank import GateBank
from tests.eval import support

PROMPT, STEPS = 40, 8
METHODS = ["dense", "oracle", "gate", "streaming_llm:interval=1", "fast_kvzip:interval=1"]


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 97 for letter in text]}


def test_pieces_are_the_middles_of_texts_that_are_long_enough() -> None:
    texts = ["abcdefg", "xy", "bcdef", "aaaaa", "cdefghi"]
    assert pieces(Letters(), texts, 5).tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [0] * 5, [3, 4, 5, 6, 7]]
    assert pieces(Letters(), texts, 5, most=2).tolist() == [[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def forced() -> Forced:
    model = support.model()
    scorers = {"mine": "attn_gate", "msa": "msa", "fast_kvzip": "fast_kvzip"}
    banks = {name: GateBank.for_model(model, GateConfig(8, 16, scorer=of)) for name, of in scorers.items()}
    ids = torch.randint(0, model.config.vocab_size, (3, PROMPT + SETTLING + STEPS + 1))
    return Forced(model, banks, ids, PROMPT)


@pytest.fixture(scope="module")
def specs(forced: Forced) -> list[MethodSpec]:
    return with_each(grid(METHODS, [16, 32, 128], 8), forced.banks)


def test_what_reads_everything_says_what_dense_attention_says(forced: Forced, specs: list[MethodSpec]) -> None:
    rows = list(forced.at_budgets(specs))
    everything = [row for row in rows if row["budget"] in (None, 128)]
    assert len(everything) == 6 and all(row["kl"] < 1e-6 and row["agreement"] == 1 for row in everything)
    partly = {row["method"]: row["kl"] for row in rows if row["budget"] == 16}
    assert partly.keys() == {"oracle", "gate [mine]", "gate [msa]", "streaming_llm", "fast_kvzip"}
    assert min(partly.values()) > 1e-5
    model, tokens = forced.model, forced.ids
    with torch.inference_mode():
        losses = torch.nn.functional.cross_entropy(
            model(tokens[:, :-1]).logits[:, -STEPS:].flatten(0, 1), tokens[:, -STEPS:].flatten()
        )
    assert rows[0]["perplexity"] == pytest.approx(losses.exp().item(), rel=1e-4)


def test_settings_are_compared_with_the_first_gates_at_the_same_budget(
    forced: Forced, specs: list[MethodSpec]
) -> None:
    rows = {(row["method"], row["budget"]): row for row in forced.at_budgets(specs)}
    assert "kl_minus_gate" not in rows["dense", None] and "kl_minus_gate" not in rows["gate [mine]", 16]
    named, ours = ("gate [msa]", 16), ("gate [mine]", 16)
    other, first = rows[named], rows[ours]
    assert other["kl_minus_gate"] == pytest.approx(other["kl"] - first["kl"])
    each = [forced(spec)[0][:, 0] for spec in specs if (spec.title, spec.token_budget) in (named, ours)]
    error = 4.302653 * float((each[1] - each[0]).std()) / 3**0.5  # Student's t of two degrees of freedom
    assert other["kl_minus_gate_95"] == pytest.approx([other["kl_minus_gate"] - error, other["kl_minus_gate"] + error])


def test_methods_read_the_same_share_or_are_left_out(forced: Forced, specs: list[MethodSpec]) -> None:
    share = 0.55
    dense = forced.row(specs[0], None)["bytes_read_per_step"]
    rows = list(forced.at_bytes(specs, share, 8))
    found = {row["method"]: row["bytes_read_per_step"] / dense for row in rows}
    assert rows[0]["method"] == "gate [mine]" and {"streaming_llm", "fast_kvzip"} < found.keys()
    assert all(abs(each - share) <= 0.1 * share for each in found.values())
    assert "oracle" not in found, "it reads all keys to choose"
    with_mine = [row for row in rows if row["method"] == "streaming_llm"]
    gate = replace(next(spec for spec in specs if spec.name == "gate"), token_budget=rows[0]["budget"])
    assert with_mine[0]["kl_minus_gate"] == pytest.approx(with_mine[0]["kl"] - forced.row(gate, None)["kl"])
