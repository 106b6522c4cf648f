"""What transformers leaves out when it reads a GGUF file: scaled RoPE and windows, which are refused, and how a
tokenizer splits digits, which is set.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seergate.errors import SeergateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPLETE = ("qwen35", "qwen35moe", "gemma4")
"""Architectures whose RoPE and windows transformers reads."""

SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Values of ``tokenizer.ggml.pre`` of tokenizers that split as GPT-2's, after every digit was set apart."""


def refuse_what_is_left_out(file: Path) -> None:
    """Raise `SeergateError` if transformers would load another model than the file has: without its scaled or partial
    RoPE, or without its sliding window.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    values, tensors = _contents(file, file.stat().st_mtime_ns)
    kind = values["general.architecture"]
    if kind in COMPLETE:
        return
    own = {key.removeprefix(f"{kind}."): value for key, value in values.items()}
    heads, hidden, length = map(own.get, ("attention.head_count", "embedding_length", "context_length"))
    width = own.get("attention.key_length", hidden // heads if hidden and heads else None)
    scaling, rotated = own.get("rope.scaling.type", "none"), own.get("rope.dimension_count", width)
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1 if scaling == "none" else None))
    factors = sorted(name for name in tensors if name.startswith(("rope_freqs", "rope_factors")))
    window = own.get("attention.sliding_window") or length
    read = GGUF_TO_TRANSFORMERS_MAPPING["config"].get(kind.replace("-", "_"), {}).values()
    left_out = (
        (factors, f"scaled RoPE ({', '.join(factors)})"),
        (factor != 1, f"scaled RoPE ({scaling if factor is None else f'by {factor:g}'})"),
        (width and rotated != width, f"RoPE of {rotated} of {width} dimensions"),
        (window != length and "sliding_window" not in read, f"a sliding window of {window} tokens"),
    )
    if lost := [what for there, what in left_out if there]:
        raise SeergateError(
            f"{file} has {' and '.join(lost)}, which transformers does not read from GGUF files, so another model "
            "would be loaded; use the directory or Hub id of the original model"
        )


def set_split(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Let a tokenizer split texts as its file states; warns if transformers does not know how."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    values, _ = _contents(file, file.stat().st_mtime_ns)
    stated = values.get("tokenizer.ggml.pre", "default")
    if values.get("tokenizer.ggml.model") != "gpt2" or stated in ("default", "gpt-2"):
        return
    if stated in SINGLE_DIGITS:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif stated not in getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", [stated]):  # from 5.18 on
        warnings.warn(
            f"transformers does not know how the tokenizer of {file} splits texts ({stated!r}), so tokens may differ "
            "from those that the model was trained on; use the directory or Hub id of the original model",
            stacklevel=3,
        )


@lru_cache(maxsize=4)
def _contents(file: Path, changed_ns: int) -> tuple[dict[str, Any], set[str]]:
    """A file's values, without its lists, and the names of its tensors."""
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(file)
    single = {key: x for key, x in reader.fields.items() if x.types[:1] != [GGUFValueType.ARRAY]}
    return {key: x.contents() for key, x in single.items()}, {tensor.name for tensor in reader.tensors}
