"""The tables of docs/methods.md and of benchmarks/results/README.md, from the files in `benchmarks/results`.

python benchmarks/tables.py            # print them
python benchmarks/tables.py --write    # put them into the pages, between <!-- table: NAME --> and <!-- end -->
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from common import RESULTS

ROOT = RESULTS.parents[1]
PAGES = (ROOT / "docs/methods.md", RESULTS / "README.md")
MISSED = {
    "attn_gate": "the paper's gate: one key for eight tokens",
    "two keys": "two keys for eight tokens",
    "a key per token and KV head": "a key per token and KV head",
    "msa": "`msa`: a key per token, shared by the KV heads",
    "indexer": "`indexer`",
    "indexer: both, as DeepSeek's": "`indexer` as DeepSeek's: weights of either sign, one choice for all KV heads",
    "width 256": "the paper's gate, twice as wide",
    "a query per head": "the paper's gate, a query per head",
    "no RoPE": "the paper's gate without RoPE",
    "blocks of 16": "the paper's gate, blocks of 16",
}
"""Variant of oracle_gap.json -> its name in the short table."""
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    """The rows of a file of results."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def by_method(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Method -> its rows, by budget."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return {name: sorted(own, key=lambda row: row["budget"] or 0) for name, own in found.items()}


def right(row: Row | None, digits: int = 0) -> str:
    """Right answers in per cent ± standard error."""
    return f"{100 * row['accuracy']:.{digits}f} ± {100 * row['accuracy_se']:.{digits}f}" if row else ""


def at(rows: Iterable[Row], budget: int) -> Row | None:
    """The row with a budget."""
    return next((row for row in rows if row["budget"] == budget), None)


def percent(rows: Sequence[Row], dense: Row, key: str) -> str:
    """A figure of each row in per cent of dense attention's."""
    return " / ".join(f"{100 * row[key] / dense[key]:.0f}" for row in rows)


def code(name: str) -> str:
    """A method's name as code, its options as text."""
    return name if "," in name else f"`{name}`"


def budgets() -> list[Sequence[str]]:
    """Accuracy by tokens read, of the shipped model and of the one from scratch."""
    lines: list[Sequence[str]] = [("model", "method", "16", "32", "64", "128")]
    for label, name in (("shipped", "tiny_reasoner"), ("from scratch", "tiny_reasoner_scratch")):
        for method, own in by_method(row for row in rows_of(name) if row["part"] == "medium").items():
            cells = [right(row, 1) for row in own] + [""] * (4 - len(own))
            lines.append(
                (label, code(method), *(cells if method != "dense" else [f"{cells[0]}, reads all", "", "", ""]))
            )
    return lines


def methods() -> list[Sequence[str]]:
    """All methods at four budgets."""
    grid, lines = (64, 128, 256, 384), list[Sequence[str]]()
    found = by_method(rows_of("methods"))
    for name, own in found.items():
        answers = [right(at(own, budget)) for budget in grid]
        if own[0]["budget"] is None:
            answers[0] = f"{right(own[0])}, no budget"
        shares = (percent(own, found["dense"][0], key) for key in ("own_bytes_mean", "bytes_read_per_step"))
        lines.append((code(name), *answers, *shares))
    return [("method", *map(str, grid), "held %", "read %"), *lines]


def largest() -> list[Sequence[str]]:
    """The largest problems, at equal budgets and at equal bytes read."""
    equal, matched = by_method(rows_of("methods_largest")), by_method(rows_of("methods_largest_read"))
    lines: list[Sequence[str]] = [("method", "128", "512", "at 14 % of the bytes", "at 39 %")]
    for name, own in equal.items():
        answers = [right(at(own, budget)) for budget in (128, 512)]
        if own[0]["budget"] is None:
            answers[0] = f"{right(own[0])}, no budget"
        other = matched.get(name, []) if own[0]["budget"] is not None else []
        pair = [right(row) for row in other] if len(other) == 2 else ["", *(right(row) for row in other)]
        lines.append((code(name), *answers, *[*pair, "", ""][:2]))
    return lines


