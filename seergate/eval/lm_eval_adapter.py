r"""lm-eval (EleutherAI's harness) with an additional model ``seergate``, which decodes with a method of seergate.

Install the extra in an environment of its own (``pip install "seergate[lm-eval]"``). Releases of lm-eval that support
plugins find the model by themselves; for others, run this module in place of the command ``lm-eval``. Any task of the
harness works; in a checkout::

    python -m seergate.eval.lm_eval_adapter run --model seergate --apply_chat_template \
        --model_args pretrained=checkpoints/tiny-reasoner,method=h2o:interval=16,budget=256 \
        --tasks seergate_chain_sum --include_path docs/examples/lm_eval

lm-eval's AIME tasks decode greedily, score one sample and do not ask for a box; for the paper's protocol use
``seergate eval``. Tasks that score given continuations (multiple choice) prefill the question and decode the
continuation; tasks that score whole texts (``wikitext``) decode all of each window. A text shorter than the budget
is read completely at every step.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from seergate.errors import SeergateError, did_you_mean, sentence
from seergate.eval.harness import likelihoods
from seergate.eval.settings import method_spec
from seergate.models.attach import attach
from seergate.models.gate_bank import GateBank
from seergate.models.loading import load_base
from seergate.models.names import gates_for, say_gates
from seergate.pretrained import load_tokenizer

HFLM_OPTIONS = (
    *("backend", "truncation", "max_length", "batch_size", "max_batch_size", "mixed_precision_dtype", "add_bos_token"),
    *("prefix_token_id", "think_end_token", "enable_thinking", "chat_template_args", "trust_remote_code"),
)
"""Options of ``HFLM`` that affect a loaded model, and ``trust_remote_code``, which is for datasets."""


@register_model("seergate")
class SeergateLM(HFLM):
    """A transformers model of lm-eval, with a method attached.

    Args:
        pretrained: directory or Hub id of the base model.
        gates: directory or Hub id, for methods with gates; by default those in ``gates/`` beside the model.
        method: as `seergate eval` takes it; by default ``gate`` where there are gates, else ``dense``.
        budget: tokens per KV head and step.
        block_size: tokens per block, for methods that select blocks.
        device, dtype: device and dtype of the base model. ``device`` is a GPU by default, and ignored on machines
            without one, since the harness requests a GPU everywhere.
        revision: commit, branch or tag of the base model on the Hub.
        **options: those options of ``HFLM`` that affect a loaded model (`HFLM_OPTIONS`).
    """

    def __init__(
        self,
        pretrained: str,
        gates: str | None = None,
        method: str | None = None,
        budget: int | None = None,
        block_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> None:
        known = ("pretrained", "gates", "method", "budget", "block_size", "device", "dtype", "revision", *HFLM_OPTIONS)
        for name in options:
            if name not in HFLM_OPTIONS:
                raise SeergateError(f"{name!r} has no effect on the model seergate; {did_you_mean(name, known)}")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise SeergateError("the model seergate runs in one process; start lm-eval without a launcher")
        adapter = gates_for(pretrained, gates)
        spec = method_spec(method or ("gate" if adapter else "dense"), budget, block_size)
        bank = GateBank.from_pretrained(adapter) if adapter and (gates or spec.has_gates) else None
        size = bank.config.block_size if bank is not None and spec.has_gates else block_size
        for name, value, without_effect in (
            ("gates", gates, not spec.has_gates),
            ("budget", budget, spec.name == "dense"),
            ("block_size", block_size, spec.block_size is None or size != block_size),
        ):
            if value is not None and without_effect:
                raise SeergateError(f"{name} is {value!r}, which has no effect on the method {spec.name!r}")
        if bank is not None:
            print(say_gates(pretrained, gates))
        made = spec.method(bank)
        given = {} if revision is None else {"revision": str(revision)}
        tokenizer = load_tokenizer(pretrained, **given)
        device = (device or "cuda") if torch.cuda.is_available() else None
        model = load_base(pretrained, device=device, dtype=dtype, **given)
        attach(model, made, correction=spec.correction)
        super().__init__(pretrained=model, tokenizer=tokenizer, **given, **options)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Score continuations by decoding them; the harness itself would score them in one dense forward pass."""
        room = self.max_length + 1  # the last token is predicted, but not read
        for _, _, given in requests:
            if not 1 <= len(given) < room:
                raise SeergateError(
                    f"a continuation has {len(given)} tokens; it must have 1 to {self.max_length} (max_length)"
                )
        pairs = [((context + given)[-room : -len(given)], given) for _, context, given in requests]
        size = override_bs or (self.batch_size if isinstance(self.batch_size, int) else 1)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            for number, value, greedy in likelihoods(self.model, pairs, size):
                results[number] = value, greedy
                if (texts := requests[number][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, results[number])
        return results


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SeergateError as error:
        sys.exit(f"error: {sentence(error)}")
