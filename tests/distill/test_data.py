"""From rows to tokens: the reasoning survives, bad rows cost themselves only, and everything is counted."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from seergate.distill import TrainConfig, load_train_config
from seergate.distill.data import prepare_data, token_files, tokenise
from seergate.distill.formatting import Formatter, MalformedRow, answer_turn, question, training_template
from seergate.distill.sources import streamed
from seergate.eval.tasks.chain_sum import TRAINING_SEEDS, make_problems
from seergate.eval.tasks.prompts import prompt_text
from seergate.eval.tasks.task import Problem
from tests.distill.conftest import GPT_OSS, PLAIN, R1, TEMPLATES, byte_tokenizer
from tests.support.running import refused

REASONING = "First, naïve 3 × 5 = 15.\n\nWait — 🙂 check: 15."


def chat(answer: str, question: str = "What is 3 * 5?") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: str | Path, rows: list[Any]) -> None:
    Path(path).write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))


def only_text(data_config: TrainConfig, tokenizer: PreTrainedTokenizerFast, row: Any) -> str:
    write(data_config.data, [row])
    data = prepare_data(data_config, tokenizer)
    assert len(data.samples) == 1
    return tokenizer.decode(data.samples[0])


@pytest.mark.parametrize("opening", ["<think>\n", ""], ids=["tagged", "tag in the prompt"])
def test_reasoning_survives_behind_exactly_one_think_tag(data_config, tokenizer, opening):
    text = only_text(data_config, tokenizer, chat(f"{opening}{REASONING}\n</think>\n\nIt is \\boxed{{15}}."))
    assert text.count("<think>") == 1 and text.count("</think>") == 1
    assert text.index("3 * 5") < text.index("<think>") < text.index(REASONING) < text.index("</think>")
    assert text.index("</think>") < text.index("\\boxed{15}")
    report = prepare_data(data_config, tokenizer).report
    assert report.notes == ({} if opening else {"given their opening think tag": 1})


def test_templates_that_delete_reasoning_are_replaced_by_ones_that_keep_it():
    tokenizer, row = byte_tokenizer(R1), chat(f"<think>{REASONING}</think>15")
    assert REASONING not in tokenizer.apply_chat_template(row["messages"], tokenize=False)
    expected = f"<｜User｜>What is 3 * 5?<｜Assistant｜><think>{REASONING}</think>15<｜end▁of▁sentence｜>"
    text = Formatter(tokenizer).text(row).text
    assert text == tokenizer.bos_token + expected and text.count(tokenizer.bos_token) == 1
    turn = "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
    text = Formatter(byte_tokenizer("{% for m in messages %}" + turn + "{% endfor %}")).text(row).text
    question = "<|im_start|>user\nWhat is 3 * 5?<|im_end|>\n"
    assert text == f"{question}<|im_start|>assistant\n<think>{REASONING}</think>15<|im_end|>\n"


def test_an_answer_in_channels_is_trained_on_as_it_was_generated() -> None:
    strict = "{% for m in messages if '<|channel|>' in m.content %}{{ raise_exception('channels') }}{% endfor %}"
    formatter, asked = Formatter(byte_tokenizer(strict + GPT_OSS)), {"role": "user", "content": "1 + 1?"}
    thought = "<|channel|>analysis<|message|>one and\none<|end|><|start|>assistant"
    for answer in (f"{thought}<|channel|>final<|message|>2", "<|channel|>final<|message|>2"):
        text = formatter.text({"messages": [asked, answer_turn(answer)]}).text
        assert text == f"<|start|>user<|message|>1 + 1?<|end|><|start|>assistant{answer}<|return|>"
    assert answer_turn("<think>one</think>2") == {"role": "assistant", "content": "<think>one</think>2"}


@pytest.mark.parametrize(
    "answer",
    [
        *({"content": content} for content in ("<think>\none\n</think>\n\n2", "one</think>2")),
        *({"content": "2", key: "one"} for key in ("reasoning_content", "reasoning", "thinking")),
    ],
)
def test_a_template_with_markup_of_its_own_gets_the_reasoning_under_its_key(answer: dict[str, str]) -> None:
    """gpt-oss: reasoning is in the channel ``analysis``, and its template copies tags in the content as they are."""

    def formatted(template: str = GPT_OSS, **answer: Any) -> Any:
        turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", **answer}]
        return Formatter(byte_tokenizer(template)).text({"messages": turns})

    text, _, notes = formatted(**answer)
    first = "<|start|>user<|message|>1 + 1?<|end|><|start|>assistant"
    last = "<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>"
    assert text == f"{first}<|channel|>analysis<|message|>one{last}" and "without reasoning" not in notes
    text, _, notes = formatted(content="2")
    assert text == f"{first}<|channel|>final<|message|>2<|return|>" and notes == ["without reasoning"]
    assert formatted(content="<think>\n\n</think>2")[::2] == (text, notes)
    picky = PLAIN.replace("{{ m.content }}", "{{ m.content if 'thinking' not in m else raise_exception('no') }}")
    one = "<think>one</think>2"
    assert one in formatted(picky, content=one, thinking=False).text
    with pytest.raises(MalformedRow, match="reasoning without an end"):
        formatted(content="<think>one and")


def test_reasoning_of_earlier_turns_is_left_out_as_at_inference(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [*chat("<think>old thought</think>old answer")["messages"], *chat("<think>new</think>15")["messages"]]
    text, is_chat, notes = Formatter(tokenizer).text({"messages": turns})
    assert notes == ["without the reasoning of their earlier turns"]
    assert is_chat and "old answer" in text and "old thought" not in text and text.count("<think>") == 1


def test_what_is_left_out_of_a_conversation_is_counted(data_config, tokenizer):
    def turns(*contents: str) -> list[Any]:
        return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]

    last = "<think>b</think>B"
    apart = turns("6", "A", "?", last)
    apart[1]["reasoning_content"] = "a"
    rows = [
        turns("1", last),  # nothing left out
        turns("2", "A", "?", last),
        turns("3", "<think>\n\n</think>A", "?", last),  # an empty reasoning is none
        turns("4", "<think>a</think>A", "?", last),
        turns("5", "a</think>A", "?", "<think>c</think>C", "?", last),  # counted once
        apart,
        turns("7", last, "unanswered"),
        [*turns("8", last, "unanswered"), {"role": "user", "content": "too"}],  # counted once
        turns("9", "<think>a</think>A", "?", last, "unanswered"),
        turns("no answer at all"),  # malformed, and nothing else
    ]
    write(data_config.data, [{"messages": row} for row in rows])
    data = prepare_data(data_config, tokenizer)
    report = data.report
    assert (report.samples, report.malformed) == (9, {"no assistant turn": 1})
    for note in ("4 without the reasoning of their earlier turns", "3 cut off after their last answer"):
        assert note in report.summary()
    assert not any("unanswered" in tokenizer.decode(data.samples[i]) for i in range(9))
    assert prepare_data(data_config, tokenizer).report == report  # also when it is found tokenised
    assert json.loads(json.dumps(asdict(report)))["notes"] == report.notes


def test_several_chat_templates_by_name(data_config: TrainConfig) -> None:
    tokenizer = byte_tokenizer(None)
    row = chat("<think>a</think>b")
    tokenizer.chat_template = {"tool_use": "{{ 'tools' }}", "default": PLAIN}
    expected = Formatter(byte_tokenizer(PLAIN)).text(row)
    assert Formatter(tokenizer).text(row) == expected
    assert only_text(data_config, tokenizer, row) == expected.text
    tokenizer.chat_template = {"tool_use": PLAIN, "rag": PLAIN}
    refused(r"multiple chat templates with no default.*; give one with chat_template", Formatter(tokenizer).text, row)
    tokenizer.chat_template = {}
    refused("gives no chat template", Formatter(tokenizer).text, row)


def test_a_template_that_deletes_reasoning_is_refused_before_training(tmp_path, data_config):
    stripping = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    write(data_config.data, [chat("<think>a</think>b")])
    refused("deletes the reasoning", prepare_data, data_config, byte_tokenizer(stripping))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    mended = replace(data_config, chat_template=str(tmp_path / "own.jinja"))
    tokenizer = byte_tokenizer(stripping)
    assert tokenizer.decode(prepare_data(mended, tokenizer).samples[0]).endswith("[assistant]<think>a</think>b")
    (tmp_path / "own.jinja").write_text(stripping)
    refused(r"own\.jinja does not keep", prepare_data, mended, tokenizer)
    (tmp_path / "own.jinja").write_text("{% for %}")
    refused("cannot be read", prepare_data, mended, tokenizer)
    refused("gives no chat template", training_template, byte_tokenizer(None))


@pytest.mark.parametrize("role", ["human", "User", "developer"])
def test_a_turn_that_a_template_drops_without_a_word_is_malformed(role: str) -> None:
    """As Qwen's drop turns of roles that they do not know; the answer would stand without its question."""
    row = {
        "messages": [{"role": role, "content": " What is\n3 * 5?\n"}, *chat("<think>a</think>b", "And?")["messages"]]
    }
    knows = PLAIN.replace("in messages %}", "in messages if m.role in ('user', 'assistant') %}")
    with pytest.raises(MalformedRow, match="a turn whose role the chat template leaves out"):
        Formatter(byte_tokenizer(knows)).text(row)
    for writes in (PLAIN, PLAIN.replace("m.content", "m.content if m.role == 'assistant' else m.content | tojson")):
        assert "3 * 5" in Formatter(byte_tokenizer(writes)).text(row).text


