"""Distance of methods from dense attention on given texts, decoded with teacher forcing (`seergate.score`).

Nothing is generated, so errors do not accumulate, and base models can be measured. Each text's beginning is its
prompt; the next `SETTLING` tokens are not scored, because some methods evict nothing until then.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.eval.generation.costs import RowStats
from seergate.eval.proxies import compare, dense_logits
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks.prompts import encode
from seergate.eval.tasks.retrieval import SETTLING
from seergate.eval.tasks.task import Task
from seergate.methods import LongPromptWarning
from seergate.models.attach import attached
from seergate.models.families import check_length, text_config
from seergate.models.gate_bank import GateBank
from seergate.models.score import score
from seergate.pretrained import beginning

KEPT_BYTES = 2**30
"""Maximum bytes of dense attention's logits that are kept for further settings."""


class TeacherForcing:
    """Compares settings of a model (nothing attached) on texts ``ids [N, S]`` after a prefill of ``prompt`` tokens."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, prompt: int) -> None:
        self.model, self.ids, self.prompt = model, ids.to(model.device), prompt
        self.steps = ids.shape[1] - 1 - prompt - SETTLING
        self._dense = dict[int, Tensor]()

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task) -> TeacherForcing:
        """Make the comparison on the middles of the texts of a task that scores texts."""
        length = task.max_total_tokens
        assert length is not None and task.scored is not None
        check_length(text_config(model), length, "a text of the task's length")
        texts = [tokenizer(p.prompt, add_special_tokens=False, verbose=False)["input_ids"] for p in task.problems()]
        ids = torch.tensor([text[(len(text) - length) // 2 :][:length] for text in texts])
        if start := beginning(tokenizer):
            first = torch.tensor(encode(tokenizer, start.rstrip()))
            ids[:, : len(first)] = first
        return cls(model, ids, length - 1 - SETTLING - task.scored)

    @torch.inference_mode()
    def dense(self, number: int) -> Tensor:
        """Dense attention's logits ``[steps, V]`` of a text, kept for the first texts (`KEPT_BYTES`)."""
        if (logits := self._dense.get(number)) is None:
            logits = dense_logits(self.model, self.ids[number : number + 1], self.steps)
            if (len(self._dense) + 1) * logits.nbytes <= KEPT_BYTES:
                self._dense[number] = logits
        return logits

    def measure(self, spec: MethodSpec, bank: GateBank | None, number: int) -> dict[str, Any]:
        """Measure a setting on one text.

        Returns:
            ``kl`` of each scored token in nats; ``loss``, ``dense_loss`` and ``agreement``, means over scored tokens;
            the numbers of tokens, the seconds; and the costs of decoding (`RowStats.of`), `SETTLING` tokens included.
        """
        ids, dense, began = self.ids[number : number + 1], self.dense(number), time.monotonic()
        with warnings.catch_warnings(), attached(self.model, spec.method(bank), correction=spec.correction) as handle:
            warnings.simplefilter("ignore", LongPromptWarning)  # budgets below the prompt are intended
            stats = handle.count_with(RowStats)
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
