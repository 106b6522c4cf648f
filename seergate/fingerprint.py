"""Fingerprints of weights, by which two models are compared without keeping either."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

SAMPLED = 2**18


def fingerprint(module: nn.Module) -> str:
    """Sixteen hexadecimal digits that change when the weights do, or their dtype.

    Reads all of small tensors and `SAMPLED` evenly spaced elements of larger ones: a retrained model is told apart at
    once, whatever its size.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().flatten()
        part = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().cpu()
        digest.update(part.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def rope_of(model: Any) -> Any:
    """The parameters of a transformers model's rotary embedding, as plain JSON types. `fingerprint` does not cover
    them, and YaRN changes no weight.
    """
    return json.loads(json.dumps(getattr(model.config.get_text_config(), "rope_parameters", None), default=str))
