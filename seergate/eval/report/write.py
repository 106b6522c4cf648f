"""Writes a report: `report.md`, its plots, and the same as one self-contained `report.html`."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions.tables import TableExtension
from markdown.extensions.toc import slugify
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

from seergate.durable import check_writable
from seergate.errors import SeergateError
from seergate.escaping import html_text, markdown_block, markdown_code, markdown_text, with_policy
from seergate.eval.environment import GRADES_WITH
from seergate.eval.generation.samples import Limit
from seergate.eval.grading.programs import PROGRAM
from seergate.eval.report.findings import cautions, findings, verdict
from seergate.eval.report.load import Sweep, apart, grouped, load_sweeps
from seergate.eval.report.plots import accuracy_plot, bytes_plot, depth_plot, length_plot, recall_plot, text_plot
from seergate.eval.report.published import deviations, published
from seergate.eval.report.tables import (
    TEXTS,
    core_table,
    csv_text,
    equal_bytes,
    pass_table,
    proxy_table,
    recall_table,
    table,
    table_beside,
)
from seergate.eval.sampling import Sampling
from seergate.eval.store import flatten, write_text

TITLE = "Decoding with a token budget"


@dataclass(frozen=True)
class Report:
    """Files and findings of a written report."""

    markdown: Path
    html: Path
    plots: list[Path] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def check_report(out: Path) -> None:
    """Raise `SeergateError` if a report in a directory would replace a ``report.md`` that is not of seergate."""
    earlier = out / "report.md"
    if earlier.is_file() and not earlier.read_bytes().startswith(f"# {TITLE}".encode()):
        raise SeergateError(f"{earlier} is not a report of seergate's and would be replaced; give another --out")


def write_report(
    root: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *others: str | os.PathLike[str]
) -> Report:
    """Write a report on run directories, given themselves or by the directories that contain them.

    Args:
        root: a directory that `seergate.eval` wrote.
        out: directory of the report; ``root`` if ``None``.
        *others: further such directories; comparable runs are put into one section, whatever their directory.

    Raises:
        SeergateError: if no run has finished samples, a run is damaged, two are runs of the same setting, or ``out``
            has another file named ``report.md``.
    """
    sweeps = load_sweeps(root, *others)
    out = Path(out or root)
    check_writable(out)
    check_report(out)
    parts, plots, sentences = [], [], []
    one_task_each = len({sweep.task for sweep in sweeps}) == len(sweeps)  # which the headings name
    for i, (sweep, why) in enumerate(zip(sweeps, apart(sweeps), strict=True)):
        suffix = f"-{i + 1}" if len(sweeps) > 1 else ""
        text, images = _section(sweep, out, suffix, {} if one_task_each else why)
        parts.append(text)
        plots += images
        sentences += findings(sweep)
    title = f"{TITLE}: {', '.join(dict.fromkeys(_name(s) for s in sweeps))}"
    markdown = "\n".join([f"# {markdown_text(title)}\n", *parts])
    write_text(out / "report.md", markdown)
    write_text(out / "report.html", to_html(title, markdown, out))
    return Report(out / "report.md", out / "report.html", plots, sentences)


def _name(sweep: Sweep) -> str:
    return f"{sweep.model} on {sweep.task}"


def _section(sweep: Sweep, out: Path, suffix: str, why: dict[str, Any]) -> tuple[str, list[Path]]:
    """Markdown and plots of one sweep; ``why``: the options that set it apart from the others (`apart`)."""
    plots = []

    def plot(draw: Callable[[Sweep, Path], Path | None], name: str, what: str) -> list[str]:
        if (drawn := draw(sweep, out / f"{name}{suffix}.png")) is None:
            return []
        plots.append(drawn)
        return [f"![{what}]({drawn.name})"]

    figures = out / f"results{suffix}.csv"
    write_text(figures, csv_text(sweep))
    if sweep.of_texts:
        first, details, results, note = list[str](), list[str](), table(sweep, TEXTS), _TEXTS_NOTE
        picture = plot(text_plot, "kl", "KL against bytes read")
    else:
        first, results, note = [f"**{markdown_text(verdict(sweep))}**"], core_table(sweep), _CORE_NOTE
        picture = plot(accuracy_plot, "accuracy", "Accuracy against token budget") if sweep.budgets else []
        details = _details(sweep, plot)
    if why:
        first.insert(0, f"A separate section, as not all runs have: {markdown_text(_pairs(why))}.")
    blocks = [
        *picture,
        "## What this shows",
        _bullets(map(markdown_text, findings(sweep))),
        "Before quoting a number:",
        _bullets(map(markdown_text, cautions(sweep))),
        "## Results",
        results,
        f"{note} All figures: [{figures.name}]({figures.name}).",
        *details,
        "## How it was run",
        _conditions(sweep),
    ]
    headings = [block[3:] for block in blocks if block.startswith("## ")]
    if suffix:  # so that no heading occurs twice
        blocks = [f"{block} {suffix[1:]}" if block.startswith("## ") else block for block in blocks]
        first.insert(0, f"# {markdown_text(_name(sweep))}")
    links = " · ".join(f"[{each}](#{slugify(each + suffix, '-')})" for each in headings)
    return "\n\n".join([*first, links, *blocks]) + "\n", plots


def _details(sweep: Sweep, plot: Callable[..., list[str]]) -> list[str]:
    """The sections after the results of a sweep of answers."""
    blocks = list[str]()
    if any(s.evicts or (s.share, s.threshold) != (None, None) for s in sweep.settings) and (
        drawn := plot(bytes_plot, "bytes", "Accuracy against bytes held and bytes read")
    ):
        blocks += ["## Accuracy against bytes", *drawn]
    if drawn := plot(depth_plot, "depth", "Accuracy by length and depth"):
        blocks += ["## Length and depth", *drawn]
    for heading, text in equal_bytes(sweep):
        blocks += [f"## {heading}", text]
    if beside := table_beside(sweep, lambda s: published(s.config), lambda s: deviations(s.config)):
        blocks += ["## Beside the published numbers", beside, _PUBLISHED_NOTE]
    if passed := pass_table(sweep):
        blocks += ["## pass@k", passed, _PASS_NOTE]
    if sweep.budgets:
        blocks += ["## Generation length", *plot(length_plot, "length", "Generation length")]
    if proxies := proxy_table(sweep):
        blocks += ["## Cheap proxies", _proxy_note(sweep), proxies]
    if by_layer := recall_table(sweep):
        drawn = plot(recall_plot, "recall", "Recall")
        blocks += ["## Recall of attention mass", _recall_note(sweep), *drawn, *folded("Recall by layer", by_layer)]
    return [*blocks, "## Sample answers", *_sample_answers(sweep)]


TAIL = 400
"""Number of characters shown from the end of an answer, where the result is."""
SHOWN = 6
"""Maximum number of series whose answers are shown."""


def _sample_answers(sweep: Sweep) -> list[str]:
    """The end of each setting's first answer to the problem that settings agree on least, folded."""
    first: dict[str, dict[str, dict[str, Any]]] = {}
    for s, *_ in list(grouped(sweep.settings, lambda s: s.series).values())[:SHOWN]:  # each at its smallest budget
        for sample in s.samples:
            first.setdefault(str(sample["problem_id"]), {}).setdefault(s.label, sample)
    shared = [answers for answers in first.values() if len(answers) == max(map(len, first.values()))]
    answers = min(shared, key=lambda each: abs(sum(bool(a["correct"]) for a in each.values()) - len(each) / 2))
    some = next(iter(answers.values()))
    gold = "" if sweep.config["task"].get("grader") == PROGRAM else f", whose answer is {some['gold']}"
    problem = f"Problem {some['problem_id']}{gold}: the end of each completion."
    blocks = [markdown_text(problem)]
    for label, sample in answers.items():
        result = "right" if sample["correct"] else "wrong"
        text = str(sample.get("completion") or "")[-TAIL:]
        title = f"{label}: {result}, {sample['n_tokens']} tokens, ended by {sample['finish_reason']}"
        blocks += folded(title, markdown_block(text))
    return blocks