def test_a_template_that_refuses_the_probe_is_one_that_cannot_be_used() -> None:
    refusing = "{{ raise_exception('no thinking') if '<think>' in messages[-1].content }}"
    refused("deletes the reasoning .*, or refuses it", training_template, byte_tokenizer(refusing))
    replacement = training_template(byte_tokenizer(f"{refusing}<|im_start|>"))
    assert "<|im_start|>" in replacement and "raise_exception" not in replacement


def test_bad_rows_are_counted_by_reason_and_cost_only_themselves(data_config, tokenizer):
    user, twice = {"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>I think</think>1"}
    good = [*(chat(f"<think>step {i}</think>{i}") for i in range(2))]
    good.append({"messages": [user, twice | {"reasoning_content": "I think"}]})
    bad: dict[str, list[Any]] = {
        "not JSON": ['{"messages": [\n', "\x00\ufffd\n"],
        "not a record": [[1, 2], None, 7],
        "no messages, prompt and completion, or text; --data-column names another key": [
            {},
            {"messages": None},
            {"prompt": "only"},
        ],
        "no assistant turn": [{"messages": []}, {"messages": [user]}],
        "empty assistant turn": [chat(""), chat("  \n"), chat("<think>\n</think>")],
        "a turn without role and content": [
            {"messages": [user, {"role": "assistant", "content": None}]},
            {"messages": ["hello"]},
        ],
        "a turn whose content is a list, not a text": [{"messages": [{"role": "assistant", "content": ["parts"]}]}],
        "a turn with tool calls": [
            {"messages": [user, {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]},
            {"messages": [user, {"role": "assistant", "content": "", "tool_calls": [{}]}, *good[0]["messages"]]},
            {"messages": [*good[0]["messages"], {"role": "tool", "content": "7"}, *good[0]["messages"]]},
        ],
        "several think tags": [chat("<think>a</think>b<think>c</think>d"), chat("<think><think>a</think>b")],
        "neither messages nor text": [{"messages": {"role": "user"}}],
        "empty text": [{"text": "  "}],
        "invalid unicode": [{"text": "half a pair: \ud83d"}],
        "a turn with two different reasonings": [{"messages": [user, twice | {"reasoning_content": "I doubt"}]}],
        "a token that the model has no embedding for": [chat("<think>a<added></think>b")],
    }
    rows = [good[0], *(row for group in bad.values() for row in group), good[1], good[1], good[2]]
    write(data_config.data, rows)
    tokenizer.add_tokens(["<added>"])
    report = prepare_data(data_config, tokenizer, vocabulary=len(tokenizer) - 1).report
    assert report.malformed.pop("not JSON") == 2
    assert report.malformed == {reason: len(group) for reason, group in bad.items() if reason != "not JSON"}
    assert (report.rows, report.samples, report.duplicates) == (len(rows), 3, 1)
    assert "2 malformed (several think tags)" in report.summary() and "1 duplicates left out" in report.summary()


def test_reasoning_that_never_ends_is_kept_without_what_a_template_writes_after_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Some templates, as Qwen3's, keep closed reasoning only."""
    text = Formatter(tokenizer).text(chat("<think>on and on")).text
    assert text.count("<think>") == 1 and text.endswith("on and on") and "</think>" not in text


def test_text_before_the_reasoning_is_kept_or_the_row_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    try:
        text = Formatter(tokenizer).text(chat("Preamble <think>one</think>2")).text
    except MalformedRow as reason:
        assert tokenizer.chat_template == TEMPLATES["qwen3"]
        assert str(reason) == "reasoning, or text before it, that the chat template does not keep"
    else:
        assert "Preamble" in text


def test_think_tags_in_the_question_are_not_mistaken_for_reasoning(tokenizer: PreTrainedTokenizerFast) -> None:
    row = chat("<think>a</think>b", question="Reason between <think> and </think>.")
    text = Formatter(tokenizer).text(row).text
    assert "Reason between <think> and </think>." in text and "<think>" in text.split("</think>.")[-1]


@pytest.mark.parametrize("written", ["{{ messages[0].content }}", "Answer as <think> Thought </think> Solution."])
def test_a_template_whose_system_prompt_names_the_tags_is_used(written: str) -> None:
    """Like those of SmolLM3 and Phi-4-reasoning; the first one keeps a row's own system turn."""
    system = "<|im_start|>system<|im_sep|>" + written
    turns = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}{% endfor %}"
    )
    row = {"messages": [{"role": "system", "content": "Use <think>."}, *chat("<think>a</think>b")["messages"]]}
    text, _, notes = Formatter(byte_tokenizer(system + turns)).text(row)
    left_out = "without their system turn, which the chat template leaves out"
    assert (left_out in notes) == (written != "{{ messages[0].content }}")
    assert text.startswith(system.replace("{{ messages[0].content }}", "Use <think>."))
    assert text.endswith("<|im_start|>assistant<|im_sep|><think>a</think>b")


