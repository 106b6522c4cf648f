"""The texts that the recommended recipe trains on."""

import gzip
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seergate.distill.long_text import FACTS, referring_back, texts, windows, with_facts, with_quotes
from tests.support.running import ROOT, refused

WORDS = "some words of a text that says nothing in particular and goes on and on".split()  # noqa: SIM905


def plain(characters: int) -> str:
    rng = random.Random(0)
    return " ".join(rng.choice(WORDS) for _ in range(characters // 4))[:characters]


def mentions(text: str, which: int) -> list[tuple[int, str, str]]:
    """(place, name, value) of the statements (0) or the repetitions (1) of facts."""
    places = []
    for wordings in FACTS:
        pattern = re.escape(wordings[which]).replace(r"\{name\}", "(?P<name>[a-z]+)", 1)
        pattern = pattern.replace(r"\{name\}", "(?P=name)").replace(r"\{value\}", "(?P<value>[A-Z0-9]+|[a-z]+ [a-z]+)")
        places += [(m.start(), m["name"], m["value"]) for m in re.finditer(pattern, text)]
    return places


@pytest.mark.parametrize(("characters", "facts", "repetitions"), [(16_000, 24, 89), (4_000, 6, 22), (300, 4, 1)])
def test_every_repetition_is_of_a_fact_stated_far_before_it(characters: int, facts: int, repetitions: int) -> None:
    text = with_facts(plain(characters), random.Random(1))
    stated, repeated = mentions(text, 0), mentions(text, 1)
    assert len({(name, value) for _, name, value in stated}) == facts
    assert len(repeated) == repetitions
    last = max(place for place, _, _ in stated)
    for place, name, value in repeated:
        assert place > last and (name, value) in {(n, v) for _, n, v in stated}
    if characters >= 4_000:  # a pack that is cut at the window's length still has its repetitions
        assert 0.8 * characters < len(text) <= 1.1 * characters


def test_texts_without_spaces() -> None:
    chinese = "".join(random.Random(0).choices("天地玄黃宇宙洪荒日月盈昃辰宿列張", k=20_000))
    parts = list(windows(chinese, 4_000))
    assert [len(part) for part in parts] == [4_000] * 5
    text = with_facts(parts[0], random.Random(1))
    stated, repeated = ([place for place, *_ in mentions(text, which)] for which in (0, 1))
    assert max(stated) < min(repeated) and max(repeated) > 0.9 * len(text) and min(repeated) > 0.4 * len(text)
    quotes = re.findall('As quoted above: "(.*)"', with_quotes(parts[0], random.Random(1)))
    assert len(set(quotes)) == len(quotes) > 3


@pytest.mark.parametrize(
    "change", [lambda data: data[:-9], lambda data: data[2:], lambda data: data[:12] + b"\xff" * 9]
)
def test_a_damaged_archive_is_named(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "notes.txt.gz"
    file.write_bytes(gzip.compress(plain(4_000).encode()))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "notes.txt").write_text("hidden")
    assert list(texts([tmp_path])) == [plain(4_000)]
    file.write_bytes(change(file.read_bytes()))
    refused("notes.txt.gz cannot be read", list, texts([tmp_path]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "nowhere/train.jsonl"], "there is no directory nowhere"),
        (["--out", "train.jsonl", "--rows", "0"], "rows and characters must be at least 1"),
        (["--out", "train.jsonl"], "notes.txt.gz cannot be read"),
    ],
)
def test_the_script_says_what_is_wrong(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt.gz").write_bytes(b"no archive")
    script = ROOT / "train" / "recipes" / "long_text" / "make.py"
    done = subprocess.run(
        [sys.executable, script, ".", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and said in done.stderr and not (tmp_path / "train.jsonl").exists()
    assert "Traceback" not in done.stderr


def test_of_six_texts_four_have_facts_and_one_quotes() -> None:
    made = list(referring_back([plain(4_000)] * 12, random.Random(0)))
    assert [bool(mentions(text, 1)) for text in made] == [True, True, False, True, True, False] * 2
    assert ["As quoted above" in text for text in made] == [False] * 5 + [True] + [False] * 5 + [True]
    assert made[2] == plain(4_000)
    assert made == list(referring_back([plain(4_000)] * 12, random.Random(0)))