def folded(title: str, *blocks: str) -> list[str]:
    """Markdown blocks in a ``<details>`` element, which shows them when its title is clicked."""
    return [f"{_FOLDED}{html_text(title)}</summary>", *blocks, "</details>"]


_FOLDED = "<details><summary>"


_CORE_NOTE = (
    "Brackets, error bars and bands are 95 % intervals, clustered by problem: Wilson's at the effective number of "
    "samples; for *minus dense*, the paired difference on the same problems in points, that of Bonett and Price with "
    "Student's t. *truncated*: the answer hit the length limit. *no answer*: the grader found none. *density*: tokens "
    "read per token of context. *read per step* counts keys, values and whatever the method read to decide. *held*: "
    "memory of a sequence's tokens and of the method's state for them, mean over steps. Both are of layers with full "
    "attention. *tokens/s* is the speed of the whole batch on the machine below, and depends on what else ran there."
)
_TEXTS_NOTE = (
    "The beginning of each text is read like a prompt; the tokens after it are given one by one. KL is to dense "
    "attention's distribution of the next token, in nats per token: mean over texts, and 99th percentile of all "
    "tokens, with 95 % intervals clustered by text; beside it the paired difference from the first gate's at the same "
    "budget. "
    "*read* and *held* are bytes, in percent of the first row's."
)
_PUBLISHED_NOTE = (
    "Percent, pass@1, for what SeerAttention-R ran: dense, and gates and Quest on blocks of 64 tokens in all layers. "
    "*published* is from its repository; for Quest, from its Table 1. The repository's loop samples with temperature "
    "and top-p only, while a model's generation_config may add top-k, and its length limit counts the prompt; *unlike "
    "the paper* names the options of a row that differ. A difference within our interval is no evidence; the error of "
    "the published numbers is not known."
)
_PASS_NOTE = "Chance that at least one of k samples is right, unbiased from all samples, mean over problems."