@pytest.mark.parametrize("over_length", ["truncate", "drop"])
def test_long_samples_are_cut_or_left_out_and_counted(data_config, tokenizer, over_length):
    data_config = replace(data_config, over_length=over_length, max_length=200)
    thoughts = ("x" * 10, "x" * 500, "z" * 1000, "z" * 1001)  # the last two are equal once they are cut
    write(data_config.data, [chat(f"<think>{thought}</think>y") for thought in thoughts])
    data = prepare_data(data_config, tokenizer)
    cut = over_length == "truncate"
    assert (data.report.samples, data.report.duplicates) == ((3, 1) if cut else (1, 0))
    assert (data.report.truncated, data.report.dropped) == ((2, 0) if cut else (0, 3))
    assert data.samples.lengths.max() <= 200 and (not cut or data.samples.lengths.max() == 200)
    assert data.report.longest == data.samples.lengths.max()


def test_prompt_and_completion_text_and_a_named_column(data_config, plain):
    expected = only_text(data_config, plain, chat("<think>a</think>b", "Q"))
    turns = [{"role": "user", "content": "Q"}], [{"role": "assistant", "content": "b", "reasoning_content": "a"}]
    for prompt, completion in (("Q", "<think>a</think>b"), turns):
        row = {"prompt": prompt, "completion": completion}
        assert only_text(data_config, plain, row).replace("\n", "") == expected.replace("\n", "")
    assert only_text(data_config, plain, {"text": "just some text to read"}) == "just some text to read"
    own = replace(data_config, data_column="talk")
    assert only_text(own, plain, {"talk": chat("<think>a</think>b", "Q")["messages"], "text": "no"}) == expected
    assert only_text(own, plain, {"talk": "left exactly as it is"}) == "left exactly as it is"


