"""Fingerprints of weights, to compare two models without holding both in memory."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

SAMPLED = 2**18


def fingerprint(module: nn.Module) -> str:
    """Sixteen hexadecimal digits that depend on the weights, their names, shapes and dtypes.

    Reads every element of small tensors and about `SAMPLED` evenly spaced elements of larger ones, so that it is fast
    for models of any size and still detects retraining.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().flatten()
        part = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().cpu()
        digest.update(part.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def rope_of(model: Any) -> Any:
    """The RoPE parameters of a transformers model, as JSON types; they, and so YaRN, do not affect `fingerprint`."""
    return json.loads(json.dumps(getattr(model.config.get_text_config(), "rope_parameters", None), default=str))
