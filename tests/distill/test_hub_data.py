"""Training data from a stand-in for the Hub. The real client reads its address on import: each test has a process."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from seergate import SeergateError
from seergate.distill import load_train_config
from seergate.distill.commits import model_commit
from seergate.distill.sources import open_source
from seergate.eval.tasks.chain_sum import make_problems
from tests.gates.test_hub import hub as reached
from tests.support.hub_server import File, Hub
from tests.support.models import tiny_model
from tests.support.running import ROOT, refused

__all__ = ["reached"]

CARD = b"""---
configs:
- config_name: short
  default: true
  data_files: [{split: train, path: data/train-*}, {split: rest, path: data/rest-*}]
- {config_name: long, data_files: long.parquet}
---
# Rows
"""
READ = """
import json, os, sys
from pathlib import Path
from seergate import SeergateError
from seergate.distill import commits, load_train_config
from seergate.distill.sources import open_source
for options in json.loads(sys.argv[2]):
    os.environ.update(options.pop("environment", {}))
    try:
        config, _ = commits.pin(load_train_config("tiny-reasoner", options | {"data_limit": None}), Path("nowhere"))
        rows = [json.loads(row["json"]) if "json" in row else row for row in open_source(config, Path(sys.argv[1]))]
        print(json.dumps([len(rows), rows[0], rows[-1], config.data_revision]))
    except SeergateError as error:
        print(json.dumps(str(error)))
"""


def parquet(rows: list[dict]) -> File:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream, row_group_size=20)
    return File(stream.getvalue(), lfs=True)


@pytest.fixture
def rows() -> list[dict]:
    return [{"messages": problem.messages, "number": i} for i, problem in enumerate(make_problems(80, (4, 6), 7))]


@pytest.fixture
def hub(rows):
    with Hub() as standing_in:
        files = {f"data/train-{part}.parquet": parquet(rows[part * 30 : part * 30 + 30]) for part in range(2)}
        files |= {"data/rest-0.parquet": parquet(rows[60:]), "README.md": File(CARD)}
        files["long.parquet"] = parquet(rows)
        standing_in.hold("datasets/org/rows", files)
        standing_in.hold("datasets/org/secret", files, private=True)
        yield standing_in


def run(hub: Hub, tmp_path: Path, *arguments: str, **settings: str) -> str:
    """What ``python ARGUMENTS`` writes; it must succeed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", **settings}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TENSORBOARD_LOGGING": "0"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def read(hub: Hub, tmp_path: Path, *cases: dict, **settings: str) -> list:
    options = json.dumps([{"data": "org/rows"} | case for case in cases])
    output = run(hub, tmp_path, "-c", READ, str(tmp_path / "tokens"), options, **settings)
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.slow
def test_streaming_and_downloading_give_the_same_rows(hub, rows, tmp_path):
    """Over a connection that breaks off once, and a server that twice answers with an error."""
    sha = hub.repos["datasets/org/rows"].refs["main"]
    hub.fail("GET", "^/api/datasets/org/rows(/revision/main)?$", status=503)
    hub.fail("GET", "/lfs/", cut_after=3000)
    hub.fail("GET", "/lfs/", status=503)
    cases = [{"data_split": "rest"}, {"data_config": "long", "data_revision": sha}]
    cases = [{"streaming": True}, {}, *({"streaming": True} | case for case in cases)]
    streamed, downloaded, rest, other = read(hub, tmp_path, *cases)
    assert not any(fault.times for fault in hub.faults)
    rows = [{"messages": row["messages"]} for row in rows]  # other columns are not read
    assert streamed == downloaded == [60, rows[0], rows[59], sha]
    assert rest == [20, rows[60], rows[79], sha] and other == [80, rows[0], rows[79], sha]


@pytest.mark.slow
def test_what_cannot_be_loaded_is_one_sentence_that_says_why(hub, tmp_path):
    wrong = [{"data": "org/none"}, {"data": "org/secret"}, {"data_config": "middle"}, {"data_split": "test"}]
    wrong.append({"data_revision": "v9"})
    cases = [{"streaming": streaming} | case for streaming in (True, False) for case in wrong]
    cases.append({"data": "org/secret", "streaming": True, "environment": {"HF_TOKEN": "writer"}})
    *messages, (count, *_) = read(hub, tmp_path, *cases)
    streaming, downloading = messages[:5], messages[5:]
    for part in (streaming, downloading):
        none, secret, config, split, revision = part
        assert "'org/none' cannot be loaded from the Hub: " in none and "'org/secret' cannot be" in secret
        assert part is downloading or ("private" in none and "private" in secret)
        assert all(name in config for name in ("middle", "short", "long"))
        assert "test" in split and "train" in split and "v9" in revision
    assert not any("\n" in message for message in messages)
    assert count == 60, "with a token"