@pytest.mark.parametrize("written", [json.dumps, str, lambda turns: json.dumps(json.dumps(turns))])
def test_a_conversation_as_text_is_refused(written: Callable[[Any], str]) -> None:
    prompt, answer = chat("<think>a</think>b", "Q")["messages"]
    formatter, named = (Formatter(byte_tokenizer(PLAIN), column) for column in (None, "talk"))
    for read, row in (
        (formatter.text, {"messages": written([prompt, answer])}),
        (formatter.text, {"prompt": written([prompt]), "completion": "<think>a</think>b"}),
        (formatter.text, {"prompt": "Q", "completion": written([answer])}),
        (named.text, {"talk": written([prompt, answer])}),
        (question, {"messages": written([prompt, answer])}),
        (question, {"prompt": written([prompt])}),
        (question, {"question": written(prompt)}),
    ):
        with pytest.raises(MalformedRow, match="instead of a list; parse it first"):
            read(row)
    for text in ("[1, 2] is a list with a role and content", '{"role": "king"}', '"the role and its content"'):
        assert question({"prompt": text}) == [{"role": "user", "content": text}]
    with pytest.raises(MalformedRow, match="invalid unicode"):
        question({"prompt": "half a pair: \ud83d"})
    earlier = {"role": "assistant", "content": "<think>one and one</think>2"}
    turns = question({"messages": [prompt, earlier, prompt, answer]})
    assert turns == [prompt, {"role": "assistant", "content": "2"}, prompt], "without reasoning, as in training"


