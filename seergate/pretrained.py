"""Reads what comes with a pretrained model: its tokenizer, its chat template, and errors of ``from_pretrained``."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from seergate.errors import SeergateError, how_to_install
from seergate.gguf_metadata import refuse_what_is_left_out, set_split
from seergate.hub import hub_call
from seergate.paths import GGUF, directory_here, gguf_file, is_hub_id, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHARD = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", re.IGNORECASE)
_MERGE = "seergate reads one file: merge them with `llama-gguf-split --merge FIRST_FILE MERGED_FILE`"

DATE = datetime(2024, 7, 26)
"""The date in training texts and evaluated prompts; Llama 3's chat templates state it where they have no clock."""

_STATED = {f"%{code}": DATE.strftime(f"%{code}") for code in "aAbBcdDeFhHIjmMpRSTuUVwWxXyYzZ"}
_STATED |= {f"%-{code}": _STATED[f"%{code}"].lstrip("0") or "0" for code in "dHIjmMSy"} | {"%%": "%"}
_FIXED_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace({code!r}, {text!r})" for code, text in _STATED.items())
    + " }}{% endmacro %}\n"  # transformers removes a line feed after a tag
)
"""The beginning of a chat template in which the time is `DATE`. transformers passes no functions to templates."""


HUB_OPTIONS = ("token", "cache_dir", "local_files_only", "revision", "subfolder", "force_download")
MODEL_OPTIONS = {
    *("adapter_kwargs", "adapter_name", "allow_all_kernels", "attn_implementation", "code_revision", "fusion_config"),
    *("device_map", "device_mesh", "disable_mmap", "distributed_config", "tqdm_class"),
    *("dtype", "experts_implementation", "generation_config", "ignore_mismatched_sizes"),
    *("kernel_config", "key_mapping", "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder"),
    *("proxies", "quantization_config", "state_dict", "torch_dtype", "tp_plan", "tp_size", "trust_remote_code"),
    *("use_kernels", "use_safetensors", "variant", "weights_only"),
}
"""Options of `AutoModelForCausalLM.from_pretrained` that are not fields of the model's configuration; transformers has
no list of them."""


def read_pretrained(what: str, name: str | os.PathLike[str], read: Callable[..., Any], **options: Any) -> Any:
    """Call a ``from_pretrained`` and report its errors as a `SeergateError` of one sentence."""
    file = gguf_file(name)
    here = directory_here(name) if file is None else file.parent
    if here is None and not is_hub_id(str(name)):
        kind = "file" if str(name).lower().endswith(GGUF) else "directory"
        raise SeergateError(f"the {what} {name} could not be loaded: there is no such {kind}")
    if file is None and here is not None and not (here / "config.json").exists() and any(here.glob(f"*{GGUF}")):
        if any(map(_SHARD.search, map(str, here.glob(f"*{GGUF}")))):
            raise SeergateError(f"{name} holds a GGUF model in several files; {_MERGE}")
        raise SeergateError(f"{name} holds several GGUF files; name one of them")
    if here is not None and (here / "adapter_config.json").exists() and not (here / "config.json").exists():
        raise SeergateError(
            f"{name} is a PEFT adapter; merge it into its base model (merge_and_unload), and give the merged directory"
        )
    if file is not None:
        if importlib.util.find_spec("gguf") is None:
            raise SeergateError(f"{file} is a GGUF file, which needs the package gguf; {how_to_install('gguf')}")
        if _SHARD.search(file.name):
            raise SeergateError(f"{file} is one of several files of a GGUF model; {_MERGE}")
        options["gguf_file"] = file.name
    unset = {name for name, value in options.items() if value is None} & {*HUB_OPTIONS, *MODEL_OPTIONS}
    options = {"trust_remote_code": False, **{name: value for name, value in options.items() if name not in unset}}
    from_hub = here is None
    commit = f" at {revision}" if (revision := options.get("revision")) else ""
    unread = f"the {what} {name}{commit}{' is no directory here and' if from_hub else ''} could not be loaded"
    with hub_call(unread, asks=from_hub and not options.get("local_files_only")):
        if file is not None:
            refuse_what_is_left_out(file)
        return read(resolve_model(name) if file is None else str(here), **options)


def load_tokenizer(name: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    """Load a base model's tokenizer; arguments and errors are those of `load_base`."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = read_pretrained(
        "tokenizer of", name, AutoTokenizer.from_pretrained, **options
    )
    if (file := gguf_file(name)) is not None:
        set_split(tokenizer, file)
    return tokenizer


def beginning(tokenizer: PreTrainedTokenizerBase) -> str:
    """The special tokens that a tokenizer puts before plain text by default, as text; empty if there are none."""
    ids, bare = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    begins = ids[:1] == [tokenizer.bos_token_id]
    count = next((i for i in range(len(ids)) if bare and ids[i : i + len(bare)] == bare), int(begins))
    text = str(tokenizer.bos_token) if begins and count == 1 else "".join(tokenizer.convert_ids_to_tokens(ids[:count]))
    if text and tokenizer(f"{text}a", add_special_tokens=False)["input_ids"] != ids[: count + len(bare)]:
        return f"{text} "  # the first word after a special token has its space only if it is written
    return text


def chat_text(
    tokenizer: PreTrainedTokenizerBase, messages: Iterable[dict[str, str]], *, today: bool = False, **options: Any
) -> str:
    """Return a conversation in the model's markup.

    Args:
        today: let a template that states the date (``strftime_now``) state today's; by default it states `DATE`, so
            that the same conversation gives the same text on every day.
        **options: for `apply_chat_template`, such as ``chat_template`` or ``add_generation_prompt``.
    """
    given = options.get("chat_template")
    if not today and "strftime_now" in str(given or tokenizer.chat_template):
        options["chat_template"] = _FIXED_CLOCK + tokenizer.get_chat_template(given)
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))


def roles_left_out(
    messages: Iterable[dict[str, str]], text: str, render: Callable[[list[dict[str, str]]], str]
) -> set[str]:
    """Roles of the turns whose content a chat template ignores. Those of assistants are not looked at, since templates
    rewrite them.

    Args:
        text: the conversation in the template's markup, ``render(messages)``.
    """
    messages = list(messages)
    return {
        turn["role"]
        for at, turn in enumerate(messages)
        if turn["role"] != "assistant"
        and turn["content"].strip() not in text
        and render([*messages[:at], turn | {"content": "?"}, *messages[at + 1 :]]) == text
    }
