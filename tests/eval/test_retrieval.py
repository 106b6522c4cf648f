"""Tasks that are made from a text: what they ask, how long they are, and that they depend on nothing else."""

import json
import re

import pytest

from seergate.eval import make_task
from seergate.eval.grading.graders import grade
from seergate.eval.tasks.prompts import encode, prompt_text, reply_ids
from seergate.eval.tasks.retrieval import sentences, text_of
from tests.support import evaluation as support
from tests.support.running import refused

TEXT = " ".join(f"Sentence {i} says what number {i} has to say." for i in range(300))


class Words:
    """A tokenizer of words and of marks, which puts a token before each text."""

    bos_token, bos_token_id, chat_template = "<s>", 0, "a template"

    def __call__(self, text: str, add_special_tokens: bool = True, **_: object) -> dict[str, list[int]]:
        ids = [0 if word == "<s>" else sum(map(ord, word)) + 1 for word in re.findall(r"<s>|\w+|\S", text)]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}

    def apply_chat_template(self, messages, **_: object) -> str:
        return f"<s> user: {messages[0]['content']} assistant:"

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def data(tmp_path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def made(name: str, **options):
    return make_task(name, **options).bound(Words()).problems()


@pytest.mark.parametrize("name", ["needle:keys=4", "variable_tracking", "needle:values=2:queries=2"])
@pytest.mark.parametrize("chat", [True, False])
def test_prompts_fill_their_length_and_hold_the_answer(name, chat, data) -> None:
    task = make_task(name, problems=6, length=(300, 600), chat=chat, data=data).bound(Words())
    for problem in task.problems():
        length = int(problem.problem_id.split("-")[0])
        text = prompt_text(Words(), problem)
        size = len(encode(Words(), text))
        assert length - task.max_new_tokens - 12 < size <= length - task.max_new_tokens, "to the last sentence"
        assert all(text.count(value) >= 1 for value in problem.gold.splitlines())
        assert grade("contains", problem.reply, problem.gold, None).correct
        assert reply_ids(Words(), text, problem.reply), "its log-probability can be measured"
        assert bool(problem.messages) is chat and text.startswith("<s>")
    assert [p.problem_id.split("-")[0] for p in task.problems()] == ["300", "600"] * 3


def test_what_is_asked_for_stands_at_its_depth_once_and_alone(data) -> None:
    for problem in made("needle:keys=3:depths=0+50+100:length=500", problems=9, data=data):
        depth = int(problem.problem_id.split("-")[1]) / 100
        text, question = problem.prompt.removeprefix("<s>").split("\n\n")
        (city,) = re.fullmatch(r"The special magic number for (\w+) is", question).groups()
        facts = {m[1]: m for m in re.finditer(r"The special magic number for (\w+) is (\d{5})\.", text)}
        assert len(facts) == 3 and facts[city][2] == problem.gold
        assert facts[city].start() / len(text) == pytest.approx(depth, abs=0.15)


def test_variables_are_assigned_in_order(data) -> None:
    for problem in made("variable_tracking:hops=3:chains=2:length=400", problems=3, data=data):
        values: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w{5}) = (?:VAR )?(\w{5})\.", problem.prompt):
            values[name] = values.get(source, source)
        (queried_value,) = re.findall(r"have the value (\d{5})\. They are$", problem.prompt)
        assert [name for name, value in values.items() if value == queried_value] == problem.gold.splitlines()
        assert len(values) == 8 and len(problem.gold.splitlines()) == 4


def test_problems_depend_on_the_seed_and_their_place_only(data) -> None:
    few, many = (made("needle", problems=n, length=(300,), depths=(0, 100), data=data) for n in (3, 8))
    assert many[:3] == few and len({p.gold for p in many}) == 8
    assert few != made("needle", problems=3, length=(300,), depths=(0, 100), data=data, seed=1)


def test_the_text_is_named_and_begins_again_at_its_end(tmp_path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("One is here. Two is here. " + "and " * 70)
    cut = sentences(text_of(str(short))[1])
    assert cut == ["One is here.", "Two is here.", *["and " * 29 + "and"] * 2, "and " * 9 + "and"]
    assert list(map(len, sentences("一" * 1200 + "。二！三"))) == [500, 500, 201, 2, 1], "without spaces"
    (problem,) = made("needle:length=300", problems=1, data=str(short))
    assert problem.prompt.count("One is here. Two is here.") >= 2
    named = make_task("needle").options["text"]
    assert named.startswith("pydoc_data.topics of Python 3.") and len(text_of(None)[1]) > 100_000
    assert make_task("needle", data=str(short)).options["file"] == str(short)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "Gr\\u00fcn.\\nBlau."}\n{"text": "Rot."}\n')
    assert sentences(text_of(str(rows))[1]) == ["Grün.", "Blau.", "Rot."]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("needle:length=60:queries=3", {}, r"length is 60; the question, the facts asked for and the answer alone"),
        ("needle:keys=0", {}, "keys is 0; it must be a whole number, 1 or greater"),
        ("needle:keys=100", {}, "keys is 100 and queries 1; they must be at most"),
        ("needle:depths=101", {}, r"depths is \(101,\); it must be percentages"),
        ("needle", {"length": "long"}, r"length is \('long',\); it must be integers"),
        ("needle:chat=1", {}, "chat is 1; it must be true or false"),
        ("needle:chat", {}, "has the option 'chat'; it must be OPTION=VALUE"),
        ("needle:data=nowhere.txt", {}, "data is 'nowhere.txt', which cannot be read as text"),
        ("perplexity:length=100:scored=90", {}, "length is 100; it must be at least 108"),
    ],
)
def test_mistakes_are_told(name, options, said) -> None:
    with pytest.raises(ValueError, match=said):
        make_task(name, **options).bound(Words()).problems()


def test_texts_are_rows_or_pieces(tmp_path, data) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in ("a b c", TEXT, TEXT[3:], "")))
    each = made("perplexity:length=200:scored=50", data=str(rows))
    assert [p.problem_id for p in each] == ["text-2", "text-3"] and each[0].prompt == TEXT
    cut = made("perplexity:length=200:scored=50", data=data, problems=4)
    assert len(cut) == 4 and all(len(encode(Words(), p.prompt)) >= 200 for p in cut)
    for sign, codec in (("\u2028", "utf-8"), ("\u2029", "utf-8"), ("\x85", "utf-8"), ("", "utf-8-sig")):
        text = f"{sign}{TEXT}"
        rows.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\r\n", encoding=codec)
        assert made("perplexity:length=200:scored=50", data=str(rows))[0].prompt == text
    for text, message in (
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"text": "a"}\n{"txt": "b"}', "line 2 has no 'text'"),
        ('{"text": "a"}', "length is 200; no text of"),
    ):
        rows.write_text(text)
        refused(message, made, "perplexity:length=200:scored=50", data=str(rows))


def test_a_task_is_made_once_for_a_tokenizer() -> None:
    task = make_task("needle:problems=2:length=200").bound(support.tokenizer())
    assert task.problems()[0] is task.problems()[0] and task.bound(support.tokenizer()) is task