@pytest.mark.parametrize("count", [1, 2])
def test_text_that_begins_with_its_special_tokens_gets_no_second_ones(count: int) -> None:
    """Two as GLM's [gMASK]<sop>. The token after a text stays."""
    tokenizer = byte_tokenizer(None)
    token = str(tokenizer.bos_token)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{count * f'{token} '}$0 {token}", special_tokens=[(token, tokenizer.bos_token_id)]
    )
    begin = count * token
    columns = tokenise({"text": ["plain", f"{begin}user: hi"]}, Formatter(tokenizer))
    assert [tokenizer.decode(ids) for ids in columns["ids"]] == [f"{begin}plain{token}", f"{begin}user: hi{token}"]


def test_the_date_in_a_template_does_not_change() -> None:
    row = chat("<think>a</think>b", "Q")
    dated = "{%- set month = '%B' -%}\n  {% if strftime_now is defined %}\n"
    dated += "{{ strftime_now('%-d ' + month + ' %Y, %a %H:%M') }}:{% endif %}\n"
    tokenizer = byte_tokenizer(dated + PLAIN)
    without = Formatter(byte_tokenizer(PLAIN)).text(row).text
    assert Formatter(tokenizer).text(row).text == "26 July 2024, Fri 00:00:" + without
    problem = Problem("1", "", messages=tuple(row["messages"][:1]))
    assert prompt_text(tokenizer, problem).startswith("26 July 2024, Fri 00:00:")
    assert not prompt_text(tokenizer, problem, today=True).startswith("26 July 2024")


