"""Turns a row of a dataset into a training text and keeps its reasoning intact.

The frozen model must see text as it would have generated it: a chat in its own markup, in which the last assistant
turn has the whole reasoning after exactly one opening think tag, or in the markup of a template that takes it from a
key of the turn. The chat templates of several models delete reasoning, and some data lacks the opening tag because it
was part of the prompt. Both are repaired here, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seergate.checks import holds_turns
from seergate.errors import SeergateError, first_line
from seergate.pretrained import beginning, chat_text, roles_left_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"
KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant turn under which data and chat templates have its reasoning."""

TEMPLATES = Path(__file__).parent / "templates"
_TRAINING = {"<｜Assistant｜>": "r1-distill.jinja", "<|im_start|>": "chatml.jinja"}
"""Markup in a model's own chat template -> the training template with the same markup."""

_CHANNELS = re.compile(
    r"\s*(?:<\|channel\|>analysis<\|message\|>(.*?)<\|end\|><\|start\|>assistant)?<\|channel\|>final<\|message\|>(.*)",
    re.DOTALL,
)
"""An answer of gpt-oss: its reasoning and its final part."""

_PROBE_REASONING = "one and one are two"
_PROBE = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": f"{OPEN}\n{_PROBE_REASONING}\n{CLOSE}\n\n2"},
]


class MalformedRow(ValueError):
    """Raised for a row that cannot be trained on; rows are counted by the message."""


class TrainingText(NamedTuple):
    """The text of a row.

    Attributes:
        is_chat: whether the text comes from a chat template, which writes all special tokens itself.
        notes: repairs and omissions, worded to follow a number of rows.
    """

    text: str
    is_chat: bool
    notes: list[str]


def training_template(tokenizer: PreTrainedTokenizerBase, override: str | None = None) -> str:
    """Return a chat template that keeps the reasoning of the last assistant turn, checked with a probe conversation.

    This is the file ``override`` if given, else the tokenizer's own template, or else, for the markup of DeepSeek-R1
    and for ChatML, the one in ``templates/``. Raises `SeergateError` if none of them keeps the reasoning.
    """
    if override is not None:
        try:
            template = Path(override).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise SeergateError(f"chat_template is {override!r}; it must be a readable .jinja file") from error
        if not _keeps_reasoning(tokenizer, template):
            raise SeergateError(
                f"the chat template {override} does not keep the reasoning behind exactly one {OPEN} tag"
            )
        return template
    try:
        own = tokenizer.get_chat_template()
    except ValueError as error:  # none, or several by name of which none is the default
        raise SeergateError(
            f"the model's tokenizer gives no chat template ({first_line(error)}); give one with chat_template (a "
            ".jinja file)"
        ) from error
    if _keeps_reasoning(tokenizer, own):
        return own
    for markup, name in _TRAINING.items():
        if markup in own and _keeps_reasoning(tokenizer, template := (TEMPLATES / name).read_text(encoding="utf-8")):
            return template
    raise SeergateError(
        "the model's chat template deletes the reasoning that the gates are trained on, or refuses it; give one that "
        "keeps it with chat_template (a .jinja file)"
    )


