"""What is drawn and said of runs, and the papers' numbers beside them."""

import pytest

from seergate.eval.papers.figures import FIGURES
from seergate.eval.papers.styles import STYLES, beside
from seergate.eval.report import load_sweeps
from seergate.eval.settings import MethodSpec, grid
from tests.eval.report.test_published import AIME, PAPER, write
from tests.eval.report.test_report import parted
from tests.support.made_reports import cells, reconfigure, write_run


def test_numbers_of_the_other_papers_stand_beside_what_they_ran(tmp_path, bank):
    """Table 1 of RPC, with another limit; half of the problems, other prompts, and what is unfinished, have none."""
    figure, long = FIGURES["rpc-table1"], PAPER | {"max_new_tokens": 32768, "max_total_tokens": None}
    model = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    specs = [*grid(figure.real["method"], figure.real["budget"], 64), MethodSpec("h2o", 4096)]
    for name, task, how in (
        ("same", AIME, long | {"samples": 1}),
        ("short", AIME, long | {"samples": 1, "max_new_tokens": 8192}),
        ("shots", AIME | {"shots": 4}, long | {"samples": 1}),
        ("half", AIME | {"problems": 15, "n_problems": 15}, long | {"samples": 1}),
        ("unfinished", AIME, long),
    ):
        for spec in specs:
            write(tmp_path / name, spec, None, task, model, right=9, n=task["n_problems"], how=how)
        (sweep,) = load_sweeps(tmp_path / name)
        rows = cells(beside(sweep, figure.published, figure.real))[2:]
        # 9 of 30: Wilson (.3 + .064 ± 1.96 sqrt(.3 * .7 / 30 + .00107)) / 1.128
        right, unlike = "30.0 (16.7 to 47.9)", "–" if name == "same" else "max-new-tokens 8192 instead of 32768"
        expected = [
            ["dense", "–", right, "55.5", "-25.5", unlike],
            ["h2o", "3417", right, "42.5", "-12.5", unlike],
            ["tova", "3417", right, "42.5", "-12.5", unlike],
            ["rpc, interval=1024", "1/4 of the answer", right, "50.4", "-20.4", unlike],
            ["rpc, interval=4096", "1/4 of the answer", right, "52.9", "-22.9", unlike],
        ]
        assert rows == ([] if name in ("half", "shots", "unfinished") else expected)


@pytest.mark.parametrize("name", ["7", "9"])
def test_figures_are_drawn_of_runs_from_elsewhere(name, tmp_path, bank):
    """Runs of all settings of a figure, as `seergate figure` makes them for Qwen3-8B on AIME24."""
    run = FIGURES[name].real
    for spec in grid(run["method"], run["budget"], run.get("block_size", [64]), [None], run.get("threshold")):
        write(tmp_path, spec, bank(spec.block_size) if spec.has_gates else None)
    (sweep,) = load_sweeps(tmp_path)
    draw = STYLES[FIGURES[name].style].draw
    assert draw is not None
    text = draw(sweep, tmp_path / "figure.png").with_suffix(".svg").read_text()
    assert ("gate, threshold" if name == "9" else "quest 4096 tokens") in text


@pytest.mark.parametrize(("name", "line"), [("7", "gate [{}] 4096 tokens"), ("9", "gate [{}], budget")])
def test_different_gates_have_lines_of_their_own(name, line, tmp_path, bank):
    """Figures 7 and 9 of two gates, whose names are those of the command line."""
    for gates in ("mine", "theirs"):
        for size in (32, 64) if name == "7" else (64,):
            spec = MethodSpec("gate", 4096, size)
            run_dir = write(tmp_path, spec, bank(size)).rename(tmp_path / f"{gates}-{size}")
            reconfigure(run_dir, gates={"fingerprint": gates, "name": gates})
    (sweep,) = load_sweeps(tmp_path)
    draw = STYLES[FIGURES[name].style].draw
    text = draw(sweep, tmp_path / "figure.png").with_suffix(".svg").read_text()
    assert all(line.format(gates) in text for gates in ("mine", "theirs"))


def test_lengths_stand_beside_those_of_table_1(tmp_path, bank):
    write(tmp_path, MethodSpec("dense"), None)
    write(tmp_path, MethodSpec("gate", 4096), bank(64))
    write(tmp_path, MethodSpec("gate", 8192, dense_layers=(0, 1)), bank(64))
    write(tmp_path, MethodSpec("quest", 4096, 16), None)
    (sweep,) = load_sweeps(tmp_path)
    beside = {(row[0], row[1]): row[4:] for row in cells(STYLES["length_table"].table(sweep))[2:]}
    assert beside == {
        ("dense", "–"): ["74.5", "15.1k", "samples 1 instead of 64"],
        ("gate, all sparse", "4096"): ["72.3", "16.3k", "samples 1 instead of 64"],
        ("gate, layers 0,1 dense", "8192"): ["–", "–", "–"],
        ("quest", "4096"): ["–", "–", "–"],
    }
    write(tmp_path / "unfinished", MethodSpec("dense"), None, n=20, right=14)
    (sweep,) = load_sweeps(tmp_path / "unfinished")
    assert "74.5" not in STYLES["length_table"].table(sweep)


def test_variants_without_a_common_problem_are_not_compared(tmp_path):
    for name, layers in (("a", [0]), ("b", [])):
        reconfigure(write_run(tmp_path / name, "quest", 64, lambda i: i < 15), method={"dense_layers": layers})
    parted(tmp_path / "a", "quest-64")
    (sweep,) = load_sweeps(tmp_path / "a", tmp_path / "b")
    assert len(STYLES["spread"].read(sweep)) == 1
    parted(tmp_path / "b")
    (sweep,) = load_sweeps(tmp_path / "a", tmp_path / "b")
    assert STYLES["spread"].read(sweep) == []
