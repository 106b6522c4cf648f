r"""lighteval (Hugging Face's harness) on a model that decodes with a method of seergate.

Install the extra in an environment of its own (``pip install "seergate[lighteval]"``). Any task that generates works;
in a checkout::

    python -m seergate.eval.lighteval_adapter --model checkpoints/tiny-reasoner --method h2o:interval=16 --budget 256 \
        --tasks "seergate_chain_sum|0" --custom-tasks docs/examples/lighteval/chain_sum.py

lighteval 0.13 does not start with huggingface_hub 2 (it calls ``list_models(model_name=...)``) and fails with xxhash
4, so the extra requires older versions of both. lighteval imports all of its tasks even if only one is requested, and
one of them downloads ``tinyBenchmarks.pkl`` from GitHub. Without a network it starts only if a file of that name,
which may be empty, is in the directory of its tasks; this also holds for custom tasks.

lighteval caches samples under the *name* of the model, so that a dense and a sparse run of the same base model, or
runs with different gates or weights at the same path, would share them. The name given here therefore contains the
method and a hash of the weights, the gates and all options.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from seergate.errors import SeergateError, how_to_install, sentence
from seergate.eval.harness import attached_model
from seergate.eval.settings import MethodSpec, method_spec
from seergate.fingerprint import fingerprint
from seergate.hf.bank import GateBank


def harness_model(model: Any, path: str, name: str, batch_size: int = 1) -> Any:
    """A lighteval model around a model that seergate is attached to.

    Args:
        model: after `seergate.load` or `seergate.attach`.
        path: directory or Hub id of the base model, from which lighteval reads the tokenizer.
        name: name under which lighteval caches samples; it must differ between methods and between weights. It is a
            path inside the cache's directory, so it must not be absolute.
        batch_size: size of lighteval's static batches.

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
    # The cache is keyed by the configuration: change the name in it, once the tokenizer has been found by the path.
    from lighteval.utils.cache_management import SampleCache

    wrapped.config = config.model_copy(update={"model_name": name})
    wrapped.model_name = wrapped.config.model_name
    wrapped._cache = SampleCache(wrapped.config)
    return wrapped


def name_of(path: str, model: Any, spec: MethodSpec, bank: GateBank | None) -> str:
    """The names of the model and the method, and a hash of the weights, the gates and all options."""
    parts = [fingerprint(model), spec.describe(bank), spec.weights(bank)]
    return f"{Path(path).name}@{spec.label}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]}"


def main(argv: list[str] | None = None) -> None:
    """Evaluate from the command line and print the harness's results as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m seergate.eval.lighteval_adapter", description="lighteval on seergate"
    )
    parser.add_argument("--model", required=True, help="directory or Hub id")
    parser.add_argument("--gates", help="directory or Hub id, for the method gate")
    parser.add_argument("--method", default="dense", help="as `seergate eval` takes it: h2o:interval=16 [%(default)s]")
    parser.add_argument("--budget", type=int, help="tokens per KV head and step")
    parser.add_argument("--block-size", type=int, help="of methods that select blocks")
    parser.add_argument("--batch-size", type=int, default=1, help="[%(default)s]")
    parser.add_argument("--tasks", required=True, help='lighteval tasks, such as "gsm8k|0"')
    parser.add_argument("--custom-tasks", help="a Python file with tasks of your own")
    parser.add_argument("--limit", type=int, help="only so many problems of each task")
    parser.add_argument("--out", default="runs/lighteval", help="directory of the harness's records [%(default)s]")
    options = parser.parse_args(argv)
    from seergate.paths import resolve_model

    spec = method_spec(options.method, options.budget, options.block_size)
    model, _, bank = attached_model(options.model, spec, options.gates)
    path = resolve_model(options.model)
    name = name_of(path, model, spec, bank)
    wrapped = harness_model(model, path, name, options.batch_size)
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
    pipeline.save_and_push_results()  # saves to the directory only: the tracker is not configured to push
    print(json.dumps(pipeline.get_results()["results"], indent=2, default=str))


if __name__ == "__main__":
    try:
        main()
    except SeergateError as error:
        sys.exit(f"error: {sentence(error)}")
