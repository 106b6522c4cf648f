"""Makes training texts that end with references far back: `python make.py --out train.jsonl DIRECTORY ...`.

Reads text files (plain, Markdown, reStructuredText, POD, Python; also gzipped) and writes rows ``{"text": ...}``, each
a window of a file (`seergate.distill.long_text`). `seergate tune` makes its texts in the same way.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from seergate.distill.long_text import SUFFIXES, referring_back, texts, windows
from seergate.errors import SeergateError


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
    if min(args.rows, args.characters) < 1:
        parser.error("rows and characters must be at least 1")
    if not args.out.parent.is_dir():
        parser.error(f"there is no directory {args.out.parent}")
    rng = random.Random(args.seed)
    try:
        parts = [part for text in texts(args.paths) for part in windows(text, args.characters)]
    except SeergateError as error:
        parser.error(str(error))
    if not parts:
        parser.error(f"no file of {', '.join(SUFFIXES)} there has {args.characters} characters")
    rng.shuffle(parts)
    with args.out.open("w", encoding="utf-8") as out:
        for text in referring_back(parts[: args.rows], rng):
            out.write(json.dumps({"text": text}) + "\n")
    print(f"{min(len(parts), args.rows)} rows in {args.out}, of {len(parts)} windows")


if __name__ == "__main__":
    main()
