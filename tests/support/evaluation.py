"""A tiny random model with a word-level tokenizer for chain_sum, on disk: what a run needs, in a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seergate.eval.generation.engine import Engine
from seergate.eval.generation.samples import Job, Limit
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.eval.store import SAMPLES, read_samples
from seergate.eval.tasks.chain_sum import vocabulary
from tests.support.models import tiny_model

TEMPLATE = (
    "{%- for m in messages -%}<s> {{ m.role }} {{ m.content }} </s> {% endfor -%}"
    "{%- if add_generation_prompt -%}<s> assistant {% endif -%}"
)
PAD, START, END = 0, 1, 2


def mostly_soak(names, *short):
    """Parameters of a test, all but some of which only `make soak` runs."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.soak) for name in names]


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", *vocabulary()]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


def model(eos: int | None = None):
    """Random weights; its answers are never right, and without ``eos`` they end at the limit."""
    made = tiny_model("qwen3", vocab_size=len(tokenizer()))
    made.generation_config.eos_token_id = eos
    return made


def engine(handle, on_finished, *, batch_size=2, limit=None, sampling=None, prefix=()) -> Engine:
    """Greedy answers of 12 tokens, unless told otherwise."""
    job = Job(MethodSpec("dense"), batch_size, (1, 2, 3), 9, limit or Limit(12), sampling or Sampling(), prefix)
    return Engine(handle, tokenizer(), job, on_finished)


def edit_samples(directory: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Put the samples that ``change`` makes of a run's samples in their place."""
    samples = change(read_samples(directory))
    (directory / SAMPLES).write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def save(directory: Path) -> Path:
    model().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
