"""Data that lies on this machine: formats, splits, what is refused and what is counted."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, Image, List, Sequence, Value

from seergate.distill import TrainConfig
from seergate.distill.data import prepare_data
from seergate.distill.formatting import Formatter
from tests.distill.conftest import PLAIN, byte_tokenizer
from tests.distill.test_data import chat, write
from tests.support.running import refused


def test_every_local_format_gives_the_same_samples(data_config, tmp_path, plain):
    rows = [chat(f"<think>{i}</think>{i}") for i in range(20)]
    write(data_config.data, rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    dataset = Dataset.from_list(rows)
    dataset.to_parquet(str(tmp_path / "rows.parquet"))
    dataset.with_format("numpy").save_to_disk(str(tmp_path / "disk"))
    for folder in ("folder/.ipynb_checkpoints", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / "folder/.ipynb_checkpoints/a-checkpoint.jsonl", [chat("<think>an older row</think>0")])
    write(tmp_path / "elsewhere" / "a.jsonl", rows[:9])
    (tmp_path / "folder" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder" / "latest").symlink_to("a")
    (tmp_path / "folder" / "itself").symlink_to(".")
    dataset.select(range(9, 20)).to_parquet(str(tmp_path / "blob"))
    (tmp_path / "folder" / "b.parquet").symlink_to(tmp_path / "blob")  # as in the Hub's cache
    dataset.select([]).to_parquet(str(tmp_path / "folder" / "c.parquet"))  # as Spark writes
    expected = prepare_data(data_config, plain)
    for name in ("rows.json", "rows.parquet", "disk", "folder", "disk/data-00000-of-00001.arrow"):
        data = prepare_data(replace(data_config, data=str(tmp_path / name)), plain)
        assert len(data.samples) == 20, name
        assert all(np.array_equal(data.samples[i], expected.samples[i]) for i in range(20)), name


def test_images_are_not_decoded(data_config: TrainConfig, tmp_path: Path, plain: Any) -> None:
    """Nobody reads them, and one may be damaged."""
    rows = {"text": [f"row {i} " * 9 for i in range(3)], "images": [[{"bytes": b"none", "path": None}]] * 3}
    kinds = Features({"text": Value("string"), "images": List(Image())})
    Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / "disk"))
    assert len(prepare_data(replace(data_config, data=str(tmp_path / "disk")), plain).samples) == 3
    Dataset.from_dict(rows, features=kinds).to_parquet(str(tmp_path / "rows.parquet"))
    for column in (None, "text"):
        given = replace(data_config, data=str(tmp_path / "rows.parquet"), data_column=column)
        assert len(prepare_data(given, plain).samples) == 3


def test_a_saved_dataset_is_read_again_if_its_rows_changed(data_config, tmp_path, plain):
    """Also under the fingerprint of before, as of a ``map`` whose function reads a file that has changed."""
    place = replace(data_config, data=str(tmp_path / "disk"))
    for text in ("a word " * 9, "other words " * 9):
        rows = Dataset.from_dict({"text": [f"{i} {text}" for i in range(3)]})
        rows._fingerprint = "the same"
        rows.save_to_disk(place.data)
        samples = prepare_data(place, plain).samples
        assert plain.decode(samples[0]) == f"0 {text}"


@pytest.mark.parametrize("kind", [Image(), Value("string")])
def test_messages_may_have_more_fields(data_config: TrainConfig, tmp_path: Path, plain: Any, kind: Any) -> None:
    chats = [[{"role": x, "content": f"{x} {i} " * 20, "image": None} for x in ("user", "assistant")] for i in (1, 2)]
    kinds = Features({"messages": List({"role": Value("string"), "content": Value("string"), "image": kind})})
    Dataset.from_dict({"messages": chats}, features=kinds).save_to_disk(str(tmp_path / "disk"))
    assert len(prepare_data(replace(data_config, data=str(tmp_path / "disk")), plain).samples) == 2


def test_messages_may_be_a_sequence_of_records(data_config: TrainConfig, tmp_path: Path, plain: Any) -> None:
    """Which `datasets` gives as one list per key."""
    rows = [chat(f"<think>{i}</think>{i}")["messages"] for i in range(3)]
    write(data_config.data, [{"messages": row} for row in rows])
    by_key = [{key: [turn[key] for turn in row] for key in ("role", "content")} for row in rows]
    for column in ("messages", "talk"):
        kinds = Features({column: Sequence({"role": Value("string"), "content": Value("string")})})
        Dataset.from_dict({column: by_key}, features=kinds).save_to_disk(str(tmp_path / column))
        place = replace(data_config, data=str(tmp_path / column), data_column=None if column == "messages" else column)
        ours, same = (prepare_data(each, plain).samples for each in (place, data_config))
        assert [x.tolist() for x in ours] == [x.tolist() for x in same]
    halves = [{key: [turn[key] for turn in part] for key in by_key[0]} for part in (rows[0][:-1], rows[0][-1:])]
    divided = dict(zip(("prompt", "completion"), halves, strict=True))
    assert Formatter(plain).text(divided) == Formatter(plain).text({"messages": rows[0]})


@pytest.mark.parametrize("name", ["rows[1].parquet", "rows?.parquet", "[a]/rows.parquet"])
def test_a_name_that_is_also_a_pattern_is_read_as_it_is(data_config: TrainConfig, tmp_path: Path, name: str) -> None:
    (tmp_path / "[a]").mkdir()
    Dataset.from_list([{"text": "another file " * 9}] * 2).to_parquet(str(tmp_path / "rows1.parquet"))
    Dataset.from_list([{"text": f"the file, row {i} " * 9} for i in range(3)]).to_parquet(str(tmp_path / name))
    for place in (tmp_path / name, *({(tmp_path / name).parent} - {tmp_path})):
        report = prepare_data(replace(data_config, data=str(place)), byte_tokenizer(None)).report
        assert (report.rows, report.samples) == (3, 3)


def test_text_in_bytes_is_text(data_config: TrainConfig, tmp_path: Path) -> None:
    """As Spark writes it; a table may also have other bytes."""
    rows = [{"text": f"über {i} ".encode() * 9, "image": b"\xff"} for i in range(3)]
    Dataset.from_list([*rows, {"text": b"\xff", "image": None}]).to_parquet(str(tmp_path / "rows.parquet"))
    tokenizer = byte_tokenizer(None)
    data = prepare_data(replace(data_config, data=str(tmp_path / "rows.parquet")), tokenizer)
    assert [tokenizer.decode(data.samples[i]) for i in range(3)] == [f"über {i} " * 9 for i in range(3)]
    assert data.report.malformed == {"invalid unicode": 1}


def test_a_saved_dataset_of_several_splits(data_config, tmp_path, plain):
    rows = [chat(f"<think>{i}</think>{i}") for i in range(20)]
    parts = {"train": Dataset.from_list(rows[:12]), "test": Dataset.from_list(rows[12:])}
    DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    both = replace(data_config, data=str(tmp_path / "both"))
    assert prepare_data(both, plain).report.rows == 12
    assert prepare_data(replace(both, data_split="test"), plain).report.rows == 8
    refused(r"data_split is 'dev'; .*both has test, train", prepare_data, replace(both, data_split="dev"), plain)


@pytest.mark.parametrize(
    "aside", ["test.jsonl", "data/validation-00000-of-00001.jsonl", "held_out.jsonl", "DEV/a.jsonl"]
)
def test_files_to_be_tested_on_are_not_trained_on(data_config, tmp_path, aside, plain):
    folder = tmp_path / "cloned"
    (folder / aside).parent.mkdir(parents=True, exist_ok=True)
    for name in ("train-00000.jsonl", "contest-latest.jsonl"):
        write(folder / name, [chat(f"<think>{name} {i}</think>{i}") for i in range(9)])
    cloned = replace(data_config, data=str(folder))
    assert prepare_data(cloned, plain).report.rows == 18
    write(folder / aside, [chat("<think>1</think>1")])
    refused(f"holds {aside}, which by its name is not to be trained on", prepare_data, cloned, plain)


def test_what_is_for_the_hub_is_refused_for_local_data(data_config, plain):
    write(data_config.data, [chat("<think>1</think>1")])
    here = "lies on this machine"
    for name, why in {"data_config": here, "data_revision": here, "data_split": "has no splits"}.items():
        refused(f"{name} is 'x', but .* {why}", prepare_data, replace(data_config, **{name: "x"}), plain)


def test_text_that_is_no_utf_8_is_counted_and_a_byte_order_mark_is_none(data_config: TrainConfig) -> None:
    good = json.dumps(chat("<think>über</think>1"), ensure_ascii=False).encode()
    many = [good.replace(b"ber", b"ber%d" % i) for i in range(8)]
    bad = good.replace("ü".encode(), b"\xfc")
    Path(data_config.data).write_bytes(b"\xef\xbb\xbf" + b"\n".join([*many, bad]))
    report = prepare_data(data_config, byte_tokenizer(PLAIN)).report
    assert (report.rows, report.samples, report.malformed) == (9, 8, {"not UTF-8": 1})


def _with_a_map() -> bytes:
    import pyarrow
    from pyarrow import parquet

    maps = pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    parquet.write_table(pyarrow.table({"text": ["some text"], "about": maps}), file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "contents", "why"),
    [
        ("none.jsonl", None, "does not exist$"),
        ("map.parquet", _with_a_map(), "cannot be read: Arrow type map<"),
        ("a.jsonl,b", None, "does not exist; several sources need a share each"),
        ("bad.parquet", b"PAR1 no parquet", "cannot be read"),
        ("bad.json", b'[{"messages": ', "begins like a JSON list"),
        ("notes.txt", b"hello", "holds no data"),
        ("a.jsonl.gz", b"\x1f\x8b", "is compressed"),
    ],
)
def test_a_missing_or_broken_file_is_refused(data_config, tmp_path, plain, name, contents, why):
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    refused(f"{name}.*{why}", prepare_data, replace(data_config, data=str(tmp_path / name)), plain)


def test_a_compressed_file_of_a_folder_is_not_left_out_in_silence(data_config, tmp_path, plain):
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "a.jsonl", [chat("<think>I think</think>1")])
    (tmp_path / "rows" / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    data = replace(data_config, data=str(tmp_path / "rows"))
    assert prepare_data(data, plain).report.rows == 1, "it is there decompressed, too"
    (tmp_path / "rows" / "b.jsonl.gz").write_bytes(b"\x1f\x8b")
    refused(r"b\.jsonl\.gz is compressed", prepare_data, data, plain)
