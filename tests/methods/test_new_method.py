"""The methods of docs/write_a_method.md: code and command as they stand, held to what all methods are held to."""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml

import seergate
from seergate import methods
from seergate.cli.main import main
from seergate.decode.stats import DecodeStats
from seergate.eval.calibration.calibrator import FRESH, Calibration
from seergate.eval.report.plots import style
from seergate.methods import registry
from seergate.serving.common.settings import check_served
from tests.methods.test_evicting import against_simulation
from tests.support import naive
from tests.support.evictors import EVICTORS, C, Evictor, model_of
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.running import refused
from tests.test_house import ROOT, code_blocks, shell_lines

PAGE = ROOT / "docs" / "write_a_method.md"


class NaiveShortKeys(naive.Budgeted):
    def scores(self, past, head):
        return -np.sqrt((past.keys[:, head] ** 2).sum(-1))


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The page's module, where a reader would have saved it."""
    (tmp_path / "my_methods.py").write_text("\n\n".join(code_blocks(PAGE, "python")))
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(registry.PLUGINS, "")
    before = dict(methods.METHODS)
    yield tmp_path
    methods.METHODS.clear()
    methods.METHODS.update(before)
    sys.modules.pop("my_methods", None)


@pytest.fixture
def theirs(written):
    methods.load_plugins("my_methods")
    return SimpleNamespace(**vars(sys.modules["my_methods"]))


def test_the_documented_command(written, capsys):
    (line,) = (line for block in code_blocks(PAGE, "bash") for line in shell_lines(block) if line)
    small = ["--problems", "2", "--variables", "5", "--max-new-tokens", "24", "--out", "runs"]
    assert main([*shlex.split(line)[1:], *small, "--no-report"]) == 0
    metrics = {path.parent.name: json.loads(path.read_text()) for path in written.glob("runs/*/metrics.json")}
    assert set(metrics) == {"dense", "mean_key-64", "short_keys-64-interval=8"}
    for name, values in metrics.items():
        assert values["density"] == 1 if name == "dense" else values["density"] < 1
    assert main(["eval", "--plugin", "not_there", "--method", "dense"]) == 2
    assert "there is no module 'not_there' to load as a plugin" in capsys.readouterr().err


def test_the_evictor_is_held_to_its_simulation(theirs, monkeypatch):
    row = Evictor(
        lambda m: theirs.ShortKeys(token_budget=C, recent_tokens=4),
        lambda m: NaiveShortKeys(C, recent=4),
        lambda n, t: C + 1,
    )
    monkeypatch.setitem(EVICTORS, "short_keys", row)
    against_simulation("short_keys", 4, 30)


def test_the_selecting_one_knows_its_blocks_however_tokens_came_and_went(theirs):
    """After chunks, steps and a crop the sums are those of the keys; a covering budget is the plain model."""
    model, batch = model_of(4), left_padded([prompt(20, 1), prompt(9, 2)])
    plain = model.generate(**batch, max_new_tokens=12)
    with seergate.attached(model, "mean_key", token_budget=4096):
        assert torch.equal(model.generate(**batch, max_new_tokens=12), plain)
    with seergate.attached(model, "mean_key", token_budget=16, block_size=8, dense_layers=(0,)) as handle:
        helped = model.generate(input_ids=prompt(30), max_new_tokens=24, prompt_lookup_num_tokens=4)
        assert torch.equal(helped, model.generate(input_ids=prompt(30), max_new_tokens=24))
        cache = model.generate(input_ids=prompt(30), max_new_tokens=12, return_dict_in_generate=True).past_key_values
        cache.crop(-5)
        assert 0 < handle.stats()["density"] < 1
    for layer in cache.layers:
        blocks = torch.nn.functional.pad(layer.keys[:, :, :36], (0, 0, 0, 4)).unflatten(2, (5, 8)).sum(3)
        torch.testing.assert_close(layer.state.rows["sums"][:, :, :5], blocks)


@pytest.fixture
def answering(theirs):
    """A method that says of itself all that a method can say."""

    @methods.register
    @dataclass(kw_only=True)
    class Answering(theirs.ShortKeys):
        name: ClassVar[str] = "answering"
        budget_option: ClassVar[str] = "share"
        role: ClassVar[str] = "control"
        plot_style: ClassVar[tuple[str, str]] = ("#123456", "|")
        calibrates: ClassVar[dict[str, str]] = {"recent_tokens": f"{__name__}:RecentTokens"}
        serving_scores: ClassVar[str] = "seergate.serving.common.scoring:QuestScores"
        share: int = 1

        def __post_init__(self):
            self.token_budget = 128 // self.share
            super().__post_init__()

        @classmethod
        def budget_values(cls, tokens, step):
            return range(8, 0, -1)

    return Answering


