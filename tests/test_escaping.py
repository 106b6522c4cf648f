"""Untrusted text is escaped in Markdown, HTML and on a terminal."""

import html
import io
import json
import re

from hypothesis import given
from hypothesis import strategies as st

from seergate.cli.main import main
from seergate.escaping import Terminal, html_text, markdown_block, markdown_code, markdown_text, visible
from seergate.eval.report.write import to_html
from tests.support.made_reports import reconfigure, write_run

PARTS = (
    *"*_`\\[]()<>&#~|$!-+=:^{}\"' abé\n\t\x02\x1b\u202e\ue000",
    *("1.", "&amp;", "~~~", "```", "[TOC]", "<b>", "<!--", "</details>", "![t](http://host/t.png)", 'src="data.csv"'),
    *("[click](javascript:alert(1))", "[d](data.csv)", "http://host", "<http://host>", "    ", "---"),
)
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=10).map("".join)


def test_control_characters_are_seen():
    text = "\x1b[2K\rright\n\t\x9b1m \u202egnorw \ud800 e\u0301 日本 \u200d"
    assert visible(text) == "\\x1b[2K\\rright\\n\\t\\x9b1m \\u202egnorw \\ud800 e\u0301 日本 \u200d"
    stream = io.StringIO()
    print(text, end="", file=Terminal(stream))
    assert stream.getvalue() == "\\x1b[2K\\rright\n\t\\x9b1m \\u202egnorw \\ud800 e\u0301 日本 \u200d"


def test_markdown_stays_readable():
    assert markdown_text("gate [13af] at chain_sum: -30.0 (-52 to -3), 10/50/90 %") == (
        "gate \\[13af\\] at chain_sum: -30.0 (-52 to -3), 10/50/90 %"
    )
    assert markdown_text("a*b*c _d_ <x>|") == "a\\*b\\*c \\_d\\_ &#60;x&#62;&#124;"
    assert [markdown_text(each) for each in ("- a", "12. a", "--", "#1")] == ["\\- a", "12\\. a", "\\--", "\\#1"]
    assert markdown_code("a`b``") == "``` a`b`` ```" and markdown_code("runs/x") == "`runs/x`"
    assert markdown_block("~~~\n~~~~\x1b", "json") == "~~~~~json\n~~~\n~~~~\\x1b\n~~~~~"


@given(TEXTS)
def test_a_page_shows_the_characters_and_no_markup(tmp_path_factory, text):
    blocks = [
        f"# {markdown_text(text)}",
        f"- {markdown_text(text)}\n- {markdown_code(text)}",
        f"| a | b |\n|---|---|\n| {markdown_text(text)} | **{markdown_text(f'a{text}')}** |",
        *(f"<details><summary>{html_text(text)}</summary>", markdown_block(text), "</details>"),
    ]
    page = to_html(text, "\n\n".join(blocks), tmp_path_factory.getbasetemp())
    body = re.sub("<code></code>", "", page.partition("<body>")[2])
    shown = [re.search(f"<{tag}[^>]*>(.*?)</{tag}>", body, re.S)[1] for tag in ("h1", "li", "td", "strong", "summary")]
    line = " ".join(visible(text).split())
    strong = " ".join(f"a{visible(text)}".split())
    assert [" ".join(html.unescape(each).split()) for each in shown] == [line, line, line, strong, line]
    block = re.search("<pre><code>(.*?)</code></pre>", body, re.S)[1]
    assert html.unescape(block).split() == visible(text, "\n\t").split()
    tags = re.sub(r"<code>.*?</code>|<t[hd][^>]*>.*?</t[hd]>", "", body, flags=re.S)
    assert not re.search("<(a|img|script|em|b)[ >]", tags)


def test_the_command_line_writes_no_control_characters(tmp_path, capsys):
    hostile = "\x1b[2K\rright \x1b]0;title\x07"
    directory = write_run(tmp_path, "dense", None, lambda i: True, n=1, completion=hostile, model=f"m{hostile}")
    reconfigure(directory, task={"grader": "math"})
    path = directory / "samples.jsonl"
    more = {"prompt": hostile, "gold": hostile, "seed": 0, "grade_reason": hostile}
    path.write_text(json.dumps(json.loads(path.read_text()) | more) + "\n")
    assert main(["eval", "show", str(directory), "0"]) == 0
    output = capsys.readouterr()
    assert output.out.count(visible(hostile)) == 4, "prompt, gold answer, reason, completion"
    assert main(["report", str(directory)]) == 0
    later = capsys.readouterr()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"problem_id": hostile}) + "\n")
    assert main(["eval", "show", str(directory), "nowhere"]) == 2
    last = capsys.readouterr()
    assert "it has \\x1b[2K right \\x1b]0;title\\x07\n" in last.err, "an error is one line"
    for text in (output.out, later.out, later.err, last.out, last.err):
        assert not set(text) & {"\x1b", "\r", "\x07"}