def missed(names: dict[str, str] | None = None) -> list[Sequence[str]]:
    """What gates miss: some variants, or all."""
    rows = {row["variant"]: row for row in rows_of("oracle_gap")}
    names = names or {name: name for name in rows}
    lines: list[Sequence[str]] = [("gate", "numbers per token", "KL", "missed at 32, %", "at 64, %")]
    for name, label in names.items():
        row = rows[name]
        share = [f"{100 * row[f'missed at {budget}']:.1f}" for budget in (32, 64)]
        lines.append((label, "" if row["numbers"] is None else f"{row['numbers']:g}", f"{row['kl']:.3f}", *share))
    return lines


def trained() -> list[Sequence[str]]:
    """Gates of every kind after one training."""
    found = by_method(rows_of("trained"))
    lines: list[Sequence[str]] = [("gates", "64", "128", "held %", "read %", "fewer tokens (budget)")]
    for name, own in found.items():
        pair = [row for row in own if row["budget"] in (64, 128)]
        if name != "dense":
            shares = (percent(pair, found["dense"][0], key) for key in ("own_bytes_mean", "bytes_read_per_step"))
            rest = ", ".join(f"{right(row)} ({row['budget']})" for row in own if row not in pair)
            kind = re.sub(r"gate \[(.*)\]", r"\1", name)
            lines.append((f"`{kind}`", *map(right, pair), *shares, rest))
    return lines


def retention() -> list[Sequence[str]]:
    """Retention gates at five budgets."""
    dense, grid = by_method(rows_of("methods"))["dense"][0], (32, 64, 128, 256, 384)
    lines: list[Sequence[str]] = [("method", *map(str, grid), "held %", "read %", "tokens")]
    for name, own in by_method(rows_of("retention")).items():
        shares = (percent(own, dense, key) for key in ("own_bytes_mean", "bytes_read_per_step"))
        lengths = " / ".join(f"{row['mean_tokens']:.0f}" for row in own)
        lines.append((f"`{name}`", *(right(at(own, budget)) for budget in grid), *shares, lengths))
    return lines


def costs(name: str, speeds: str = "") -> list[Sequence[str]]:
    """What methods held and read and how long they answered, by budget."""
    found, quick = by_method(rows_of(name)), by_method(rows_of(speeds)) if speeds else {}
    head = ("method", "budgets", "held %", "peak %", "read %", "tokens", *(["speed"] if speeds else []))
    lines: list[Sequence[str]] = [head]
    keys = ("own_bytes_mean", "own_bytes_peak", "bytes_read_per_step")
    for method, own in found.items():
        shares = [percent(own, found["dense"][0], key) for key in keys]
        lengths = " / ".join(f"{row['mean_tokens']:.0f}" for row in own)
        line = [code(method), " / ".join(str(row["budget"] or "") for row in own), *shares, lengths]
        if speeds:
            slow = quick["dense"][0]["tokens_per_second"]
            line.append(" / ".join(f"{row['tokens_per_second'] / slow:.2f}" for row in quick.get(method, [])))
        lines.append(line)
    return lines


def decoding() -> list[Sequence[str]]:
    """Milliseconds per token inside transformers, and how many times as fast as its static cache."""
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


def texts() -> list[Sequence[str]]:
    """Distance of SmolLM2's methods from dense attention on held-out texts, of two lengths."""
    lines: list[Sequence[str]] = [("tokens", "method", "read at most", "KL", "99th percentile", "read %", "held %")]
    for length, name in (("2,560", "smollm2_texts"), ("8,000", "smollm2_long_texts")):
        found = by_method(rows_of(name))
        (dense,) = found.pop("dense")
        for method, own in found.items():
            for row in own:
                shares = (percent([row], dense, key) for key in ("bytes_read_per_step", "own_bytes_mean"))
                distance = f"{row['kl']:.3f} ± {row['kl_se']:.3f}", f"{row['kl_p99']:.2f}"
                lines.append((length, code(method), str(row["budget"]), *distance, *shares))
    return lines