@dataclass(frozen=True)
class RecentTokens(Calibration):
    """As many as there are prompts."""

    file_name = "recent.txt"

    def made(self, path):
        return json.loads(path.read_text())["made"] if path.exists() else None

    def measure(self, model, prompts, path, about, **how):
        path.write_text(json.dumps({**about, "value": len(prompts)}))
        return ["measured"]

    def value(self, path, token_budget):
        return json.loads(path.read_text())["value"]


@pytest.mark.slow
def test_evaluation_asks_a_new_method(answering, capsys):
    """Matching, calibration, report, the command line and vLLM's checks: none needs to know it."""
    arguments = ["--problems", "2", "--variables", "5", "--max-new-tokens", "40", "--budget", "32"]
    arguments += ["--match", "resident"]
    texts = "dense,short_keys,answering:recent_tokens=auto"
    assert main(["eval", "--method", texts, *arguments, "--out", "runs"]) == 0
    record = json.loads(Path("runs/matching-resident.json").read_text())
    (match,) = (each for each in record["matches"] if each["method"].startswith("answering-"))
    assert match["knob"] == "share" and 1 <= match["value"] <= 8
    assert json.loads(Path("runs/calibration/recent.txt").read_text())["value"] == FRESH
    directory = next(Path("runs").glob("answering-*"))
    assert yaml.safe_load((directory / "config.yaml").read_text())["method"]["recent_tokens"] == FRESH
    assert style("answering")["color"] == "#123456"
    assert main(["calibrate", "answering", "--problems", "1", "--max-new-tokens", "9", "--out", "mine.txt"]) == 0
    assert "measured" in capsys.readouterr().out and json.loads(Path("mine.txt").read_text())["value"] == 1
    assert main(["calibrate", "short_keys"]) == 2
    assert "one of lazy_eviction, tri_attention, answering" in capsys.readouterr().err
    check_served("answering")
    refused("'short_keys' does not run inside a server; it must be .*, answering$", check_served, "short_keys")


class ShortState(methods.SelectingState):
    """Scores complete blocks only."""

    def scores(self, step):
        return torch.ones(*step.k_BKSD.shape[:2], step.max_length // self.block_size)


@dataclass(kw_only=True)
class ShortScores(methods.SelectingMethod):
    name = "short_scores"
    state = ShortState


class ImportanceState(methods.BudgetedState):
    def importance(self, step, row):
        return self.method.of(torch.arange(step.ends[row], dtype=torch.float32))[None]

    def select_kept(self, step):
        if (eviction := super().select_kept(step)) is not None:
            for row, index, count in zip(eviction.rows, eviction.index, eviction.lengths, strict=True):
                end, kept = step.ends[row], index[:, :count].tolist()
                assert all(max(of_head) < end and {*range(end - 4, end)} <= {*of_head} for of_head in kept)
        return eviction


@dataclass(kw_only=True)
class Importance(methods.BudgetedMethod):
    name = "importance"
    state = ImportanceState
    recent_option = "recent_tokens"
    recent_tokens: int = 4
    of: ClassVar = staticmethod(lambda slots: slots)


class Stateless(methods.Method):
    name = "stateless"


def test_wrong_scores_are_refused(monkeypatch):
    model, few = tiny_model("qwen3"), r"ShortState.scores returned \[1, 2, 7\]; it must return \[1, 2, N\]"
    refused("has no states", seergate.attach, model, Stateless())
    Nameless = dataclass(kw_only=True)(type("Nameless", (methods.Method,), {"state": methods.Dense.state}))
    refused("Nameless has no name; it must be a class attribute", seergate.attach, model, Nameless())
    with seergate.attached(model, ShortScores(token_budget=16, block_size=8)):
        refused(few, model.generate, prompt(60), max_new_tokens=4)
    monkeypatch.setattr(Importance, "of", staticmethod(lambda slots: slots[:-1]))
    with seergate.attached(model, Importance(token_budget=16)):
        refused(r"importance returned \[1, 59\]; it must return \[2 or 1, 60\]", model.generate, prompt(60))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_keep_no_padding_and_evict_nothing_that_stays(monkeypatch, value):
    monkeypatch.setattr(Importance, "of", staticmethod(lambda slots: torch.where(slots > 2, value, slots)))
    model, prompts = tiny_model("qwen3"), [prompt(60), prompt(30, seed=1)]
    with seergate.attached(model, Importance(token_budget=16)):
        batch = model.generate(**left_padded(prompts), max_new_tokens=6)[:, -6:]
        for row, alone in enumerate(prompts):
            assert torch.equal(model.generate(alone, max_new_tokens=6)[0, -6:], batch[row])


def test_statistics_of_ones_own_survive_a_reset():
    class Mine(DecodeStats):
        pass

    with seergate.attached(tiny_model("qwen3"), "quest", token_budget=16, block_size=8) as handle:
        handle.count_with(Mine)
        handle.reset_stats()
        assert type(handle.stats_) is Mine
