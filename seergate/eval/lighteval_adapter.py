r"""lighteval (Hugging Face's harness) on a model that decodes with a method of seergate.

Install the extra in an environment of its own (``pip install -e ".[lighteval]"``). Any task of the harness works; in
a checkout::

    python -m seergate.eval.lighteval_adapter --model checkpoints/tiny-reasoner --method h2o:interval=16 --budget 256 \
        --tasks "seergate_chain_sum|0" --custom-tasks docs/examples/lighteval/chain_sum.py

lighteval 0.13 does not start with huggingface_hub 2 (it calls ``list_models(model_name=...)``) and fails with xxhash
4; add ``'huggingface_hub<2' 'xxhash<4'`` to the environment. It downloads a file when it lists its tasks, so it needs
a network even for tasks of your own.

lighteval caches samples under the *name* of the model, so that a dense run and a sparse one of the same base would
share them; here the method is part of the name.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from seergate.errors import SeergateError, how_to_install
from seergate.eval.lm_eval_adapter import add_model_arguments, attached_model, method_spec


def harness_model(model: Any, path: str, label: str, batch_size: int = 1) -> Any:
    """A lighteval model around one that seergate is attached to.

    Args:
        model: after `seergate.load` or `seergate.attach`.
        path: directory or Hub id of the base model, from which lighteval reads the tokenizer.
        label: of the method (`MethodSpec.label`).
        batch_size: of lighteval's static batches.

    Raises:
        SeergateError: if lighteval is not installed.
    """
    try:
        from lighteval.models.transformers.transformers_model import TransformersModel, TransformersModelConfig
    except ImportError as error:
        raise SeergateError(
            f"this needs lighteval; in an environment of its own, {how_to_install('lighteval')}"
        ) from error
    config = TransformersModelConfig(model_name=path, tokenizer=path, batch_size=batch_size, device=str(model.device))
    wrapped = TransformersModel.from_model(model, config)
    # The cache is keyed by the configuration: name the method in it, once the tokenizer has been found by the path.
    from lighteval.utils.cache_management import SampleCache

    wrapped.config = config.model_copy(update={"model_name": f"{path}@{label}"})
    wrapped.model_name = wrapped.config.model_name
    wrapped._cache = SampleCache(wrapped.config)
    return wrapped


def main(argv: list[str] | None = None) -> None:
    """Evaluate from the command line and print the harness's results as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m seergate.eval.lighteval_adapter", description="lighteval on seergate"
    )
    add_model_arguments(parser)
    parser.add_argument("--tasks", required=True, help='lighteval tasks, such as "gsm8k|0"')
    parser.add_argument("--custom-tasks", help="a Python file with tasks of your own")
    parser.add_argument("--limit", type=int, help="only so many problems of each task")
    parser.add_argument("--out", default="runs/lighteval", help="[%(default)s]")
    options = parser.parse_args(argv)
    from seergate.paths import resolve_model

    model, _ = attached_model(options)
    label = method_spec(options).label
    wrapped = harness_model(model, resolve_model(options.model), label, options.batch_size)
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters

    pipeline = Pipeline(
        tasks=options.tasks,
        pipeline_parameters=PipelineParameters(
            launcher_type=ParallelismManager.NONE,
            custom_tasks_directory=options.custom_tasks,
            max_samples=options.limit,
        ),
        evaluation_tracker=EvaluationTracker(output_dir=options.out),
        model=wrapped,
    )
    pipeline.evaluate()
    print(json.dumps(pipeline.get_results()["results"], indent=2, default=str))


if __name__ == "__main__":
    main()
