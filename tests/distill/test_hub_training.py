"""A training run whose model and data live on the Hub, where others commit: it keeps to what it began with."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from seergate.distill.checkpoint import newest_checkpoint, read_record
from seergate.eval.tasks.chain_sum import make_problems
from seergate.models.gate_bank import GateBank
from tests.distill.conftest import assert_identical, weights
from tests.distill.test_hub_data import parquet, run
from tests.support.hub_server import File, Hub, files_of
from tests.support.pairs import pair

pytestmark = pytest.mark.timeout(900)  # processes that import everything
OPTIONS = "--block-size 16 --max-length 768 --max-steps 4 --packs-per-step 1 --save-steps 2 --eval-packs 0"
OPTIONS += " --dtype float32"


@pytest.fixture
def hub(model_dir):
    rows = [{"messages": problem.messages} for problem in make_problems(30, (5, 12), 7)]
    with Hub() as standing_in:
        standing_in.hold("org/base", files_of(model_dir))
        standing_in.hold("datasets/org/rows", {"data/train-0.parquet": parquet(rows)})
        yield standing_in


def others_commit(hub: Hub, model_dir: Path, tmp_path: Path) -> None:
    """A README, and then other weights and other rows."""
    model, data = hub.repos["org/base"], hub.repos["datasets/org/rows"]
    for repo in (model, data):
        repo.commit("main", repo.tree() | {"README.md": File(b"# What it is\n")})
    other = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.1)
        other.model.layers[0].self_attn.q_proj.weight.neg_()
    other.save_pretrained(tmp_path / "other")
    problems = make_problems(30, (5, 12), 8)
    for repo, files in (
        (model, files_of(tmp_path / "other")),
        (data, {"data/train-0.parquet": parquet([{"messages": problem.messages} for problem in problems])}),
    ):
        repo.commit("main", repo.tree() | files)
        hub.lfs |= {file.sha256: file.data for file in files.values() if file.lfs}


def train(hub: Hub, tmp_path: Path, *more: str) -> str:
    return run(hub, tmp_path, "train.py", *options(tmp_path), *more)


def train_both(hub: Hub, tmp_path: Path, offline: str) -> None:
    """Two processes of a run of two packs a step."""
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    env |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), offline)
    done = pair(["train.py", *options(tmp_path), "--packs-per-step", "2"], env=env)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr[-3000:]


def options(tmp_path: Path) -> list[str]:
    places = ["--output-dir", str(tmp_path / "run"), "--token-cache", str(tmp_path / "tokens")]
    return ["--model", "org/base", "--data", "org/rows", *OPTIONS.split(), *places]


def interrupted(run_dir: Path) -> dict[str, torch.Tensor]:
    """Take a finished run back to its first checkpoint; returns the gates that it had ended with."""
    gates = weights(run_dir)
    newest = newest_checkpoint(run_dir / "checkpoints")
    assert newest.name == "step-00000004"
    shutil.rmtree(newest)
    (run_dir / "gate_model.safetensors").unlink()
    return gates


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [[], pytest.param(["--streaming"], marks=pytest.mark.soak)], ids=str)
def test_what_others_commit_does_not_end_a_run(hub, model_dir, tmp_path, streaming):
    places = {"revision": "org/base", "data_revision": "datasets/org/rows"}
    began = {name: hub.repos[place].refs["main"] for name, place in places.items()}
    train(hub, tmp_path, *streaming)
    gates = interrupted(tmp_path / "run")
    others_commit(hub, model_dir, tmp_path)
    assert "continuing after step 2 of 4" in train(hub, tmp_path, *streaming)
    assert_identical(weights(tmp_path / "run"), gates)
    assert began.items() <= read_record(newest_checkpoint(tmp_path / "run" / "checkpoints"))["run"].items()
    assert GateBank.from_pretrained(tmp_path / "run").geometry.base_revision == began["revision"]


@pytest.mark.soak
def test_all_processes_read_the_same_commit(hub, model_dir, tmp_path, monkeypatch):
    """Whoever asks what the newest commit of the dataset is gets another than the one before."""
    data, info = hub.repos["datasets/org/rows"], Hub.info

    def pushed_to(hub, name, revision, user):
        answer = info(hub, name, revision, user)
        if name == "datasets/org/rows" and revision == "main":
            data.commit("main", data.tree() | {"README.md": File(b"# Version %d\n" % len(data.commits))})
        return answer

    monkeypatch.setattr(Hub, "info", pushed_to)
    began = data.refs["main"]
    train_both(hub, tmp_path, offline="0")
    assert len(data.commits) == 2, "one process asks"
    assert len(hub.seen("HEAD", "^/$")) == 1, "whether the Hub is there"
    assert read_record(newest_checkpoint(tmp_path / "run" / "checkpoints"))["run"]["data_revision"] == began


@pytest.mark.soak
def test_what_is_prepared_trains_without_the_hub_in_two_processes(hub, tmp_path):
    assert "samples of 30 rows" in run(hub, tmp_path, "-m", "seergate", "prepare", *options(tmp_path))
    before = len(hub.requests)
    train_both(hub, tmp_path, offline="1")
    assert weights(tmp_path / "run") and len(hub.requests) == before
