"""A build of tokens that is killed goes on where it stopped, and what comes out is the same to the last byte."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset, load_from_disk
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from seergate.distill import TrainConfig, load_train_config, token_store
from seergate.distill.data import prepare_data
from seergate.distill.formatting import Formatter
from seergate.distill.sources import Source, Streamed, open_source
from seergate.distill.token_draft import ABANDONED_SECONDS
from seergate.distill.token_store import TokenStore
from seergate.errors import SeergateError
from tests.distill.conftest import PLAIN, byte_tokenizer

forks = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks a process that has loaded PyTorch")

Progress = Callable[[int], None]


def chat(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}


def mixed_rows() -> list[Any]:
    """Everything that is counted, and duplicates of the kept, the cut and the left out far from each other."""
    rows: list[Any] = [chat(f"<think>step {i}{'.' * (i % 7)}</think>{i}") for i in range(14)]
    rows += [{"text": f"plain text number {i}"} for i in range(6)]
    rows += [chat(f"<think>{letter * 300}</think>{letter}") for letter in "abc"]
    rows += [chat(f"no opening tag {i}</think>{i}") for i in range(3)]
    rows += [chat("<think></think>only an answer"), chat(""), {"text": " "}, "{broken", None, {"nothing": 0}]
    rows += [{"messages": [*chat("<think>x</think>y")["messages"], {"role": "user", "content": "and?"}]}]
    random.Random(0).shuffle(rows)
    return rows + rows[::2]


ROWS = mixed_rows()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "BATCH_ROWS", 4)


@dataclass(frozen=True, repr=False)
class Job:
    """Tokenising a file of rows of every kind."""

    config: TrainConfig
    tokenizer: PreTrainedTokenizerFast

    def run(self, cache: Path, progress: Progress = lambda _: None) -> TokenStore:
        return TokenStore.build(
            cache / ("a" * 24),
            open_source(self.config),
            Formatter(self.tokenizer),
            max_length=self.config.max_length,
            drop_over_length=self.config.over_length == "drop",
            progress=progress,
        )

    def files(self, cache: Path, progress: Progress = lambda _: None) -> Files:
        """Of the store that it makes, beside which nothing is left."""
        self.run(cache, progress)
        (store,) = cache.iterdir()
        files = {file.name: file.read_bytes() for file in store.iterdir()}
        assert files.keys() == {"tokens.i32", "starts.npy", "counts.json"}
        return Files(files)

    def stopped(self, cache: Path, row: int) -> Path:
        """Stop after some row, as an interrupt from the keyboard would; the draft that is left."""
        with pytest.raises(Stopped):
            self.run(cache, stopping_at(row))
        (draft,) = cache.iterdir()
        return draft


class Files(dict[str, bytes]):
    """Names and contents."""

    def __repr__(self) -> str:
        return str({name: hashlib.sha256(contents).hexdigest()[:8] for name, contents in self.items()})


class Stopped(BaseException):
    """Ends a build from within."""


def stopping_at(row: int) -> Progress:
    def progress(rows: int) -> None:
        if rows >= row:
            raise Stopped

    return progress


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(PLAIN)


@pytest.fixture(scope="module", params=["truncate", "drop"])
def job(
    request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Job:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in ROWS))
    options = {"data": str(file), "max_length": 200, "block_size": 8, "over_length": request.param}
    return Job(load_train_config("someone/model", options), tokenizer)


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """What an undisturbed build makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_store, "BATCH_ROWS", 4)
        files = job.files(tmp_path_factory.mktemp("whole"))
    unused = {name for name, count in json.loads(files["counts.json"]).items() if not count}
    assert unused == {"dropped" if job.config.over_length == "truncate" else "truncated", "earlier_reasoning"}
    return files


def forked(work: Callable[[], object]) -> int:
    """Do something in another process; its number."""
    process = os.fork()
    if process:
        return process
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
        os._exit(1)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@forks
def test_killed_at_random_moments(job: Job, whole: Files, tmp_path: Path) -> None:
    """Many times in a row, and what a killed process had said to be done is not done again.

    A process goes on only when it is let, by one batch of rows: however busy the machine is, it does not get away.
    """
    rng, done, kills = random.Random(1), 0, 0
    while True:
        said, saying = os.pipe()
        let, letting = os.pipe()

        def progress(rows: int, saying: int = saying, let: int = let) -> None:
            os.write(saying, b"%d\n" % rows)
            os.read(let, 1)

        process = forked(lambda progress=progress: job.files(tmp_path, progress))
        os.close(saying)
        os.close(let)
        with os.fdopen(said) as reports, os.fdopen(letting, "wb", buffering=0) as leave:
            seen = []
            for _ in range(rng.randint(1, 3)):
                seen += [int(line) for line in itertools.islice(reports, 1)]
                with contextlib.suppress(BrokenPipeError):  # it has ended
                    leave.write(b".")
            time.sleep(rng.uniform(0, 0.004))
            os.kill(process, signal.SIGKILL)
            status = ended(process)
            seen += [int(line) for line in reports]
        assert status in (0, -signal.SIGKILL)
        assert not seen or seen[0] >= done, "rows were tokenised again"
        done = seen[-1] if seen else done
        kills += status != 0
        if status == 0 or not any(path.name.startswith(".") for path in tmp_path.iterdir()):
            break
        assert kills < 200
    assert kills >= 3
    assert job.files(tmp_path) == whole


