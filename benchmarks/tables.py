"""Tables of the pages in `PAGES`, from the files in `benchmarks/results`.

python benchmarks/tables.py                     # print them
python benchmarks/tables.py --write             # put them into the pages between <!-- table: NAME --> and <!-- end -->
python benchmarks/tables.py --write board.md    # into one page
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import board
from common import RESULTS

PAGES = [RESULTS.parents[1] / "docs" / name for name in ("methods.md", "decoding.md", "reason_cache.md", "board.md")]
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    """The rows of a file of results."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def by_method(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Method -> its rows, by budget."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["method"], []).append(row)
    return {name: sorted(own, key=lambda row: row["budget"] or 0) for name, own in by_name.items()}


def right(row: Row, digits: int = 1) -> str:
    """Right answers in per cent ± standard error."""
    return f"{100 * row['accuracy']:.{digits}f} ± {100 * row['accuracy_se']:.{digits}f}"


def distance(row: Row) -> str:
    """KL from dense attention ± standard error."""
    return f"{row['kl']:.3f} ± {row['kl_se']:.3f}"


def share(row: Row, dense: Row, key: str) -> str:
    """A figure in per cent of dense attention's."""
    return f"{100 * row[key] / dense[key]:.0f}"


BESIDE: dict[str, Callable[[Row, Row], str]] = {
    "99th percentile": lambda row, dense: f"{row['kl_p99']:.2f}",
    "read %": lambda row, dense: share(row, dense, "bytes_read_per_step"),
    "held %": lambda row, dense: share(row, dense, "own_bytes_mean"),
}
"""Title of a column -> function that writes its cell from a row and the row of dense attention."""


def code(name: str) -> str:
    """A method's name as Markdown code; a name with a description after a comma stays plain text."""
    return name if "," in name else f"`{name}`"


