"""``dense_below="auto"``: a break-even length from measured times, remembered per machine, used like any number."""

from __future__ import annotations

import json

import pytest
import torch

import seergate
from seergate import DecodeConfig, SeergateError, methods
from seergate.cache.static import FixedLayer
from seergate.decode.break_even import break_even, remembered
from seergate.eval.calibration import check_auto
from seergate.eval.settings import MethodSpec
from tests.host.test_decode import BLOCK, gates, tokens
from tests.models import prompt, tiny_model

ABOUT = {"machine": "this one", "threads": 1}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "seergate" / "break_even"


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], 0),
        ([(100, 3, 2), (200, 4, 2)], 0),
        ([(100, 1, 2), (200, 1.5, 2)], 200),  # nothing is said of what is longer
        ([(100, 1, 4), (200, 2, 4), (400, 4, 3)], 200 + 2 * 200 // 3),  # two are lost, then one is won
        ([(100, 3, 2), (200, 1, 2), (400, 3, 2), (800, 9, 2)], 200 + 100),  # the longest length that is lost decides
        ([(100, 2, 2), (200, 4, 2)], 100),  # at a tie nothing is won
    ],
)
def test_break_even_worked_out_by_hand(times, expected):
    assert break_even(times) == expected


def counted(calls, number=300):
    """Times that break even at ``number``."""
    return lambda: calls.append(number) or [(number - 100, 1.0, 2.0), (number + 100, 3.0, 2.0)]


def test_it_is_measured_once_for_each_machine_and_shape(folder):
    calls = []
    assert [remembered(ABOUT, counted(calls)) for _ in range(3)] == [300] * 3 and len(calls) == 1
    assert remembered({**ABOUT, "threads": 2}, counted(calls, 500)) == 500
    assert remembered(ABOUT, counted(calls)) == 300 and len(calls) == 2
    records = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert sorted(record["dense_below"] for record in records) == [300, 500]
    assert ABOUT in [record["about"] for record in records]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "{}", "\0", '{"dense_below": 7}', '{"dense_below": 7, "about": {"machine": "another"}}'),
        *(json.dumps({"dense_below": number, "about": ABOUT}) for number in (-1, True, 1.5, None)),
    ],
)
def test_a_file_that_cannot_be_used_is_replaced(folder, text):
    calls = []
    remembered(ABOUT, counted(calls))
    (path,) = folder.iterdir()
    path.write_text(text)
    assert [remembered(ABOUT, counted(calls)) for _ in range(2)] == [300, 300] and len(calls) == 2
    assert json.loads(path.read_text())["dense_below"] == 300 and list(folder.iterdir()) == [path]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    calls = []
    assert [remembered(ABOUT, counted(calls)) for _ in range(2)] == [300, 300] and len(calls) == 2


def test_a_quicker_process_decides_for_all(folder):
    def slowly():
        remembered(ABOUT, counted([], 500))
        return counted([])()

    assert remembered(ABOUT, slowly) == 500


def method_of(model, name, bank=None, **options):
    if name == "gate":
        return methods.Gate(bank=bank or gates(model), token_budget=2 * BLOCK, **options)
    return methods.Quest(token_budget=2 * BLOCK, block_size=BLOCK, dense_layers=(0,), **options)