def test_tokens_are_cached(data_config, tmp_path, monkeypatch, plain):
    write(data_config.data, [chat(f"<think>{i}</think>{i}") for i in range(30)])
    first = prepare_data(data_config, plain)
    read: list[int] = []

    def counted(columns: dict[str, list[Any]], formatter: Formatter) -> dict[str, list[Any]]:
        read.append(len(columns["json"]))
        return tokenise(columns, formatter)

    monkeypatch.setattr("seergate.distill.data.tokenise", counted)
    again = prepare_data(data_config, plain)
    assert again.fingerprint == first.fingerprint and again.report == first.report and again.train == first.train
    Path(tmp_path / "copy.jsonl").write_text(Path(data_config.data).read_text())  # of another date, on another machine
    copy = replace(data_config, data=str(tmp_path / "copy.jsonl"), token_cache=str(tmp_path / "other"))
    assert prepare_data(copy, plain).fingerprint == first.fingerprint and read.pop() == 30
    shorter = prepare_data(replace(data_config, max_length=60), plain)  # the same tokens, of which less is used
    assert read == [] and shorter.samples.lengths.max() <= 60 and shorter.fingerprint != first.fingerprint
    write(data_config.data, [chat(f"<think>{i}</think>{i}") for i in range(29)])
    changed = prepare_data(data_config, plain)
    assert read == [29] and changed.fingerprint != first.fingerprint
    other = prepare_data(data_config, byte_tokenizer(TEMPLATES["qwen3"]))
    assert read == [29, 29] and other.fingerprint != changed.fingerprint


def test_a_mixture_has_its_shares_until_a_source_is_used_up(data_config, tmp_path, plain):
    for name, count in (("a", 300), ("b", 60)):
        write(tmp_path / f"{name}.jsonl", [chat(f"<think>{name} {i}</think>{i}") for i in range(count)])
    a, b = (str(tmp_path / f"{name}.jsonl") for name in "ab")
    data_config = replace(data_config, data=f"{a}:3,{b}:1")
    data = prepare_data(data_config, plain)
    mixed = data.report.mixed
    assert mixed[b] == 60 and 130 < mixed[a] < 230 and data.report.rows == sum(mixed.values())
    assert f"mixed: {mixed[a]} rows of {a}, 60 rows of {b}" in data.report.summary()
    texts = [plain.decode(sample) for sample in data.samples]
    assert sum("<think>b " in text for text in texts) == 60
    again = prepare_data(data_config, plain)
    assert again.fingerprint == data.fingerprint and again.train == data.train
    assert prepare_data(replace(data_config, seed=1), plain).report.mixed != mixed
    alone = prepare_data(replace(data_config, data=a), plain).report
    assert alone.rows == 300 and alone.mixed == {} and "mixed" not in alone.summary()


def test_tokens_that_another_process_has_made_need_no_source(data_config, plain):
    write(data_config.data, [chat(f"<think>{i}</think>{i}") for i in range(30)])
    files = token_files(data_config, plain)
    made = prepare_data(data_config, plain)
    Path(data_config.data).unlink()
    assert prepare_data(data_config, plain, False, files).fingerprint == made.fingerprint
    refused("does not exist", prepare_data, data_config, plain, False, [["elsewhere.arrow"]])  # files it cannot see


