"""A byte-level tokenizer with the chat markup of the families whose templates matter here."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seergate.distill import TrainConfig, load_train_config

PLAIN = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}"""

# Qwen3: the last assistant turn keeps its reasoning, and a turn without any gets an empty one.
QWEN3 = """\
{%- for m in messages -%}
{%- set content, reasoning = m.content, '' -%}
{%- if m.role == 'assistant' and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif -%}
{{ content + '<|im_end|>\\n' }}
{%- endfor -%}"""

# R1-Distill: what stands before the end of the reasoning is deleted.
R1 = """\
{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] }}
{{- '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}"""

# gpt-oss: each turn is in a channel, and reasoning is a key of the last turn.
GPT_OSS = """\
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% else -%}
{%- if loop.last and 'thinking' in m -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif -%}
{%- endfor -%}"""

TEMPLATES = {"plain": PLAIN, "qwen3": QWEN3, "r1": R1}


def byte_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte; no text is out of its vocabulary."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


@pytest.fixture(params=sorted(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Every chat markup in turn."""
    return byte_tokenizer(TEMPLATES[request.param])


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """A run on a local file, with its own token cache."""
    options = {"recipe": "paper", "data": str(tmp_path / "rows.jsonl"), "max_length": 1024, "block_size": 8}
    return load_train_config("someone/model", options | {"token_cache": str(tmp_path / "cache")})
