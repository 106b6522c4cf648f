r"""lm-eval (EleutherAI's harness) with ``seergate`` among its models, which decodes with a method of seergate.

Install the extra in an environment of its own (``pip install "seergate[lm-eval]"``). Releases of lm-eval that know
plugins find the model by themselves; for others, this module is the command ``lm-eval`` with the model added. Any task
of the harness works; in a checkout::

    python -m seergate.eval.lm_eval_adapter run --model seergate --apply_chat_template \
        --model_args pretrained=checkpoints/tiny-reasoner,method=h2o:interval=16,budget=256 \
        --tasks seergate_chain_sum --include_path docs/examples/lm_eval

lm-eval's AIME tasks are greedy, score one sample and ask for no box; for the paper's protocol use ``seergate eval``.
Only decode steps are sparse: tasks that score given continuations (multiple choice) read them densely, and say nothing
about a method.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from seergate.errors import SeergateError, sentence
from seergate.eval.harness import attached_model, method_spec


@register_model("seergate")
class SeergateLM(HFLM):
    """A transformers model of lm-eval, with a method attached.

    Args:
        pretrained: directory or Hub id of the base model.
        gates: directory or Hub id, for methods that have some.
        method: as `seergate eval` takes it; by default ``gate`` where there are gates, else ``dense``.
        budget: tokens per KV head and step.
        block_size: of methods that select blocks.
        device, dtype: of the base model; the harness asks for a GPU wherever it runs, so without one it is the CPU.
        **options: of ``HFLM``.
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
        **options: Any,
    ) -> None:
        spec = method_spec(method or ("gate" if gates else "dense"), budget, block_size)
        if not torch.cuda.is_available():
            device = None
        model, tokenizer, _ = attached_model(pretrained, spec, gates, device=device, dtype=dtype)
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SeergateError as error:
        sys.exit(f"error: {sentence(error)}")
