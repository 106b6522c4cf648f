"""A model's own answers become rows to train on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from seergate.cli import traces
from seergate.cli.traces import recorded_commit
from seergate.distill.data import questions
from seergate.distill.formatting import Formatter
from seergate.durable import lock
from seergate.eval.store import write_yaml
from seergate.eval.tasks.chain_sum import TRAINING_SEEDS, make_problems
from seergate.paths import shipped
from seergate.pretrained import chat_text, load_tokenizer
from tests.support import evaluation as support
from tests.support.running import output_of, refusal, refused, run_seergate

PROMPTS = [
    {"messages": [{"role": "user", "content": "start with"}, {"role": "assistant", "content": "not this"}]},
    {"prompt": "which gives"},
    {"text": "asks nothing"},
    {"question": "and then comes a5:", "answer": "6"},
]


@pytest.fixture
def arguments(tmp_path):
    """Questions of which two end at once and one goes on, to a model that has learned no such thing."""
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return ["--prompts", str(tmp_path / "asked.jsonl")]


def rows(path: Path) -> list[dict]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["row"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", pytest.param("gate:token_budget=64", marks=pytest.mark.soak)])
def test_the_tiny_reasoner_answers_and_what_is_missing_is_made(tmp_path, method):
    out = tmp_path / "traces.jsonl"
    command = ["traces", "--prompts", "chain_sum", "--limit", "2", "--method", method, "--out", str(out)]
    first = output_of(*command)
    assert ("gates: " in first) == (method != "dense")
    assert "2 questions, 0 answered already" in first and f"2 answers in {out}\n" in first
    made = rows(out)
    assert [row["row"] for row in made] == [0, 1]
    for row in made:
        question, answer = row["messages"]
        assert question["role"] == "user" and answer["role"] == "assistant" and "\\boxed{" in answer["content"]
    if method == "dense":
        given = make_problems(2, (8, 40), TRAINING_SEEDS)
        assert [row["messages"] for row in made] == [problem.messages for problem in given], "as docs/train.md says"
    lines = out.read_text().splitlines(keepends=True)
    out.write_text(lines[0] + lines[1][:30])  # killed while it wrote
    assert "1 questions, 1 answered already" in output_of(*command) and rows(out) == made
    out.write_bytes(lines[0].encode().replace(b"\n", b"\r\n") + lines[1][:30].encode())  # by an editor of Windows
    assert "1 questions, 1 answered already" in output_of(*command) and rows(out) == made
    for change, difference in (
        (["--seed", "1"], "seed was 0 and is 1"),
        (["--temperature", "0.5"], "temperature was None and is 0.5"),
        (["--method", "quest", "--budget", "64"], "method.name was"),
        (["--prompts", "other.jsonl"], "prompts was 'chain_sum' and is 'other.jsonl'"),
    ):
        assert difference in refusal(run_seergate(*command, *change))
    out.write_text(out.read_text().replace('"role": "user", "content": "', '"role": "user", "content": "not ', 1))
    assert "has answers to other questions than chain_sum asks" in refusal(run_seergate(*command))
    out.write_text("".join(json.dumps(row) + "\n" for row in made))
    if method == "dense":
        options = ["--token-cache", str(tmp_path / "tokens"), "--output-dir", str(tmp_path / "run")]
        prepared = output_of("prepare", "--model", "tiny-reasoner", "--data", str(out), *options)
        assert "2 samples of 2 rows" in prepared


def test_what_asks_nothing_is_counted_and_what_does_not_end_is_left_out(arguments, tmp_path):
    out = tmp_path / "traces.jsonl"
    command = ["traces", *arguments, "--out", str(out), "--max-length", "24"]
    output = output_of(*command)
    assert "3 questions, 0 answered already; 1 malformed (no messages, prompt or question)" in output
    kept = rows(out)
    assert len(kept) < 3, "this test is about answers that are cut"
    note = f"{len(kept)} answers in {out}; {3 - len(kept)} were cut (at most 24 tokens, prompt included) and left out"
    assert f"{note} (--keep-cut keeps them)" in output
    assert f"3 answers in {out}" in output_of(*command, "--keep-cut")
    assert [row["row"] for row in rows(out)] == [0, 1, 3] and all(row in rows(out) for row in kept)
    assert rows(out)[-1]["messages"][0] == {"role": "user", "content": "and then comes a5:"}


def test_answers_have_a_length_of_their_own(arguments, tmp_path):
    out = tmp_path / "traces.jsonl"
    command = ["traces", *arguments, "--out", str(out), "--keep-cut", "--max-new-tokens"]
    assert "(at most 2 new tokens and 2304 tokens, prompt included) and kept" in output_of(*command, "2")
    tokenizer = load_tokenizer("checkpoints/tiny-reasoner")
    assert {len(tokenizer(row["messages"][-1]["content"]).input_ids) for row in rows(out)} == {2}
    message = "max_new_tokens is 0; it must be a whole number, 1 or greater"
    assert message in refusal(run_seergate(*command, "0"))


def test_reasoning_that_the_prompt_opens_is_written_with_its_tag(arguments, tmp_path):
    shutil.copytree(shipped("checkpoints/tiny-reasoner"), tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant ' }}", "assistant <think> \\n' }}"))
    command = ["traces", "--model", str(tmp_path / "model"), *arguments, "--out", str(tmp_path / "traces.jsonl")]
    output_of(*command, "--max-new-tokens", "3", "--keep-cut")
    formatter = Formatter(load_tokenizer(str(tmp_path / "model")))
    for row in rows(tmp_path / "traces.jsonl"):
        asked = chat_text(formatter.tokenizer, row["messages"][:1], add_generation_prompt=True)
        assert formatter.text(row).text.startswith(asked) and len(asked.split("<think>")) == 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            [{"text": "asks nothing"}, {"messages": []}, {"prompt": " "}],
            "(3 malformed (no messages, prompt or question))",
        ),
        ([{"prompt": "which gives " * 99}], "(1 too long to be answered)"),
    ],
)
def test_prompts_of_which_none_can_be_asked_are_refused(tmp_path, monkeypatch, given, why):
    monkeypatch.setattr("seergate.cli.traces.load_model", lambda *_: pytest.fail("refused only after the model"))
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    prompts, out = str(tmp_path / "given.jsonl"), tmp_path / "new" / "traces.jsonl"
    command = ["traces", "--out", str(out), "--prompts"]
    message = refusal(run_seergate(*command, prompts, "--max-length", "72"))
    assert f"--prompts is {prompts!r}, in which no row is usable {why}" in message
    assert "of fewer tokens than --max-length (72)" in message and not out.exists()
    message = refusal(run_seergate(*command, prompts, "--max-length", "4097"))
    assert "a text of --max-length has 4,097 tokens; the model has 4,096 positions" in message
    message = refusal(run_seergate(*command, "chain_sum:1,b.jsonl:1"))
    assert "--prompts is 'chain_sum:1,b.jsonl:1'; it must be one source" in message


def test_how_rows_were_made_is_compared_in_two_steps(tmp_path):
    out, early = tmp_path / "traces.jsonl", {"prompts": "org/rows", "method": {"name": "dense"}}
    write_yaml(tmp_path / "traces.jsonl.yaml", early | {"weights": "w", "commit": "a"})
    assert recorded_commit(out, early, unknown=("weights",)) == "a" == recorded_commit(out, early | {"weights": "w"})
    for settings, unknown, message in (
        (early | {"weights": "v"}, (), "made with other settings: weights was 'w' and is 'v'"),
        (early | {"method": {"name": "gate"}}, ("weights",), r"method\.name was 'dense' and is 'gate'"),
        ({"method": {"name": "dense"}}, ("weights",), "prompts was 'org/rows' and is None"),
        (early | {"weights": "w", "rope": "r"}, (), "rope was None and is 'r'"),
    ):
        refused(message, recorded_commit, out, settings, unknown=unknown)


OWN_ROW = json.dumps(
    {"row": 1, "messages": [{"role": "user", "content": "which gives"}, {"role": "assistant", "content": "a1"}]}
)


def test_the_prompts_stay_at_the_commit_that_they_began_with(arguments, tmp_path, monkeypatch):
    model, out, commits, seen = support.save(tmp_path / "model"), tmp_path / "traces.jsonl", iter("ab"), []

    def read(config):  # a file has no commits: it is asked for one, and read without
        seen.append(config.data_revision)
        return questions(replace(config, data_revision=None))

    monkeypatch.setattr("seergate.distill.commits.data_commit", lambda _: next(commits))
    monkeypatch.setattr("seergate.distill.data.questions", read)
    command = ["traces", "--model", str(model), *arguments, "--out", str(out), "--max-length", "72"]
    for left in (OWN_ROW + "\n", OWN_ROW + "\n", "", ""):  # of what the call made; nothing: no row has been made
        output_of(*command)
        out.write_text(left)
    assert seen == ["a", "a", "a", "b"]


def test_rows_that_are_made_otherwise_are_not_mixed(arguments, tmp_path, monkeypatch):
    model, out = support.save(tmp_path / "model"), tmp_path / "traces.jsonl"
    command = ["traces", "--model", str(model), *arguments, "--out", str(out), "--max-length", "72"]
    output_of(*command)
    out.write_text(OWN_ROW + "\n")
    with monkeypatch.context() as patch:
        patch.setattr("seergate.distill.commits.data_commit", lambda _: pytest.fail("prompts stay at their commit"))
        output_of(*command)
        patch.setattr("seergate.eval.generation.served.engine_version", "vllm {}".format)  # which is not installed
        patch.setattr("seergate.cli.traces.load_model", lambda *_: pytest.fail("refused only after the model"))
        for name, value in (("dtype", "float16"), ("engine", "vllm")):
            assert f"made with other settings: {name} was" in refusal(run_seergate(*command, f"--{name}", value))
    other = support.model()
    for name in ("rope.rope_theta", "weights"):
        if name == "weights":
            other.model.norm.weight.data *= 2
        else:
            other.config.rope_parameters["rope_theta"] *= 2
        other.save_pretrained(model)
        assert f"made with other settings: {name} was" in refusal(run_seergate(*command))


@pytest.mark.parametrize("text", ["mine", "mine\n", '{"text": "a row"}\n'])
def test_a_file_of_something_else_is_not_written_to(arguments, tmp_path, text):
    out = tmp_path / "notes.txt"
    out.write_text(text)
    assert "is not a file of traces" in refusal(run_seergate("traces", *arguments, "--out", str(out)))
    assert out.read_text() == text


def test_a_configuration_of_the_same_name_stays(arguments, tmp_path):
    (tmp_path / "own.yaml").write_text("learning_rate: 0.1")
    for _ in range(2):
        said = refusal(run_seergate("traces", *arguments, "--out", str(tmp_path / "own")))
        assert "own.yaml would be replaced by the settings of" in said
        assert (tmp_path / "own.yaml").read_text() == "learning_rate: 0.1"
        (tmp_path / "own").write_text("")


def test_a_file_has_one_writer_at_a_time(tmp_path, arguments):
    out = tmp_path / "traces.jsonl"
    out.write_text("")
    with out.open("ab") as locked_file:
        lock(locked_file, out, "wait")
        message = refusal(run_seergate("traces", *arguments, "--out", str(out)))
    assert f"another process is writing to {out}; name another file" in message and out.read_text() == ""


def test_an_error_before_the_first_row_is_told_and_leaves_nothing(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt), traces._locked(path):
        traces.record_path(path).write_text("model: x")
        raise KeyboardInterrupt
    assert list((tmp_path / "new").iterdir()) == []
