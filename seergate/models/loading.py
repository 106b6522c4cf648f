"""Loads base models, their configurations and their tokenizers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seergate.errors import SeergateError, first_line, how_to_install
from seergate.hub import cached_commit, hub_call
from seergate.models.families import base_commit, decoder_of, family_of, text_config
from seergate.paths import GGUF, directory_here, gguf_file, is_hub_id, resolve_model
from seergate.progress import working

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OLD_WEIGHTS, _OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
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


def base_config(name: str | os.PathLike[str], **options: Any) -> Any:
    """Load the configuration of a base model; arguments and errors are those of `load_base`."""
    from transformers import AutoConfig

    config = _reading("base model", name, AutoConfig.from_pretrained, **options)
    if (file := gguf_file(name)) is not None:
        config.name_or_path = file
    return config


def skeleton(config: Any) -> PreTrainedModel:
    """Build a model on the meta device, without memory for weights; its RoPE frequencies are real tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    family_of(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise SeergateError(f"no model can be built from its configuration: {first_line(error)}") from error
    decoder: Any = decoder_of(model)
    decoder.rotary_emb = type(decoder.rotary_emb)(config=text_config(model))
    return model


def load_base(
    name: str | os.PathLike[str], *, device: str | torch.device | None = None, **options: Any
) -> PreTrainedModel:
    """Load a causal language model for inference. A GGUF file is read by transformers and dequantised.

    Args:
        name: directory, GGUF file, Hub id, or a model that ships with seergate (``"checkpoints/tiny-reasoner"``).
        device: device to move the model to; for several devices, pass ``device_map`` instead.
        **options: for `AutoModelForCausalLM.from_pretrained`, such as ``revision``, ``dtype`` or ``token``.

    Raises:
        SeergateError: if the model is missing, cannot be loaded, or does not fit on the device.
    """
    import transformers

    file, read = gguf_file(name), transformers.AutoModelForCausalLM.from_pretrained
    if file is not None:
        if options.get("quantization_config") is not None:
            raise SeergateError(f"quantization_config is given; it must be left out for {file}, which is dequantised")
        if hasattr(transformers, "GgufConfig"):  # releases without it always dequantise
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: PreTrainedModel
    with working(f"loading the model {name}"):
        model, found = _reading("base model", name, read, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        raise SeergateError(
            f"the base model {name} lacks {len(missing)} of its weights, such as {missing[0]}; they must all be there"
        )
    model.eval()
    if file is not None:
        model.config.name_or_path = file
        if (quantizer := getattr(model, "hf_quantizer", None)) is not None:  # its marks prevent `save_pretrained`
            quantizer.remove_quantization_config(model)
    if is_hub_id(str(name)) and base_commit(model.config) is None:
        # Some releases of transformers do not record the commit, which is stored with the gates of this model.
        commit = cached_commit(str(name), options.get("revision"), options.get("cache_dir"))
        model.config._commit_hash = commit
    if device is None:
        return model
    try:
        return model.to(device)  # type: ignore[arg-type]
    except RuntimeError as error:  # most often, it does not fit
        raise SeergateError(f"the base model {name} cannot be put on {device}: {first_line(error)}") from error


def download_weights(name: str, revision: str | None = None) -> None:
    """Download the weights that `load_base` reads, unless they are cached; raises `SeergateError` if that fails."""
    if not is_hub_id(name) or _weights_here(name, revision):
        return
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    with working(f"downloading {name}"), hub_call(f"the weights of {name} could not be downloaded"):
        files = HfApi().list_repo_files(name, revision=revision)
        wanted = [_WEIGHTS] if _WEIGHTS in files else ["pytorch_model*"]
        if _WEIGHTS not in files and _INDEX in files:
            wanted = _shards(hf_hub_download(name, _INDEX, revision=revision))
        snapshot_download(name, revision=revision, allow_patterns=wanted)
    if not _weights_here(name, revision):
        raise SeergateError(f"the weights of {name} could not be downloaded: the repository has none")


def _weights_here(name: str, revision: str | None) -> bool:
    """Return whether all files of a model's weights are cached."""
    from huggingface_hub import try_to_load_from_cache

    def found(file: str) -> str | None:
        path = try_to_load_from_cache(name, file, revision=revision)
        return path if isinstance(path, str) else None  # a sentinel marks files that the repository lacks

    for whole, index in ((_WEIGHTS, _INDEX), (_OLD_WEIGHTS, _OLD_INDEX)):
        if found(whole):
            return True
        if listed := found(index):
            return all(map(found, _shards(listed)))
    return False


def _shards(index: str) -> list[str]:
    """Return the files named by an index, since the names of shards differ between models."""
    return sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))


def load_tokenizer(name: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    """Load a base model's tokenizer; arguments and errors are those of `load_base`."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _reading("tokenizer of", name, AutoTokenizer.from_pretrained, **options)
    return tokenizer


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


@lru_cache
def _is_shard(file: Path, changed: int) -> bool:
    """Return whether a GGUF file is a part of a split model; ``changed`` is its time stamp, for the cache."""
    from gguf import GGUFReader

    try:
        count = GGUFReader(file).get_field("split.count")
    except (OSError, ValueError, IndexError, KeyError):  # damaged, which transformers reports
        return False
    return count is not None and int(count.contents()) > 1


def _reading(what: str, name: str | os.PathLike[str], read: Callable[..., Any], **options: Any) -> Any:
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
    if file is not None:
        if importlib.util.find_spec("gguf") is None:
            raise SeergateError(f"{file} is a GGUF file, which needs the package gguf; {how_to_install('gguf')}")
        if _is_shard(file, file.stat().st_mtime_ns):
            raise SeergateError(f"{file} is one of several files of a GGUF model; {_MERGE}")
        options["gguf_file"] = file.name
    options = {"trust_remote_code": False, **{key: value for key, value in options.items() if value is not None}}
    from_hub = here is None
    unread = f"the {what} {name}{' is no directory here and' if from_hub else ''} could not be loaded"
    with hub_call(unread, asks=from_hub and not options.get("local_files_only")):
        return read(resolve_model(name) if file is None else str(here), **options)
