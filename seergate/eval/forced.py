"""Distance of methods from dense attention on given texts, which are fed token by token (`seergate.score`).

Nothing is generated, so errors do not build up, and a model that can only continue text will do. Each text's beginning
is its prompt; the next `SETTLING` tokens do not count, as some methods drop nothing until then.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.eval.costs import RowStats
from seergate.eval.metrics import COSTS, PEAKS
from seergate.eval.proxies import compare
from seergate.eval.retrieval import SETTLING, beginning
from seergate.eval.settings import MethodSpec
from seergate.eval.stats import clustered_quantile, mean_and_interval
from seergate.eval.task import Task
from seergate.hf.attach import attached
from seergate.hf.bank import GateBank
from seergate.hf.score import score
from seergate.methods import LongPromptWarning

KEPT_BYTES = 2**30
"""Bytes of dense attention's logits that are kept for further settings."""


def pieces(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> Tensor:
    """``[N, length]``: tokens from the middle of each text that is long enough."""
    encoded = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    starts = [(ids, (len(ids) - length) // 2) for ids in encoded if len(ids) >= length]
    return torch.tensor([ids[start : start + length] for ids, start in starts])


class TeacherForcing:
    """Compares settings on the same texts.

    Args:
        model: a model in eval mode, nothing attached.
        ids: ``[N, S]``, one text per row.
        prompt: number of tokens of each that are read at once.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, prompt: int) -> None:
        self.model, self.ids, self.prompt = model, ids.to(model.device), prompt
        self.steps = ids.shape[1] - 1 - prompt - SETTLING
        self._dense = dict[int, Tensor]()

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task) -> TeacherForcing:
        """Compare on the texts of a task that scores texts."""
        assert task.max_total_tokens is not None and task.scored is not None
        ids = pieces(tokenizer, [str(problem.prompt) for problem in task.problems()], task.max_total_tokens)
        if start := beginning(tokenizer):
            ids[:, 0] = tokenizer.convert_tokens_to_ids(start)
        return cls(model, ids, task.max_total_tokens - 1 - SETTLING - task.scored)

    @torch.inference_mode()
    def dense(self, number: int) -> Tensor:
        """Dense attention's logits ``[steps, V]`` of a text; those of the first texts are kept."""
        if (found := self._dense.get(number)) is None:
            found = self.model(
                input_ids=self.ids[number : number + 1, :-1], use_cache=False, logits_to_keep=self.steps
            ).logits[0]
            if (len(self._dense) + 1) * found.nbytes <= KEPT_BYTES:
                self._dense[number] = found
        return found

    def measure(self, spec: MethodSpec, bank: GateBank | None, number: int) -> dict[str, Any]:
        """Measure a setting on one text.

        Returns:
            ``kl``, of each token that is scored; ``loss``, ``dense_loss`` and ``agreement``, means over them; and what
            decoding read and held (`RowStats.of`), `SETTLING` tokens included.
        """
        ids, dense, began = self.ids[number : number + 1], self.dense(number), time.monotonic()
        with warnings.catch_warnings(), attached(self.model, spec.method(bank), correction=spec.correction) as handle:
            warnings.simplefilter("ignore", LongPromptWarning)  # budgets below the prompt are intended
            stats = handle.count_with(RowStats)
            stats.add_rows(1)
            logits = score(self.model, ids, start=self.prompt, logits=True).logits
            costs = stats.of(0)
        assert logits is not None
        kl, *others = compare(dense, logits[0, SETTLING + 1 :], ids[0, -self.steps :])
        loss, dense_loss, agreement = (float(values.mean()) for values in others)
        return {
            **{"kl": [float(f"{value:.6g}") for value in kl.tolist()], "loss": loss, "dense_loss": dense_loss},
            **{"agreement": agreement, "n_prompt_tokens": self.prompt, "n_tokens": self.steps},
            **{"seconds": time.monotonic() - began, **costs},
        }


def summary(texts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of a setting from those of its texts (`TeacherForcing.measure`).

    Returns:
        ``kl``, ``loss``, ``agreement`` (means over texts) and ``kl_p99`` (of all tokens), each with ``_low`` and
        ``_high``, the ends of its 95 % interval, clustered by text, which are ``None`` for one text; ``kl_se``,
        ``agreement_se``; ``perplexity`` and ``dense_perplexity``; ``n_problems``; what was read and held.
    """
    found: dict[str, Any] = {}
    for name in ("kl", "loss", "agreement"):
        mean = mean_and_interval([float(np.mean(text[name])) for text in texts])
        found |= {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high, f"{name}_se": mean.se}
    p99, low, high = clustered_quantile([text["kl"] for text in texts], 0.99)
    found |= {"kl_p99": p99, "kl_p99_low": low, "kl_p99_high": high}
    found |= {"perplexity": math.exp(found["loss"]), "n_problems": len(texts), "n_samples": len(texts)}
    found["dense_perplexity"] = math.exp(np.mean([text["dense_loss"] for text in texts]))
    read = {name: [text[name] for text in texts if name in text] for name in (*COSTS, *PEAKS, "n_tokens", "seconds")}
    found |= {name: float(np.mean(values)) for name, values in read.items() if values}
    return {name: None if math.isnan(value) else value for name, value in found.items()}
