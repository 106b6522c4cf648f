"""Loads base models and their configurations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seergate.errors import SeergateError, first_line
from seergate.hub import cached_commit, hub_call
from seergate.models.families import base_commit, decoder_of, family_of, text_config
from seergate.paths import gguf_file, is_hub_id
from seergate.pretrained import read_pretrained
from seergate.progress import working

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OLD_WEIGHTS, _OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def base_config(name: str | os.PathLike[str], **options: Any) -> Any:
    """Load the configuration of a base model; arguments and errors are those of `load_base`."""
    from transformers import AutoConfig

    config = read_pretrained("base model", name, AutoConfig.from_pretrained, **options)
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
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: PreTrainedModel
    with working(f"loading the model {name}"):
        model, report = read_pretrained("base model", name, read, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
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
        patterns = [_WEIGHTS] if _WEIGHTS in files else ["pytorch_model*"]
        if _WEIGHTS not in files and _INDEX in files:
            patterns = _shards(hf_hub_download(name, _INDEX, revision=revision))
        snapshot_download(name, revision=revision, allow_patterns=patterns)
    if not _weights_here(name, revision):
        raise SeergateError(f"the weights of {name} could not be downloaded: the repository has none")


def _weights_here(name: str, revision: str | None) -> bool:
    """Return whether all files of a model's weights are cached."""
    from huggingface_hub import try_to_load_from_cache

    def cached_path(file: str) -> str | None:
        path = try_to_load_from_cache(name, file, revision=revision)
        return path if isinstance(path, str) else None  # a sentinel marks files that the repository lacks

    for whole, index in ((_WEIGHTS, _INDEX), (_OLD_WEIGHTS, _OLD_INDEX)):
        if cached_path(whole):
            return True
        if listed := cached_path(index):
            return all(map(cached_path, _shards(listed)))
    return False


def _shards(index: str) -> list[str]:
    """Return the files named by an index, since the names of shards differ between models."""
    try:
        return sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # also what is no object
        raise SeergateError(
            f"{index} is no index of a model's weights; delete this model from the Hub's cache"
        ) from error
