"""Texts whose ends refer far back, to train gates on: `python make.py --out train.jsonl DIRECTORY ...`.

Reads text files (plain, Markdown, reStructuredText, POD, Python; also gzipped) and writes rows ``{"text": ...}``, a
window of a file each. Of five windows two stay as they are, two get facts that are stated in the first part and asked
for in the last, and one ends with passages of itself, quoted word for word: attention to far blocks, from which gates
learn to find them. No fact is worded as in RULER, whose wording `seergate eval --task needle` asks for.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".txt", ".md", ".rst", ".pod", ".py")
_NAMES = """
amber anchor basil cedar copper dahlia ember falcon fjord garnet harbor hazel indigo jasper kelp lantern lotus
maple meadow nectar onyx orchid pearl pebble quartz quince raven rowan saffron slate thistle topaz umber
velvet violet walnut willow yarrow zephyr
"""
NAMES = _NAMES.split()
FACTS = (
    ("The access code of {name} is {value}.", "As noted above, the access code of {name} is {value}."),
    ("Remember that locker {name} opens with {value}.", "To open locker {name}, one uses {value}."),
    ("{name}'s telephone extension: {value}.", "Call {name} at extension {value}."),
    ("Invoice {value} was issued to the {name} company.", "The {name} company was issued invoice {value}."),
    ('{name} = "{value}"', 'print({name})  # "{value}"'),
    ("In the register, {name} has the entry {value}.", "The entry of {name} in the register is {value}."),
)
"""How a fact is stated, and how it is repeated."""


def texts(paths: list[Path]) -> Iterator[str]:
    """The text of each file, in the order of the paths."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            plain = file.name.removesuffix(".gz")
            if file.is_file() and plain.endswith(SUFFIXES):
                data = gzip.decompress(file.read_bytes()) if plain != file.name else file.read_bytes()
                yield data.decode("utf-8", errors="replace")


def windows(text: str, size: int) -> Iterator[str]:
    """Parts of ``size`` characters that begin and end between words; a rest is left out."""
    words, part, length = re.findall(r"\S+\s*", text), [], 0
    for word in words:
        part.append(word)
        length += len(word)
        if length >= size:
            yield "".join(part)
            part, length = [], 0


def value(rng: random.Random) -> str:
    """Digits, two words, or letters and digits."""
    kind = rng.random()
    if kind < 0.5:
        return "".join(rng.choices("0123456789", k=rng.randint(4, 7)))
    if kind < 0.75:
        return " ".join(rng.sample(NAMES, 2))
    return "".join(rng.choices("ABCDEFGHJKLMNPRSTUVWXYZ23456789", k=6))


def with_facts(text: str, rng: random.Random, count: int = 14) -> str:
    """The text with ``count`` facts in its first 55 %, of which all but two are repeated in its last 40 %."""
    facts = [(name, value(rng), rng.choice(FACTS)) for name in rng.sample(NAMES, count)]
    places = [(rng.uniform(0.01, 0.55), 0, fact) for fact in facts]
    places += [(rng.uniform(0.6, 0.99), 1, fact) for fact in rng.sample(facts, count - 2)]
    parts, at = [], 0
    for share, which, (name, given, wordings) in sorted(places):
        end = max(at, text.find(" ", int(share * len(text))))
        parts += [text[at:end], "\n", wordings[which].format(name=name, value=given), "\n"]
        at = end
    return "".join([*parts, text[at:]])


def with_quotes(text: str, rng: random.Random) -> str:
    """The first 70 % of the text, then passages of it up to the whole length."""
    first, size = text[: int(0.7 * len(text))], len(text)
    parts, length = [first], len(first)
    while length < size:
        count = rng.randint(100, 360)
        begin = first.find(" ", rng.randrange(len(first) - count))
        parts.append(f'\n\nAs quoted above: "{first[begin + 1 : begin + count]}"')
        length += len(parts[-1])
    return "".join(parts)


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="DIRECTORY", help="directories or files of text")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--characters", type=int, default=16000, help="length of a text [16000]")
    parser.add_argument("--rows", type=int, default=1000, help="rows at most [1000]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if missing := [str(path) for path in args.paths if not path.exists()]:
        parser.error(f"there is no {', '.join(missing)}")
    rng = random.Random(args.seed)
    parts = [part for text in texts(args.paths) for part in windows(text, args.characters)]
    if not parts:
        parser.error(f"no file of {', '.join(SUFFIXES)} there has {args.characters} characters")
    rng.shuffle(parts)
    kinds = (with_facts, None, with_quotes, None, with_facts)
    with args.out.open("w", encoding="utf-8") as out:
        for number, part in enumerate(parts[: args.rows]):
            kind = kinds[number % len(kinds)]
            out.write(json.dumps({"text": part if kind is None else kind(part, rng)}) + "\n")
    print(f"{min(len(parts), args.rows)} rows in {args.out}, of {len(parts)} windows")


if __name__ == "__main__":
    main()
