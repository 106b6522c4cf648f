"""`seergate figure`, as a user meets it."""

from argparse import Namespace

import pytest
import yaml

from seergate import GateBank, GateConfig
from seergate.cli.figure import _distilled, _write, plan_of
from seergate.eval.papers.figures import FIGURES, SEER
from seergate.eval.papers.styles import STYLES
from seergate.eval.sweep_plan import SweepPlan
from tests.cli.test_evaluation import output
from tests.support import evaluation as support
from tests.support.made_reports import write_run
from tests.support.running import ROOT, refusal, refused, run_seergate

OF_SEER = [name for name, figure in FIGURES.items() if SEER in figure.source]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", support.mostly_soak(OF_SEER))
def test_figures_are_drawn(name, tmp_path):
    """On the model that ships, far too small to show anything but that every step works."""
    steps = ["--max-steps", 2] if name == "7" else []  # which needs gates of several block sizes
    small = ["--problems", 2, "--variables", 8, "--max-new-tokens", 40]
    output("figure", name, *small, *steps, "--out", tmp_path)
    label = name if name.startswith("table") else f"figure-{name}"
    text = (tmp_path / f"{label}.md").read_text()
    assert "| " in text
    if not name.startswith("table"):
        assert f"({label}.png)" in text and (tmp_path / f"{label}.svg").is_file()
        assert (tmp_path / f"{label}.png").stat().st_size > 10_000
    assert (tmp_path / "report.html").is_file()
    for config in (tmp_path / "eval").glob("*/config.yaml"):
        assert yaml.safe_load(config.read_text())["generation"]["max_new_tokens"] == 40


OF_OTHERS = [name for name in FIGURES if name not in OF_SEER]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", support.mostly_soak(OF_OTHERS, "rpc8"))
def test_figures_of_the_other_papers(name, tmp_path):
    output("figure", name, "--problems", 2, "--variables", 8, "--out", tmp_path)
    (page,) = tmp_path.glob(f"*{name}.md")
    text, look = page.read_text(), STYLES[FIGURES[name].style]
    assert text.startswith(f"# {FIGURES[name].source} on our runs: ") and "\n| " in text
    assert "Beside the paper's" not in text, "no paper has the tiny reasoner"
    assert (look.draw is None) == (not (tmp_path / f"figure-{name}.png").exists())


def specs_of(values):
    plan = SweepPlan.of(values)
    return plan.specs(plan.make_task(), plan.block_size or [64])


def test_every_figure_has_runs_on_tiny_and_real_models_and_a_way_to_be_drawn():
    assert {figure.style for figure in FIGURES.values()} == set(STYLES)
    for name, figure in FIGURES.items():
        for values in ({"block_size": [16], **figure.tiny}, {"budget": [1024], **figure.real}):
            specs = specs_of(values)
            made = [spec.method(None) for spec in specs if not spec.has_gates and not spec.uncalibrated]
            assert made and specs[0].name == "dense", name


def test_every_number_of_a_paper_belongs_to_a_run():
    labels = {spec.label for figure in FIGURES.values() for spec in specs_of(figure.real)}
    numbers = {label for figure in FIGURES.values() for scores in figure.published.values() for label in scores}
    assert len(numbers) > 30 and numbers <= labels


def test_the_document_lists_every_figure():
    document = (ROOT / "docs" / "reproduce.md").read_text()
    assert [name for name in FIGURES if f"| `{name}` |" not in document] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("raas5", "--gates", "x"), "the figure raas5 does not take --gates, as none of its methods has gates"),
        (("raas5", "--max-steps", 9), "the figure raas5 does not take --max-steps, as none of its methods has gates"),
        (("5", "--max-steps", 9), "the figure 5 does not take --max-steps, as it trains no gates"),
        (("7", "--gates", "x", "--max-steps", 9), "the figure 7 does not take --max-steps"),
        (("7", "--model", "Qwen3-4B", "--max-steps", 9), "the figure 7 does not take --max-steps"),
        (("5", "--problems", 0), "problems is 0"),
        (("7", "--max-new-tokens", 4096), "the model has 4096 positions"),
        (("5", "--task", "perplexity:length=64:scored=8"), "the figure 5 compares answers, and 'perplexity"),
    ],
)
def test_a_figure_ignores_nothing_and_is_refused_before_any_work(arguments, said, tmp_path):
    done = run_seergate("figure", *map(str, arguments), "--out", str(tmp_path / "out"))
    assert said in refusal(done) and not done.stdout and not list(tmp_path.glob("out/*"))


def test_another_figure_s_runs_are_not_drawn(tmp_path):
    (tmp_path / "figure-5.md").write_text("")
    done = run_seergate("figure", "raas5", "--out", str(tmp_path))
    assert "has the runs of figure-5.md, which would be drawn too" in refusal(done)
    assert not done.stdout and [path.name for path in tmp_path.iterdir()] == ["figure-5.md"]


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("5", {"task": "chain_sum:seed=1"}, (32, {"variables": 30, "seed": 1})),
        ("5", {"task": "chain_sum:variables=8", "problems": 4}, (4, {"variables": 8})),
        ("raas5", {"model": "m", "task": "math500:shots=4"}, (200, {"shots": 4})),
    ],
)
def test_options_in_a_task_s_text_leave_the_other_defaults(name, asked, expected, tmp_path):
    tiny = "model" not in asked
    options = Namespace(**{"name": name, "model": "tiny-reasoner", "task_source": None, **asked})
    plan = plan_of(options, FIGURES[name].tiny if tiny else FIGURES[name].real, tiny, tmp_path)
    made = plan.make_task().options
    assert made["problems"] == expected[0] and expected[1].items() <= made.items()


def test_gates_of_other_training_steps_are_not_taken_for_those_that_are_wanted(tmp_path):
    bank = GateBank.for_model(support.model(), GateConfig(16))
    bank.training_record = {"config": {"max_steps": 3}}
    bank.save_pretrained(tmp_path / "gates-b16")
    assert _distilled(Namespace(model="tiny-reasoner", max_steps=3), 16, tmp_path) == tmp_path / "gates-b16"
    for steps in (None, 7):
        options = Namespace(model="tiny-reasoner", max_steps=steps)
        refused("gates-b16 are of 3 training steps", _distilled, options, 16, tmp_path)


def test_a_figure_of_runs_that_cannot_be_compared_says_why(tmp_path):
    for name, grader in (("dense", "digit"), ("gate", "exact")):
        task = {"name": "chain_sum", "n_problems": 20, "chance": 0.1, "contents": "c", "grader": grader}
        write_run(tmp_path / "eval", name, None if name == "dense" else 64, lambda i: True, task=task)
    with pytest.raises(ValueError, match="task.grader is 'digit' and 'exact'.*seergate regrade .*eval --grader NAME"):
        _write("5", tmp_path, "figure-5")
