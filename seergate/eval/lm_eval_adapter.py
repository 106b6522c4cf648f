r"""lm-eval (EleutherAI's harness) on a model that decodes with a method of seergate.

Install the extra in an environment of its own (``pip install "seergate[lm-eval]"``). Any task of the harness works; in
a checkout::

    python -m seergate.eval.lm_eval_adapter --model checkpoints/tiny-reasoner --method h2o:interval=16 --budget 256 \
        --tasks seergate_chain_sum --include-path docs/examples/lm_eval

lm-eval's AIME tasks are greedy, score one sample and ask for no box; for the paper's protocol use ``seergate eval``.
Only decode steps are sparse: tasks that score given continuations (multiple choice) read them densely, and say nothing
about a method.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from seergate.errors import SeergateError, how_to_install
from seergate.eval.method_text import read_method
from seergate.eval.settings import MethodSpec
from seergate.hf.attach import attach
from seergate.hf.bank import GateBank


def harness_model(model: Any, tokenizer: Any, batch_size: int = 1, **options: Any) -> Any:
    """An lm-eval model around one that seergate is attached to.

    Args:
        model: after `seergate.load` or `seergate.attach`.
        tokenizer: the model's.
        batch_size: of lm-eval's static batches.
        **options: of ``lm_eval.models.huggingface.HFLM``.

    Raises:
        SeergateError: if lm-eval is not installed.
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise SeergateError(
            f"this needs lm-eval; in an environment of its own, {how_to_install('lm-eval')}"
        ) from error
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **options)


def main(argv: list[str] | None = None) -> None:
    """Evaluate from the command line and print the harness's results as JSON."""
    parser = argparse.ArgumentParser(prog="python -m seergate.eval.lm_eval_adapter", description="lm-eval on seergate")
    add_model_arguments(parser)
    parser.add_argument("--tasks", required=True, help="names of lm-eval tasks, separated by commas")
    parser.add_argument("--include-path", help="directory with task files of your own")
    parser.add_argument("--limit", type=int, help="only so many problems of each task")
    options = parser.parse_args(argv)
    model, tokenizer, _ = attached_model(options)
    wrapped = harness_model(model, tokenizer, options.batch_size)
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        wrapped,
        tasks=options.tasks.split(","),
        task_manager=TaskManager(include_path=options.include_path),
        limit=options.limit,
        apply_chat_template=bool(tokenizer.chat_template),
    )
    print(json.dumps(results["results"], indent=2))


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What a model and its method are chosen with."""
    parser.add_argument("--model", required=True, help="directory or Hub id")
    parser.add_argument("--gates", help="adapter, for the method gate")
    parser.add_argument("--method", default="dense", help="as `seergate eval` takes it: h2o:interval=16 [%(default)s]")
    parser.add_argument("--budget", type=int, help="tokens per KV head and step")
    parser.add_argument("--block-size", type=int, help="of methods that select blocks")
    parser.add_argument("--batch-size", type=int, default=1, help="[%(default)s]")


def method_spec(options: argparse.Namespace) -> MethodSpec:
    """The method that was asked for, its options included.

    Raises:
        SeergateError: for an unknown method or option, a missing budget, or an option that is to be calibrated.
    """
    name, given = read_method(options.method)
    budget = given.pop("token_budget", options.budget)
    spec = MethodSpec(name, budget, options.block_size, options=given)
    if spec.uncalibrated:
        raise SeergateError(
            f"{name}:{spec.uncalibrated[0]}=auto is calibrated by `seergate eval` only; give a value here"
        )
    return spec


def attached_model(options: argparse.Namespace) -> tuple[Any, Any, GateBank | None]:
    """The model with its method attached, its tokenizer, and the gates that were given."""
    from transformers import AutoTokenizer

    from seergate.hf.loading import load_base
    from seergate.paths import resolve_model

    spec = method_spec(options)
    bank = None if options.gates is None else GateBank.from_pretrained(options.gates)
    method = spec.method(bank)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(options.model))
    model = load_base(options.model)
    attach(model, method, correction=spec.correction)
    return model, tokenizer, bank


if __name__ == "__main__":
    main()