@forks
def test_killed_before_any_change_of_a_file(job: Job, whole: Files, tmp_path: Path) -> None:
    """Every moment between two operations on the cache, for the first parts and for the making of the store."""
    events = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove"}

    def dying(cache: Path, operation: int) -> None:
        count = itertools.count()

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in events and str(cache) in str(arguments[0]) and next(count) == operation:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        job.files(cache)

    nothing, most = tmp_path / "nothing", tmp_path / "most"
    nothing.mkdir()
    job.stopped(most, len(ROWS) - 8)
    died = 0
    for begun, operations in ((nothing, 12), (most, 1000)):
        for operation in range(operations):
            cache = tmp_path / f"{begun.name}-{operation}"
            shutil.copytree(begun, cache)
            status = ended(forked(lambda cache=cache, operation=operation: dying(cache, operation)))
            assert job.files(cache) == whole, cache.name
            shutil.rmtree(cache)
            if status == 0:
                break
            assert status == -signal.SIGKILL
            died += 1
    assert died > 30


@forks
def test_processes_that_build_the_same_store_at_once(job: Job, whole: Files, tmp_path: Path) -> None:
    rng = random.Random(2)
    for trial in range(4):
        cache = tmp_path / str(trial)
        processes = []
        for _ in range(3):
            processes.append(forked(lambda cache=cache: job.run(cache)))
            time.sleep(rng.uniform(0, 0.02))
        if killed := trial % 2:
            os.kill(processes[1], signal.SIGKILL)
        statuses = [ended(process) for process in processes]
        assert statuses[0] == statuses[2] == 0 and statuses[1] in ((0, -signal.SIGKILL) if killed else (0,))
        # One that was still adding to the draft when another removed it may leave something; the next call cleans up.
        assert job.files(cache) == whole


def test_a_store_that_another_finishes_meanwhile_is_used(job: Job, whole: Files, tmp_path: Path) -> None:
    rows = []

    def progress(row: int) -> None:
        rows.append(row)
        assert len(rows) > 1 or job.files(tmp_path) == whole

    assert job.files(tmp_path, progress) == whole
    assert len(rows) == 1, "it went on although there was nothing left to do"


def damaged(contents: bytes, others: bytes, how: str, place: float) -> bytes:
    at = int(place * (len(contents) - 1))
    if how == "flip":
        return contents[:at] + bytes([contents[at] ^ 1]) + contents[at + 1 :]
    if how == "zeros":
        return contents[:at] + bytes(len(contents) - at)
    return {"cut": contents[:at], "longer": contents + others[: at + 1], "swapped": others}[how]


@settings(max_examples=30)
@given(
    part=st.integers(0, 6),
    how=st.sampled_from(["flip", "zeros", "cut", "longer", "swapped", "gone"]),
    place=st.floats(0, 1),
)
def test_a_damaged_draft_is_used_up_to_the_damage(job: Job, whole: Files, part: int, how: str, place: float) -> None:
    with tempfile.TemporaryDirectory() as directory:
        draft = job.stopped(Path(directory), 28)
        files = sorted(draft.glob("*.part"), key=lambda file: int(file.stem))
        file, other = files[part % len(files)], files[(part + 1) % len(files)]
        if how == "gone":
            file.unlink()
        else:
            contents = damaged(file.read_bytes(), other.read_bytes(), how, place)
            assume(contents != file.read_bytes())
            file.write_bytes(contents)
        rows: list[int] = []
        assert job.files(Path(directory), rows.append) == whole
        undamaged = int(file.stem)
        assert rows[0] == undamaged or (undamaged == 0 and rows[0] > 0)


def test_damage_to_a_draft_in_use_is_one_sentence(job: Job, whole: Files, tmp_path: Path) -> None:
    def progress(row: int) -> None:
        for first in tmp_path.glob(".*.draft/0.part"):
            first.unlink()

    with pytest.raises(SeergateError, match=r"the tokens of the rows after 0 were removed from .*\.draft or damaged"):
        job.files(tmp_path, progress)
    assert job.files(tmp_path) == whole