def test_a_full_disk_is_named(data_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    write(data_config.data, [chat("<think>1</think>1")])
    monkeypatch.setattr("seergate.distill.data.tokenise", full)
    with pytest.raises(OSError) as caught:
        token_files(data_config, byte_tokenizer(PLAIN))
    assert caught.value.filename == data_config.token_cache


def test_a_killed_build_is_made_again(data_config, monkeypatch, plain):
    write(data_config.data, [chat(f"<think>{i}</think>{i}") for i in range(1200)])  # two batches

    def killed(columns: dict[str, list[Any]], formatter: Formatter) -> dict[str, list[Any]]:
        if len(columns["json"]) < 500:
            raise KeyboardInterrupt
        return tokenise(columns, formatter)

    with monkeypatch.context() as patched:
        patched.setattr("seergate.distill.data.tokenise", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare_data(data_config, plain)
    data = prepare_data(data_config, plain)
    assert data.report.samples == 1200 and plain.decode(data.samples[1199]).count("1199") == 2


def test_several_processes_give_the_same_tokens(data_config, monkeypatch, plain):
    rows = [chat(f"<think>{i % 40}</think>{i}") if i % 3 else {"text": f"plain {i // 2}"} for i in range(60)]
    write(data_config.data, [*rows, {}, *rows])
    alone = prepare_data(data_config, plain)
    monkeypatch.setattr("seergate.distill.data.ROWS_PER_PROCESS", 40)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    several = prepare_data(replace(data_config, token_cache=f"{data_config.token_cache}-2"), plain)
    assert several.report == alone.report and several.train == alone.train
    assert several.fingerprint == alone.fingerprint
    assert len(list(Path(f"{data_config.token_cache}-2").glob("*_of_00002.arrow"))) == 2


def test_held_out_packs_are_not_trained_on(data_config, plain):
    data_config = replace(data_config, max_length=128, eval_packs=2)
    write(data_config.data, [chat(f"<think>{i}</think>{i}") for i in range(60)])
    data = prepare_data(data_config, plain)
    held_out, trained = ({i for pack in packs for i in pack} for packs in (data.held_out, data.train))
    assert len(data.held_out) == 2 and held_out and not held_out & trained and held_out | trained == set(range(60))
    few = prepare_data(replace(data_config, eval_packs=1000), plain)
    assert 0 < len(few.held_out) <= len(few.train) / 9


@pytest.mark.parametrize(
    ("rows", "options", "why"),
    [
        ([], {}, "nothing to train on: it has no rows"),
        ([{}, chat("")], {}, r"nothing to train on: of 2 rows, 1 malformed \(no messages.*1 malformed \(empty"),
        ([chat("<think>a</think>b")], {"data_column": "answer"}, r"1 malformed \(no answer among messages\)"),
        ([], {"data": "nobody/nothing"}, r"'nobody/nothing' cannot be loaded .*: the Hub could not be"),
    ],
)
def test_nothing_to_train_on_is_one_clear_sentence(data_config, rows, options, why):
    write(data_config.data, rows)
    refused(why, prepare_data, replace(data_config, **options), byte_tokenizer(PLAIN))


def test_samples_that_cannot_teach_are_left_out_and_a_dataset_of_them_refused(data_config, plain):
    texts = ["x" * n for n in (1, 8, 16, 17, 40)]  # in blocks of 8: only the 17th row has two blocks to choose from
    write(data_config.data, [{"text": text} for text in texts])
    report = prepare_data(data_config, plain).report
    assert (report.samples, report.too_short, report.tokens) == (2, 3, 57)
    assert "3 left out (too short to select blocks)" in report.summary()
    write(data_config.data, [{"text": text} for text in texts[:3]])
    refused(r"of 3 rows, 3 that fit in 2 blocks of 8 tokens", prepare_data, data_config, plain)
    write(data_config.data, [{"text": text} for text in (*texts, "x" * 24, "x" * 25)])
    report = prepare_data(replace(data_config, sink_blocks=1), plain).report
    assert (report.samples, report.too_short, report.tokens) == (2, 5, 65)  # a block more, which is always read


def test_a_stream_that_breaks_off_says_where() -> None:
    def rows() -> Iterator[int]:
        yield from (1, 2)
        raise ConnectionError("the server\nhung up")

    stream = streamed(rows(), "org/data")
    assert [next(stream)["json"], next(stream)["json"]] == ["1", "2"]
    refused("'org/data' broke off after 2 rows: the server$", next, stream)


def test_chain_sum_is_deterministic_and_apart_from_evaluation(data_config, plain):
    small = {"data_limit": 12, "chain_sum_variables": (4, 6), "token_cache": data_config.token_cache}
    data = prepare_data(load_train_config("tiny-reasoner", small), plain)
    texts = [plain.decode(data.samples[i]) for i in range(len(data.samples))]
    assert len(texts) == 12
    expected = [p.question for p in make_problems(12, (4, 6), TRAINING_SEEDS)]
    assert all(question in text for question, text in zip(expected, texts, strict=True))
    evaluation = {p.question for seed in range(50) for p in make_problems(20, (4, 6), seed)}
    assert not evaluation & set(expected)
    other = prepare_data(load_train_config("tiny-reasoner", {**small, "seed": 1}), plain)
    assert other.fingerprint != data.fingerprint