def needles() -> list[Sequence[str]]:
    """Numbers that SmolLM2 finds in long text."""
    lines: list[Sequence[str]] = [("method", "right answers, %", "log p of the answer", "read %", "held %")]
    found = by_method(rows_of("smollm2_needles"))
    for method, own in found.items():
        for row in own:
            shares = (percent([row], found["dense"][0], key) for key in ("bytes_read_per_step", "own_bytes_mean"))
            lines.append((code(method), right(row), f"{row['reply_logprob']:.2f}", *shares))
    return lines


def anchors() -> list[Sequence[str]]:
    """What the tiny reasoner loses where layers read the choice of others, and what a step of its gates takes."""
    found = rows_of("anchors")
    plans = {row["anchors"]: row for row in found if row["part"] == "plan"}
    by_name = {(row["method"], row.get("anchors")): row for row in found if row["part"] == "anchors"}
    dense = by_name["dense", None]["step_ms"]["median"]
    names = ("gate", "quest", "oracle")
    lines: list[Sequence[str]] = [
        ("anchors", "recall", *(f"KL, {code(name)}" for name in names), "KiB read", "to choose", "step, ms")
    ]
    for count, plan in plans.items():
        gate = by_name["gate", count]
        layers = "all" if count == max(plans) else " and ".join(map(str, plan["layers"]))
        kls = [f"{by_name[name, count]['kl']:.3f} ± {by_name[name, count]['kl_se']:.3f}" for name in names]
        sizes = [f"{gate[key] / 1024:.1f}" for key in ("bytes_read_per_step", "bytes_scored_per_step")]
        lines.append((layers, f"{plan['gate_recall']:.3f}", *kls, *sizes, f"{gate['step_ms']['median']:.2f}"))
    return [*lines, ("dense attention", "", "", "", "", "", "", f"{dense:.2f}")]


def rules() -> list[Sequence[str]]:
    """A budget, a share of the context and a threshold at equal bytes."""
    lines: list[Sequence[str]] = [("rule", "KL", "KiB read", "tokens per KV head")]
    for row in rows_of("anchors"):
        if row["part"] == "rules":
            heads = [head for layer in row["tokens_per_head"] for head in layer]
            kl = f"{row['kl']:.3f} ± {row['kl_se']:.3f}"
            rule, kib = code(f"{row['rule']}={row['value']}"), f"{row['bytes_read_per_step'] / 1024:.1f}"
            lines.append((rule, kl, kib, f"{sum(heads) / len(heads):.0f}"))
    return lines


TABLES: dict[str, Callable[[], list[Sequence[str]]]] = {
    "budgets": budgets,
    "methods": methods,
    "largest": largest,
    "missed": lambda: missed(MISSED),
    "trained": trained,
    "retention": retention,
    "methods-costs": lambda: costs("methods", "methods-speed"),
    "largest-costs": lambda: costs("methods_largest"),
    "largest-read-costs": lambda: costs("methods_largest_read"),
    "variants": missed,
    "decoding": decoding,
    "texts": texts,
    "needles": needles,
    "anchors": anchors,
    "rules": rules,
}


def markdown(name: str) -> str:
    """A table, with its markers."""
    head, *lines = TABLES[name]()
    text = "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (head, ["---"] * len(head), *lines))
    return f"<!-- table: {name} -->\n\n{text}\n\n<!-- end -->"


def filled(page: str) -> str:
    """The page with its tables made again.

    Raises:
        KeyError: if it has a marker of a table that is unknown.
    """
    return re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", lambda found: markdown(found[1]), page, flags=re.DOTALL)


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into the pages")
    if not parser.parse_args().write:
        print(*map(markdown, TABLES), sep="\n\n")
        return
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