def test_the_console_says_where_it_continues(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, rows = replace(job.config, token_cache=str(tmp_path), data_limit=40), []
    with pytest.raises(Stopped):
        prepare_data(config, job.tokenizer, lambda row, _: stopping_at(20)(row))
    assert capsys.readouterr().out == ""
    prepare_data(config, job.tokenizer, lambda *row: rows.append(row))
    at, expected = rows[0]
    assert 20 <= at < 30 and expected == 40
    assert capsys.readouterr().out == f"tokenising continues at row {at}; those before it are done\n"
    prepare_data(config, job.tokenizer)
    assert capsys.readouterr().out == ""


def test_drafts_are_kept_for_a_week(job: Job, whole: Files, tmp_path: Path) -> None:
    own = job.stopped(tmp_path, 20)
    names = (f".{'0' * 24}.draft", f".{'1' * 24}.draft", ".draft", ".config", "0" * 24)
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.part").touch()
    long_ago = time.time() - ABANDONED_SECONDS - 60
    for path in (own, *(tmp_path / name for name in names if name != names[1])):
        os.utime(path, (long_ago, long_ago))
    rows: list[int] = []
    job.run(tmp_path, rows.append)
    assert rows[0] >= 20, "its own draft is continued, whatever its age"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name in names) == sorted(names[1:])
    assert not own.exists()


SOURCES = ("jsonl", "parquet", "disk", "stream", "chain_sum")


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Source]:
    """Opens 30 rows of each kind of source."""
    rows = [chat(f"<think>{i}</think>{i}") for i in range(30)]
    stored = Dataset.from_list(rows)
    if request.param == "stream":
        stored.to_parquet(str(tmp_path / "rows.parquet"))
        files = {"data_files": str(tmp_path / "rows.parquet"), "split": "train", "streaming": True}
        return lambda: Source(Streamed(load_dataset("parquet", **files), "org/rows"), "stream")
    if request.param == "chain_sum":
        options = {"data_limit": 30, "chain_sum_variables": (4, 6)}
        problems = load_train_config("tiny-reasoner", options)
        return lambda: open_source(problems)
    if request.param == "disk":
        stored.save_to_disk(str(tmp_path / "rows.disk"))
        assert len(load_from_disk(str(tmp_path / "rows.disk"))) == 30
    elif request.param == "parquet":
        stored.to_parquet(str(tmp_path / "rows.parquet"))
    else:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_train_config("someone/model", {"data": str(tmp_path / f"rows.{request.param}")})
    return lambda: open_source(found)


def test_every_source_passes_over_rows(source: Callable[[], Source]) -> None:
    rows = list(source().after(0))
    assert len(rows) == 30 and rows[0] != rows[1]
    for count in (1, 17, 29, 30):
        assert list(source().after(count)) == rows[count:]


def test_rows_that_are_done_are_not_formatted_again(
    source: Callable[[], Source], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    class Counting(Formatter):
        formatted = 0

        def text(self, row: Any) -> tuple[str, bool]:
            self.formatted += 1
            return super().text(row)

    def made(name: str, limit: int | None = None, progress: Progress = lambda _: None) -> int:
        formatter = Counting(tokenizer)
        options = {"max_length": 500, "drop_over_length": False, "limit": limit}
        stores.append(TokenStore.build(tmp_path / name, source(), formatter, progress=progress, **options))
        return formatter.formatted

    stores: list[TokenStore] = []
    for row, limit in itertools.product((4, 16, 28, 30), (30, None)):
        name = f"{row}-{limit}"

        with pytest.raises(Stopped):
            made(name, limit, stopping_at(row))
        assert made(name, limit) == 30 - row
    assert made("whole") == 30
    assert len({(store.directory / "tokens.i32").read_bytes() for store in stores}) == 1
    assert {store.counts["rows"] for store in stores} == {30}


def test_a_stream_that_breaks_off_goes_on_from_there(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    class Breaking:
        def __init__(self, rows: Iterator[Any], reliable: int) -> None:
            self.rows, self.reliable = rows, reliable

        def skip(self, count: int) -> Breaking:
            return Breaking(itertools.islice(self.rows, count, None), self.reliable)

        def __iter__(self) -> Iterator[Any]:
            yield from itertools.islice(self.rows, self.reliable)
            raise ConnectionError("gone")

    rows = [chat(f"<think>{i}</think>{i}") for i in range(30)]
    for broke_off in ("after 10 rows", "after 18 rows", "after 26 rows"):
        source = Source(Streamed(Breaking(iter(rows), 10), "org/data"), "stream")
        with pytest.raises(SeergateError, match=f"'org/data' broke off {broke_off}: gone"):
            TokenStore.build(tmp_path / "store", source, Formatter(tokenizer), max_length=500, drop_over_length=False)
    assert not (tmp_path / "store").exists()
    with pytest.raises(SeergateError, match="after 15 rows"):
        list(Streamed(Breaking(iter(rows), 10), "org/data").skip(2).skip(3))
