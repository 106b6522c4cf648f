"""Builds the tiny reasoner's tokenizer: word level, with the chat markup and template of the Qwen family."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seergate.eval.tasks.chain_sum import vocabulary

PAD, TURN, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|> ' + message.role + ' ' + message.content + ' <|im_end|> ' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|> assistant ' }}{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer as an ordinary `PreTrainedTokenizerFast`; one token per whitespace-separated word."""
    words = [PAD, TURN, END, UNKNOWN, "<think>", "</think>", "system", "user", "assistant", *vocabulary()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="\0", cleanup=False)  # joins words with single spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