def _proxy_note(sweep: Sweep) -> str:
    return (
        f"{_measured_on(sweep, 'next_token_kl')}, read densely up to the window (evicting methods decode their way "
        "there, but not from further back than 1024 tokens) and then decoded token by token: how far the distribution "
        "of the next token moves from dense, how often its most probable token stays the same, and the perplexity of "
        "the reference under the method and under dense attention. Errors that build up over longer stretches are not "
        "in these figures."
    )


def _measured_on(sweep: Sweep, metric: str) -> str:
    """The windows and the generations that a proxy was measured on, in words."""
    first = sweep.having(metric)[0].proxies
    windows = markdown_text(f"{first.get('windows')} windows of {first.get('tokens_per_window')} tokens")
    whose = (
        "reference reasoning, which is not known to be the same for all settings, so do not compare them by these "
        "figures (see `contexts` in `proxies.json`; `--measure-recall` with a dense run measures again)"
    )
    if sweep.proxies_on is not None:
        whose = f"{markdown_text(sweep.proxies_on)}'s own generations, the same for every method"
    return f"Measured on {windows} of {whose}"


def _recall_note(sweep: Sweep) -> str:
    wrong = ", so that a method is not measured on its own wrong answers" if sweep.proxies_on else ""
    return (
        "Share of dense attention's probability that fell on the tokens read, mean over query heads. "
        f"{_measured_on(sweep, 'recall')}{wrong}. Layers that read everything count as 100 %. Methods that evict "
        "tokens have no recall."
    )