@pytest.mark.parametrize("name", ["gate", "quest"])
def test_attaching_measures_and_then_decodes_as_with_that_number(folder, name):
    model = tiny_model("qwen3", max_position_embeddings=200)
    bank = gates(model)
    method, before = method_of(model, name, bank, dense_below="auto"), torch.get_rng_state()
    with seergate.attached(model, method) as handle:
        found = handle.method.dense_below
    assert torch.equal(torch.get_rng_state(), before), "what the caller draws is not disturbed"
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    lengths = [length for length, *seconds in record["tokens_dense_sparse_seconds"] if min(seconds) > 0]
    assert lengths == [24, 48, 96, 192, 200] and found == break_even(record["tokens_dense_sparse_seconds"])
    assert 0 <= found <= 200 and f"dense_below={found}" in repr(handle.method)
    assert method.dense_below == "auto" and method.rule.dense_below == "auto"

    path.write_text(json.dumps({**record, "dense_below": 30}))  # as a machine may have it: some steps dense, some not
    with seergate.attached(model, method) as handle:
        one = handle.method
        assert one.dense_below == one.rule.dense_below == 30
    with seergate.attached(model, method) as handle:
        assert handle.method is one, "so that a cache goes on"
    question = {"input_ids": prompt(24)}
    got, logits = tokens(model, method, question, new=14)
    want, same = tokens(model, method_of(model, name, bank, dense_below=30), question, new=14)
    sparse = tokens(model, method_of(model, name, bank), question, new=14)[1]
    assert torch.equal(got, want) and torch.equal(logits, same)
    assert (sparse - logits).abs().amax(-1)[0, 1:6].min() > 1e-3, "dense there"


def test_another_shape_is_measured_anew(folder):
    method = methods.Oracle(token_budget=16, block_size=BLOCK, dense_below="auto")
    for options in ({}, {"dtype": torch.bfloat16}, {"num_key_value_heads": 1}):
        with seergate.attached(tiny_model("qwen3", max_position_embeddings=64, **options), method):
            pass
    with seergate.attached(tiny_model("qwen3", max_position_embeddings=64, seed=1), method):
        pass
    assert len(list(folder.iterdir())) == 3


def test_models_with_sinks_and_softcaps(folder):
    for family in ("gpt_oss", "gemma2"):
        model = tiny_model(family, max_position_embeddings=64)
        with seergate.attached(model, method_of(model, "gate", dense_below="auto")):
            pass
    extras = [json.loads(path.read_text())["about"]["extras"] for path in folder.iterdir()]
    assert sorted(extras) == [["sinks"], ["softcap"]]


def test_layers_that_are_all_dense_need_no_measurement(folder):
    model = tiny_model("qwen3")
    with seergate.attached(model, "oracle", token_budget=64, dense_layers=(0, 1), dense_below="auto") as handle:
        assert handle.method.dense_below == 0 and not folder.exists()


def test_a_static_cache_is_decoded_in_ordinary_steps(folder):
    """With a number that is not 0 a step depends on the rows' lengths."""
    model = tiny_model("qwen3", max_position_embeddings=64)
    method = method_of(model, "gate", dense_below="auto")
    assert not method.fixed_shapes
    with seergate.attached(model, method):
        pass
    (path,) = folder.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "dense_below": 30}))
    with seergate.attached(model, method):
        out = model.generate(
            prompt(24), max_new_tokens=14, cache_implementation="static", return_dict_in_generate=True
        )
        assert not any(isinstance(layer, FixedLayer) for layer in out.past_key_values.layers)
        assert torch.equal(out.sequences, model.generate(prompt(24), max_new_tokens=14))


def test_refusals(folder):
    model = tiny_model("qwen3")
    bank = gates(model)
    paging, offload = seergate.hf.attach.Paging(), seergate.Offload(1 << 22)
    for attempt, message in (
        (lambda: DecodeConfig(dense_below="soon"), 'dense_below is .soon.; it must be 0 or .* tokens, or "auto"'),
        (lambda: DecodeConfig(threshold=0.1, dense_below="auto"), 'dense_below is "auto" without a token budget'),
        (lambda: seergate.attach(model, bank, dense_below="auto", compat="published"), "nor dense_below"),
        (lambda: seergate.attach(model, bank, dense_below="auto", paging=paging), "times ordinary caches"),
        (lambda: seergate.attach(model, bank, dense_below="auto", offload=offload), "times ordinary caches"),
        (lambda: check_auto([MethodSpec("quest", 64, options={"dense_below": "auto"})]), "dense_below is 'auto'"),
    ):
        with pytest.raises((ValueError, SeergateError), match=message):
            attempt()
    assert not folder.exists()