def by_budget(rows: list[Row], cell: Callable[[Row], str], *beside: str) -> list[Sequence[str]]:
    """``cell`` of each method at each budget, and columns of `BESIDE` at the middle budget or without one."""
    series = by_method(rows)
    dense, columns = series["dense"][0], sorted({row["budget"] for row in rows if row["budget"] is not None})
    middle = columns[len(columns) // 2]
    lines: list[Sequence[str]] = [("method", *map(str, columns), *(f"{title} at {middle}" for title in beside))]
    for method, own in series.items():
        figures = {row["budget"]: cell(row) for row in own}
        cells = [figures.get(budget, "") for budget in columns]
        if None in figures:
            cells[0] = f"{figures[None]}, no budget"
        shown = next((row for row in own if row["budget"] in (None, middle)), None)
        lines.append((code(method), *cells, *(BESIDE[title](shown, dense) if shown else "" for title in beside)))
    return lines


def lengths() -> list[Sequence[str]]:
    """Right answers of the tiny reasoner with dense attention, by size of the problem."""
    rows = [row for row in rows_of("tiny_reasoner") if row["part"] == "lengths"]
    tokens = (f"{row['mean_prompt_tokens'] + row['mean_tokens']:,.0f}" for row in rows)
    return [
        ("variables", *(str(row["variables"]) for row in rows)),
        ("tokens", *tokens),
        (f"right of {rows[0]['n_problems']}", *(f"{row['accuracy'] * row['n_problems']:.0f}" for row in rows)),
    ]


def decoding() -> list[Sequence[str]]:
    """Milliseconds per token in transformers, and the speedup over its static cache."""
    ways = {"hf_dynamic": "transformers, dynamic cache", "hf_static": "transformers, static cache"}
    ours = {"dense": "seergate, dense", "gate": "`gate`", "quest": "`quest`", "gate_offloaded": "`gate`, offloaded"}
    lines: list[Sequence[str]] = [("context", *ways.values(), *ours.values(), "at most")]
    for row in rows_of("end_to_end-cpu-float32-2t"):
        ms = {name: way["token_median_ms"] for name, way in row["ways"].items()}
        label = f"{max(row['lengths']) // 1024}k" + (f", batch of {row['batch']}, ragged" if row["batch"] > 1 else "")
        cells = [f"{ms[name]:.1f}" for name in ways]
        cells += [f"{ms[name]:.1f} ({ms['hf_static'] / ms[name]:.2f}x)" for name in ours]
        lines.append((label, *cells, f"{row['ceiling']:.2f}x" if "ceiling" in row else ""))
    return lines


def distances(name: str) -> list[Sequence[str]]:
    """KL of SmolLM2's methods from dense attention on held-out texts."""
    lines = by_budget(rows_of(name), distance, *BESIDE)
    return [line for line in lines if line[0] != "`dense`"]


def needles() -> list[Sequence[str]]:
    """Accuracy of SmolLM2 on needles in long texts."""
    lines: list[Sequence[str]] = [("method", "right answers, %", "log p of the answer", "read %", "held %")]
    series = by_method(rows_of("smollm2_needles"))
    for method, own in series.items():
        for row in own:
            shares = (BESIDE[title](row, series["dense"][0]) for title in ("read %", "held %"))
            lines.append((code(method), right(row, 0), f"{row['reply_logprob']:.2f}", *shares))
    return lines


def anchors(name: str) -> list[Sequence[str]]:
    """KL if layers reuse the blocks of anchor layers, by number of anchors, and the time of a step with gates."""
    rows = rows_of(name)
    parts = {part: [row for row in rows if row["part"] == part] for part in ("plan", "anchors", "trained", "times")}
    trained = {row["anchors"]: row for row in parts["trained"]}
    by_plan, times = (
        {(row["method"], row.get("anchors")): row for row in parts[part]} for part in ("anchors", "times")
    )
    heads = ["anchors", "KL, `gate`", *(["trained"] if trained else []), "KL, `quest`", "KL, `oracle`"]
    lines: list[Sequence[str]] = [(*heads, "KiB read", "to choose", "step, ms")]
    for count in (row["anchors"] for row in parts["plan"]):
        gate = by_plan["gate", count]
        kls = [gate, *([trained[count]] if trained else []), by_plan["quest", count], by_plan["oracle", count]]
        kib = (f"{gate[key] / 1024:,.0f}" for key in ("bytes_read_per_step", "bytes_scored_per_step"))
        lines.append((str(count), *map(distance, kls), *kib, f"{times['gate', count]['step_ms']['median']:.1f}"))
    blank = [""] * (len(lines[0]) - 2)
    return [*lines, ("dense attention", *blank, f"{times['dense', None]['step_ms']['median']:.1f}")]


def rules(name: str) -> list[Sequence[str]]:
    """KL of a budget, a share of the context and a threshold at equal bytes."""
    rows = (row for row in rows_of(name) if row["part"] == "rules")
    lines = (
        (code(f"{row['rule']}={row['value']}"), distance(row), f"{row['bytes_read_per_step'] / 1024:.0f}")
        for row in rows
    )
    return [("rule", "KL", "KiB read"), *lines]


def sharing() -> list[Sequence[str]]:
    """Values that the tiny reasoner recalls from shared steps, and the cache that sharing saves, in per cent."""
    rows = rows_of("reason_cache_accuracy")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines: list[Sequence[str]] = [("rounds", *map(code, methods))]
    for rounds in sorted({row["rounds"] for row in rows}):
        by_name = {row["method"]: row for row in rows if row["rounds"] == rounds}
        cells = []
        for row in (by_name[method] for method in methods):
            saved = f", saves {100 * row['amsr']:.1f}" if "amsr" in row else ""
            cells.append(f"{100 * row['recalled']:.1f} ± {100 * row['recalled_standard_error']:.1f}{saved}")
        lines.append((str(rounds), *cells))
    return lines


MISSING = "–"


def of_board(row: Row | None, problems: int) -> str:
    """A cell of the board: KL or right answers in per cent, the 95 % interval, and the number of problems if it is not
    ``problems``. A star marks a paired difference from dense attention whose interval excludes zero.
    """
    if row is None:
        return MISSING
    if "kl" in row:
        low, high = row.get("kl_low"), row.get("kl_high")
        text = f"{row['kl']:.3f}" + ("" if low is None else f" [{max(0.0, low):.3f}, {high:.3f}]")
    else:
        low, high = row["accuracy_low"], row["accuracy_high"]
        text = f"{100 * row['accuracy']:.0f} [{100 * low:.0f}, {100 * high:.0f}]"
        text += "*" if row.get("minus_dense_low", 0) > 0 or row.get("minus_dense_high", 0) < 0 else ""
    return text if row["n_problems"] == problems else f"{text}, of {row['n_problems']}"


def all_methods() -> list[Sequence[str]]:
    """The board: every method and part of each model, at the budgets of `board.PARTS`."""
    record = json.loads((RESULTS / "board.json").read_text(encoding="utf-8"))
    scored = {key: part for key, part in board.PARTS.items() if key != "times"}
    shares, engines = ("read %", "held %"), ("transformers", "vllm")
    titles = [f"{part.title} at {part.budget}" for part in scored.values()]
    steps = (f"{engine}, ms: 1, 16 rows" for engine in ("transformers", "vLLM"))
    lines: list[Sequence[str]] = [("method", *titles, *(f"{share}, texts" for share in shares), *steps)]
    for model in board.MODELS:
        rows = {
            (row["part"], row["method"]): row
            for row in record["rows"]
            if row["model"] == model and row["budget"] in (None, board.PARTS[row["part"]].budget)
        }
        counts = {
            key: max((r["n_problems"] for (part, _), r in rows.items() if part == key), default=0) for key in scored
        }
        numbers = [f"{n} {'texts' if key == 'texts' else 'problems'}" if n else MISSING for key, n in counts.items()]
        lines.append((f"**{model}**", *numbers, "", "", "", ""))
        for method in dict.fromkeys(name for _, name in rows):
            cells = [of_board(rows.get((key, method)), counts[key]) for key in scored]
            text, dense = rows.get(("texts", method)), rows.get(("texts", "dense"))
            read = [BESIDE[share](text, dense) if text and dense else MISSING for share in shares]
            timed = rows.get(("times", method), {})
            ms = (
                ", ".join(f"{figures[0]:.0f}" for figures in timed[engine].values()) if engine in timed else MISSING
                for engine in engines
            )
            lines.append((code(method), *cells, *read, *ms))
    return lines


OTHER_TEXTS = {
    "texts": "Python's reference",
    "held_out": "Debian and Vim",
    "pages": "this documentation",
    "8000": "Python's reference, 8,000 tokens",
}
"""Part of the files of texts -> what is scored."""


def gates_and_quest() -> list[Sequence[str]]:
    """KL of the gates and of Quest at the same budget, or else at the nearest bytes read, on each kind of texts."""
    every = [*rows_of("board"), *rows_of("board_other_texts")]
    lines: list[Sequence[str]] = [
        ("model, texts", "gates: budget", "KL", "read %", "Quest: budget", "KL", "read %", "%")
    ]
    for model, (part, texts) in itertools.product(board.MODELS, OTHER_TEXTS.items()):
        series = by_method(row for row in every if (row["model"], row["part"]) == (model, part))
        for gate in series.get("gate", ()):
            quest = min(
                series["quest"],
                key=lambda row: (
                    row["budget"] != gate["budget"],
                    abs(row["bytes_read_per_step"] - gate["bytes_read_per_step"]),
                ),
            )
            pair = (
                (str(row["budget"]), f"{row['kl']:.4f}", share(row, series["dense"][0], "bytes_read_per_step"))
                for row in (gate, quest)
            )
            lines.append((f"{model}, {texts}", *itertools.chain(*pair), f"{100 * gate['kl'] / quest['kl']:.0f}"))
    return lines


def minus_dense(model: str) -> list[Sequence[str]]:
    """Points more than dense attention on the same problems, with the 95 % interval, and the bytes read, of each part
    and budget of a model; without a budget, at the part's.
    """
    rows = [row for row in rows_of("board") if row["model"] == model]
    dense = {row["part"]: row for row in rows if row["method"] == "dense"}
    cells: dict[str, dict[tuple[str, int], str]] = {row["method"]: {} for row in rows}
    for row in (row for row in rows if "minus_dense" in row):
        part, points = row["part"], [f"{100 * row[f'minus_dense{end}']:+.1f}" for end in ("", "_low", "_high")]
        read = share(row, dense[part], "bytes_read_per_step")
        column = part, row["budget"] or board.PARTS[part].budget
        cells[row["method"]][column] = f"{points[0]} [{points[1]}, {points[2]}], {read} %"
    parts = list(board.PARTS)
    columns = sorted(
        {column for own in cells.values() for column in own}, key=lambda each: (parts.index(each[0]), each)
    )
    titles = (f"{board.PARTS[part].title} at {budget}" for part, budget in columns)
    lines = ((code(method), *(own.get(column, MISSING) for column in columns)) for method, own in cells.items() if own)
    return [("method", *titles), *lines]


TABLES: dict[str, Callable[[], list[Sequence[str]]]] = {
    "texts": lambda: distances("smollm2_texts"),
    "long-texts": lambda: distances("smollm2_long_texts"),
    "needles": needles,
    "decoding": decoding,
    "lengths": lengths,
    "budgets": lambda: by_budget([row for row in rows_of("tiny_reasoner") if row["part"] == "medium"], right),
    "msa": lambda: by_budget(rows_of("gates_msa"), right, "read %"),
    "methods": lambda: by_budget(rows_of("methods"), lambda row: f"{100 * row['accuracy']:.0f}", "read %", "held %"),
    "anchors": lambda: anchors("anchors"),
    "anchors-real": lambda: anchors("anchors_smollm2"),
    "rules": lambda: rules("anchors"),
    "rules-real": lambda: rules("anchors_smollm2"),
    "sharing": sharing,
    "board": all_methods,
    "gates-and-quest": gates_and_quest,
    "minus-dense": lambda: minus_dense("qwen2.5-coder-0.5b"),
}


def markdown(name: str) -> str:
    """A table, with its markers."""
    head, *lines = TABLES[name]()
    text = "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (head, ["---"] * len(head), *lines))
    return f"<!-- table: {name} -->\n\n{text}\n\n<!-- end -->"


def filled(page: str) -> str:
    """The page with its tables replaced by new ones."""
    return re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", lambda place: markdown(place[1]), page, flags=re.DOTALL)


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", nargs="*", metavar="PAGE", help="into these pages [all]")
    names = parser.parse_args().write
    if names is None:
        print(*map(markdown, TABLES), sep="\n\n")
        return
    for page in (page for page in PAGES if not names or page.name in names):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
