"""Prompts as text and as tokens, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval.tasks.task import Problem
from seergate.pretrained import beginning, chat_text, roles_left_out


def prompt_text(tokenizer: PreTrainedTokenizerBase, problem: Problem, *, today: bool = False) -> str:
    """The text that the model continues, with its special tokens: the problem's messages in the model's markup
    (`chat_text`), or its prompt after the tokenizer's `beginning`, unless the prompt itself begins so.
    """
    if problem.prompt is not None:
        start = beginning(tokenizer)
        given = not problem.prompt or problem.prompt.startswith(start.rstrip())
        return problem.prompt if given else start + problem.prompt
    if not tokenizer.chat_template:
        raise SeergateError(
            "this model's tokenizer has no chat template, so the task's messages cannot be put to it; base models can "
            "continue a text: gsm8k:shots=4, math500:shots=4, needle, humaneval:chat=false, or rows with a 'prompt'"
        )

    def render(messages: Iterable[dict[str, str]]) -> str:
        return chat_text(tokenizer, messages, today=today, add_generation_prompt=True)

    try:
        text = render(problem.messages)
        ignored = roles_left_out(problem.messages, text, render)
    except TemplateError as error:
        raise SeergateError(
            f"the model's chat template refuses the messages of problem {problem.problem_id}: {error}"
        ) from error
    if ignored:
        raise SeergateError(
            f"the model's chat template leaves out a turn of problem {problem.problem_id}, whose roles are "
            f"{', '.join(message['role'] for message in problem.messages)}; use roles that it knows, such as user"
        )
    return text


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt that already holds its special tokens."""
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    if not ids:
        raise SeergateError("a prompt is empty; there is nothing to continue")
    return ids


def reply_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, reply: str) -> tuple[int, ...]:
    """Token ids of a reply after a prompt; empty if a token spans the end of the prompt."""
    ids = encode(tokenizer, prompt)
    both = encode(tokenizer, prompt + reply)
    return tuple(both[len(ids) :]) if both[: len(ids)] == ids else ()


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end a generation: the model's, and the tokenizer's, which may be another after fine-tuning."""
    ids = model.generation_config.eos_token_id
    return {*(ids if isinstance(ids, (list, tuple)) else [ids]), tokenizer.eos_token_id} - {None}