@pytest.mark.slow
def test_without_the_hub_the_data_are_of_the_commit_that_is_said(hub, rows, tmp_path):
    """What `datasets` finds in its cache is the newest of what was downloaded, whatever was asked for."""
    repo = hub.repos["datasets/org/rows"]
    old = repo.refs["v1"] = repo.refs["main"]
    others = parquet(rows[:7])
    hub.lfs[others.sha256] = others.data
    new = repo.commit("main", repo.tree() | {"data/train-0.parquet": others})
    first, second = read(hub, tmp_path, {"data_revision": "v1"}, {})
    assert (first[0], first[3], second[0], second[3]) == (60, old, 37, new)
    refs = tmp_path / "home" / "hub" / "datasets--org--rows" / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "old").write_text(old)
    (refs / "new").write_text(new)
    cases = [{"data_revision": name} for name in (new, None, "new", old, "0" * 40, "old", "v1")]
    cases += [case | {"streaming": True} for case in cases]
    answers = read(hub, tmp_path, *cases, HF_HUB_OFFLINE="1")
    assert answers[:3] == answers[7:10] == [second] * 3
    for each in (answers[3:7], answers[10:]):
        for commit, message in zip((old, "0" * 40, old), each, strict=False):
            assert f"'org/rows' cannot be loaded at {commit}: the Hub does not give it" in message and new in message
        assert "the revision 'v1' of the dataset 'org/rows' cannot be looked up" in each[3] and new in each[3]


def test_a_model_of_the_hub_is_known_by_its_commit(reached):
    """A run that is continued compares it. (Names of its own: transformers remembers the commit of a name.)"""
    hub, options = reached, {"block_size": 8, "gate_dim": 16}
    config = File(tiny_model("qwen3").config.to_json_string().encode())
    for name in ("org/first-model", "org/second-model"):
        hub.hold(name, {"config.json": config, "x": File(name.encode())})
        assert model_commit(load_train_config(name, options)) == hub.repos[name].refs["main"]
    with pytest.raises(SeergateError):
        model_commit(load_train_config(name, options | {"revision": "gone"}))


@pytest.mark.soak
def test_training_reads_no_more_than_it_needs(hub, tmp_path):
    """`train.py --data org/rows --streaming`: two steps, then again with another seed from the same token cache."""
    options = "--model tiny-reasoner --data org/rows --streaming --data-limit 20 --max-steps 2 --packs-per-step 1"
    options += " --max-length 512 --eval-packs 0 --save-steps 0"
    options += f" --token-cache {tmp_path / 'tokens'} --output-dir {tmp_path}"
    assert "samples of 20 rows" in run(hub, tmp_path, "train.py", *f"{options}/one".split())
    assert list((tmp_path / "one").rglob("gate_model.safetensors"))
    second = hub.repos["datasets/org/rows"].tree()["data/train-1.parquet"].sha256
    assert hub.seen("GET", "/lfs/") and not hub.seen("GET", f"/lfs/{second}"), "the second file was not needed"
    before = len(hub.seen("GET", "/lfs/"))
    assert "samples of 20 rows" in run(hub, tmp_path, "train.py", *f"{options}/two --seed 1".split())
    assert len(hub.seen("GET", "/lfs/")) <= before + 1, "rows that have been tokenised are not read again"


def test_a_split_that_the_dataset_lacks_is_refused_before_the_download(tmp_path, monkeypatch):
    def download():
        raise SeergateError("the download began")

    splits = SimpleNamespace(splits={"train": None, "rest": None})
    builder = SimpleNamespace(hash="c" * 40, info=splits, download_and_prepare=download)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
    for split, message in (
        ("train + nope", "data_split is 'train [+] nope'; org/rows has rest, train"),
        ("train[:50%] + rest", "the download began"),
    ):
        config = load_train_config("tiny-reasoner", {"data": "org/rows", "data_split": split})
        refused(message, open_source, config, tmp_path)