def _conditions(sweep: Sweep) -> str:
    config = sweep.config
    model, task, generation, env = (config.get(k, {}) for k in ("model", "task", "generation", "environment"))
    gates = {s.gates: s.config["gates"]["path"] for s in sweep.settings if s.gates}
    sampling = Sampling(**{field.name: generation.get(field.name, field.default) for field in fields(Sampling)})
    limit = Limit(generation["max_new_tokens"], generation.get("max_total_tokens"))
    lines = [
        f"task: {_pairs({name: value for name, value in task.items() if value not in (None, '')})}",
        f"generation: {sampling}; {generation['samples']} sample(s) per problem, {limit}, "
        f"seed {generation['seed']}"
        + (f"; ended by tokens {', '.join(map(str, generation['ends']))}" if generation.get("ends") else ""),
        f"software: seergate {env.get('seergate')} (git {env.get('git') or 'unknown'}), torch {env.get('torch')}, "
        f"transformers {env.get('transformers')}, Python {env.get('python')}"
        + "".join(f", {name} {env[name]}" for name in GRADES_WITH.values() if name in env),
        f"machine: {env.get('device')}; {_pairs(env.get('hardware', {}))}",
    ]
    if rope := flatten(model.get("rope") or {}):
        lines.insert(0, f"rotary embedding: {_pairs(rope)}")
    about = f"{model['type']}, {model['parameters']:,} parameters, {model['dtype']}, weights {model['fingerprint']}"
    weights = [("model", model["path"], about), *(("gates", path, f"weights {own}") for own, path in gates.items())]
    named = [f"{what}: {markdown_code(str(path))} ({markdown_text(about)})" for what, path, about in weights]
    return _bullets([*named, *map(markdown_text, lines)])


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
[align=right] { text-align: right; }
th:first-child, td:first-child { position: sticky; left: 0; background: white; }
img { width: 100%; }
summary { cursor: pointer; color: #0b5cad; margin: 0.6rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: 0.6rem; font-size: 0.8rem; }
code { background: #f3f3f3; padding: 0 0.2rem; }
h2 { border-top: 1px solid #ddd; padding-top: 1rem; }
"""


def to_html(title: str, text: str, folder: Path) -> str:
    """The report's Markdown as one self-contained HTML page. Only the HTML of `folded` is kept as HTML."""
    aligned = TableExtension(use_align_attribute=True)  # the policy of the page allows no style attributes
    reader = Markdown(extensions=[aligned, "toc", "fenced_code", "sane_lists"])
    reader.preprocessors.deregister("html_block")
    reader.inlinePatterns.deregister("html")
    reader.parser.blockprocessors.register(_Folded(reader.parser), "folded", 200)
    reader.treeprocessors.register(_Inside(reader, folder), "inside", 0)
    start = with_policy(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><style>{_CSS}</style></head>\n<body>\n'
    )
    start = start.replace("</head>", f"<title>{html_text(title)}</title></head>")
    return f"{start}{reader.convert(text)}\n</body></html>\n"


class _Folded(BlockProcessor):
    """Makes elements of what `folded` wrote."""

    def test(self, parent: Element, block: str) -> bool:
        return block.startswith(_FOLDED)

    def run(self, parent: Element, blocks: list[str]) -> None:
        details = SubElement(parent, "details")
        title = blocks.pop(0).removeprefix(_FOLDED).removesuffix("</summary>")
        SubElement(details, "summary").text = AtomicString(self.parser.md.htmlStash.store(title))
        end = next(i for i, block in enumerate(blocks) if block.strip() == "</details>")
        inside = blocks[:end]
        del blocks[: end + 1]
        self.parser.parseBlocks(details, inside)


class _Inside(Treeprocessor):
    """Puts the report's plots and its table of figures into the page."""

    def __init__(self, reader: Markdown, folder: Path) -> None:
        super().__init__(reader)
        self.folder = folder

    def run(self, root: Element) -> None:
        for image in root.iter("img"):
            image.set("src", self._data("image/png", image.get("src", "")))
        for link in root.iter("a"):
            if not (name := link.get("href", "")).startswith("#"):
                link.set("download", name)
                link.set("href", self._data("text/csv", name))

    def _data(self, kind: str, name: str) -> str:
        return f"data:{kind};base64,{base64.b64encode((self.folder / name).read_bytes()).decode()}"