def _reasoning_key(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """Return the key from which a template writes reasoning in markup of its own (gpt-oss), or ``None``."""
    for key in KEYS:
        probe = [_PROBE[0], {"role": "assistant", "content": "2", key: _PROBE_REASONING}]
        try:
            text = _render(tokenizer, probe, template)
        except MalformedRow:
            continue
        if _PROBE_REASONING in text and OPEN not in text:
            return key
    return None


def _keeps_reasoning(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    if _reasoning_key(tokenizer, template):
        return True
    try:
        text, question = (_render(tokenizer, turns, template) for turns in (_PROBE, _PROBE[:1]))
    except MalformedRow:
        return False
    # A system prompt of the template may name the tags (SmolLM3, Phi-4-reasoning).
    return _PROBE_REASONING in text and all(text.count(tag) - question.count(tag) == 1 for tag in (OPEN, CLOSE))


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], template: str) -> str:
    import jinja2

    try:
        return chat_text(tokenizer, messages, chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise SeergateError(f"the chat template cannot be read: {error}") from error
    except (jinja2.TemplateError, TypeError) as error:
        raise MalformedRow("refused by the chat template") from error


class Formatter:
    """Turns rows into training texts.

    Args:
        column: column to read; by default ``messages``, or ``prompt`` and ``completion``, or ``text``.
        chat_template: path of a `.jinja` file to use instead of the tokenizer's own template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, column: str | None = None, chat_template: str | None = None
    ) -> None:
        self.tokenizer, self.column, self._override = tokenizer, column, chat_template

    @cached_property
    def template(self) -> str:
        """The chat template; determined on first access, since a dataset of plain text needs none."""
        return training_template(self.tokenizer, self._override)

    @cached_property
    def beginning(self) -> str:
        """`beginning` of the tokenizer, which a text may already have."""
        return beginning(self.tokenizer).rstrip()

    @cached_property
    def reasoning_key(self) -> str | None:
        """`_reasoning_key` of the template."""
        return _reasoning_key(self.tokenizer, self.template)

    def text(self, row: Any) -> TrainingText:
        """Return the training text of a row; raises `MalformedRow` with the reason if the row cannot be used."""
        content = self._content(row)
        if isinstance(content, str):
            if not content.strip():
                raise MalformedRow("empty text")
            rendered = TrainingText(content.removeprefix(self.beginning), False, [])
        else:
            rendered = self._chat(content)
        _check_unicode(rendered.text)
        return rendered

    def _content(self, row: Any) -> str | list[Any]:
        if not isinstance(row, Mapping):
            raise MalformedRow("not a record")
        if self.column is not None:
            content = row.get(self.column)
            if self.column != "text" and isinstance(content, str):
                content = _plain_text(content)
            elif isinstance(content, Mapping):
                content = _listed(content)
        elif row.get("messages") is not None:
            content = _listed(row["messages"])
        elif row.get("prompt") is not None and row.get("completion") is not None:
            content = [*_turns(row["prompt"], "user"), *_turns(row["completion"], "assistant")]
        elif row.get("text") is not None:
            content = row["text"]
        else:
            raise MalformedRow("no messages, prompt and completion, or text; --data-column names another key")
        if not isinstance(content, (str, list)):
            there = ", ".join(sorted(map(str, row)))
            raise MalformedRow(f"no {self.column} among {there}" if content is None else "neither messages nor text")
        return content

    def _chat(self, turns: list[Any]) -> TrainingText:
        messages = [_message(turn) for turn in turns]
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()  # an unanswered question holds no reasoning
        if not messages:
            raise MalformedRow("no assistant turn")
        answer = messages[-1]["content"]
        if not answer.replace(OPEN, "").replace(CLOSE, "").strip():
            raise MalformedRow("empty assistant turn")
        added = OPEN not in answer and CLOSE in answer
        if added:
            answer = f"{OPEN}\n{answer.lstrip()}"
        if answer.count(OPEN) > 1 or answer.count(CLOSE) > 1:
            raise MalformedRow("several think tags")
        earlier_reasoning = _remove_reasoning(messages[:-1])
        before, _, rest = answer.partition(OPEN)
        reasoning, end, reply = rest.partition(CLOSE)
        reasoning, in_tags = reasoning.strip(), self.reasoning_key is None
        cut = in_tags and OPEN in answer and not end
        if cut:  # for templates that keep closed reasoning only
            messages[-1]["content"] = f"{answer}\n{CLOSE}\n\n."
        elif in_tags or OPEN not in answer:
            messages[-1]["content"] = answer
        elif end:
            messages[-1]["content"] = f"{before}{reply}".strip()
            messages[-1] |= {str(self.reasoning_key): reasoning} if reasoning else {}
        else:
            raise MalformedRow("reasoning without an end")
        text = _render(self.tokenizer, messages, self.template)
        ignored = roles_left_out(messages, text, lambda turns: _render(self.tokenizer, turns, self.template))
        if ignored - {"system"}:
            raise MalformedRow("a turn whose role the chat template leaves out")
        text = text[: text.rfind(CLOSE)].rstrip() if cut and CLOSE in text else text
        system = [message for message in messages[:1] if message["role"] == "system"]
        tags = text.count(OPEN) - _render(self.tokenizer, [*system, _PROBE[0]], self.template).count(OPEN)
        tags -= sum(message["content"].count(OPEN) for message in messages[len(system) : -1])
        if OPEN in answer and (tags != in_tags or reasoning not in text or before.strip() not in text):
            raise MalformedRow("reasoning, or text before it, that the chat template does not keep")
        if tags > 1:
            raise MalformedRow("several think tags")
        notes = {
            "given their opening think tag": added,
            "without reasoning": not reasoning,
            "without the reasoning of their earlier turns": earlier_reasoning,
            "without their system turn, which the chat template leaves out": bool(ignored),
            "cut off after their last answer": len(messages) < len(turns),
        }
        return TrainingText(text, True, [note for note, holds in notes.items() if holds])


def _remove_reasoning(earlier: list[dict[str, str]]) -> bool:
    """Remove the reasoning of earlier turns, which a model does not see in use; return whether there was any."""
    removed = False
    for message in earlier:
        if message["role"] == "assistant":
            thought, end, reply = message["content"].rpartition(CLOSE)
            message["content"] = reply.lstrip()
            removed |= bool(end and thought.replace(OPEN, "").strip())
    return removed


def question(row: Any) -> list[dict[str, str]]:
    """Return the turns of a row before its last answer, for a model to answer; raises `MalformedRow` without any."""
    if not isinstance(row, Mapping):
        raise MalformedRow("not a record")
    name = next((name for name in ("messages", "prompt", "question") if row.get(name) is not None), None)
    turns = [] if name is None else _listed(row[name]) if name == "messages" else _turns(row[name], "user")
    messages = [_message(turn) for turn in turns]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        raise MalformedRow("no messages, prompt or question")
    _remove_reasoning(messages)
    for message in messages:
        _check_unicode(message["role"] + message["content"])
    return messages


def answer_turn(completion: str) -> dict[str, str]:
    """Return a generated text as the assistant's turn. The reasoning of gpt-oss, whose chat template refuses it in the
    content, is under a key.
    """
    if (parts := _CHANNELS.fullmatch(completion)) is None:
        return {"role": "assistant", "content": completion}
    return {"role": "assistant", "content": parts[2]} | ({"reasoning_content": parts[1]} if parts[1] else {})


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: valid in JSON, but no tokenizer accepts it
        raise MalformedRow("invalid unicode") from error


def _listed(messages: Any) -> list[Any]:
    if isinstance(messages, str):
        raise MalformedRow("messages that are a text instead of a list; parse it first")
    if isinstance(messages, Mapping) and all(isinstance(part, list) for part in messages.values()):
        # `datasets` gives a Sequence of records as one list per key.
        with suppress(ValueError):  # lists of different lengths
            messages = [dict(zip(messages, turn, strict=True)) for turn in zip(*messages.values(), strict=True)]
    if not isinstance(messages, list):
        raise MalformedRow("neither messages nor text")
    return messages


def _plain_text(text: str) -> str:
    if holds_turns(text):
        raise MalformedRow("a conversation as JSON text instead of a list; parse it first")
    return text


def _turns(value: Any, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": _plain_text(value)}]
    return _listed(value) if isinstance(value, list | Mapping) else [None]


def _message(turn: Any) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise MalformedRow("a turn without role and content")
    if turn.get("tool_calls") or turn.get("function_call") or turn.get("role") in ("tool", "function"):
        raise MalformedRow("a turn with tool calls")
    role, content = turn.get("role"), turn.get("content")
    if isinstance(role, str) and isinstance(content, list):
        raise MalformedRow("a turn whose content is a list, not a text")
    if not isinstance(role, str) or not isinstance(content, str):
        raise MalformedRow("a turn without role and content")
    thoughts = (turn.get(key) for key in KEYS)
    reasoning = next((each for each in thoughts if isinstance(each, str) and each.strip()), None)
    if role == "assistant" and reasoning is not None:
        if CLOSE not in content:
            content = f"{OPEN}\n{reasoning.strip()}\n{CLOSE}\n\n{content}"
        elif reasoning.strip() not in content:
            raise MalformedRow("a turn with two different reasonings")
    return {"role": role, "content": content}
