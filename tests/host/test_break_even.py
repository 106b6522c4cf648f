"""``seergate break-even``: from which length on choosing blocks pays, from measured times."""

from __future__ import annotations

import pytest
import torch

import seergate
from seergate import SeergateError, methods
from seergate.cli.main import main
from seergate.eval.calibration import check_auto
from seergate.eval.settings import MethodSpec
from seergate.hf.break_even import break_even, layer_times
from tests.host.test_decode import BLOCK, gates
from tests.models import prompt, tiny_model


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], 0),
        ([(100, 3, 2), (200, 4, 2)], 0),
        ([(100, 1, 2), (200, 1.5, 2)], 200),  # nothing is known of what is longer
        ([(100, 1, 4), (200, 2, 4), (400, 4, 3)], 200 + 2 * 200 // 3),  # two are lost, then one is won
        ([(100, 3, 2), (200, 1, 2), (400, 3, 2), (800, 9, 2)], 200 + 100),  # the longest length that is lost decides
        ([(100, 2, 2), (200, 4, 2)], 100),  # at a tie nothing is won
    ],
)
def test_break_even_worked_out_by_hand(times, expected):
    assert break_even(times) == expected


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma2"])
def test_steps_are_timed_from_the_budget_to_the_longest_context(family):
    """Attention sinks and capped scores are part of what is timed; the caller's random numbers are left alone."""
    model = tiny_model(family, max_position_embeddings=200)
    method = methods.Gate(bank=gates(model), token_budget=4 * BLOCK)
    before = torch.get_rng_state()
    times = layer_times(model, method)
    assert torch.equal(torch.get_rng_state(), before)
    assert [length for length, *seconds in times if min(seconds) > 0] == [48, 96, 192, 200]


def test_where_no_layer_selects_there_is_nothing_to_time(model):
    assert layer_times(model, methods.Oracle(token_budget=128, dense_layers=(0, 1))) == []


def test_the_command_prints_a_number_that_dense_below_takes(model, capsys):
    assert main(["break-even", "--model", "tiny-reasoner", "--budget", "512"]) == 0
    number = int(capsys.readouterr().out.splitlines()[-1].removeprefix("dense_below="))
    with seergate.attached(model, "quest", token_budget=32, dense_below=number):
        model.generate(prompt(40), max_new_tokens=2)


def test_it_is_a_number_now():
    with pytest.raises(ValueError, match="dense_below is 'auto'; it must be a whole number, 0 or greater"):
        seergate.DecodeConfig(dense_below="auto")
    with pytest.raises(SeergateError, match="dense_below is 'auto'"):
        check_auto([MethodSpec("quest", 64, options={"dense_below": "auto"})])
