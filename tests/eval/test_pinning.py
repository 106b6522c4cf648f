"""A run resumes only with an identical configuration."""

from dataclasses import replace

import pytest

from seergate.eval import MethodSpec, RunOptions, Sampling, environment, make_task, store
from seergate.eval.run_plan import run_plan
from seergate.eval.sweep_plan import SweepPlan
from tests.eval.test_runner import small
from tests.support import evaluation as support
from tests.support.evaluation import edit_samples
from tests.support.running import invalid, refused


def test_samples_without_their_settings_are_refused(tmp_path):
    small(tmp_path)
    (tmp_path / "config.yaml").unlink()
    before = (tmp_path / "samples.jsonl").read_bytes()
    refused(r"samples\.jsonl is there without config\.yaml, so the settings", small, tmp_path, seed=1)
    assert (tmp_path / "samples.jsonl").read_bytes() == before and not (tmp_path / "config.yaml").exists()


def test_settings_of_a_run_without_samples_are_replaced(tmp_path):
    """A run may fail before its first sample, for lack of memory or because of an option."""
    small(tmp_path)
    edit_samples(tmp_path, lambda rows: [])
    assert small(tmp_path, seed=1) == small(tmp_path, seed=1)
    refused("generation.seed was 1 and is 0", small, tmp_path)


def test_a_run_on_a_gpu_may_continue_on_another_host(tmp_path):
    small(tmp_path)
    settings = store.read_config(tmp_path)
    hardware = {"cpu": "one", "cores": 8, "gpu": "H200"}
    settings["environment"] |= {"device": "cuda", "hardware": hardware}
    store.write_yaml(tmp_path / "config.yaml", settings)
    settings["environment"] |= {"hardware": hardware | {"cpu": "another", "cores": 16}}
    store.pin(tmp_path, settings, finished=False)
    settings["environment"] |= {"hardware": hardware | {"gpu": "H100"}}
    refused("environment.hardware.gpu was 'H200' and is 'H100'", store.pin, tmp_path, settings, finished=False)


def with_yarn(model):
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "yarn", "factor": 4.0}
    return model


def with_another_weight(model):
    model.lm_head.weight.data[3, 3] += 1
    return model


def with_other_template(tokenizer):
    tokenizer.chat_template = support.TEMPLATE.replace("<s> assistant {%", "<s> user {%")
    return tokenizer


def test_other_settings_are_refused(tmp_path):
    """Those of an option, and those of a model and a tokenizer that no weight or problem shows."""
    small(tmp_path)
    refused("generation.seed was 0 and is 1", small, tmp_path, seed=1)
    edit_samples(tmp_path, lambda rows: rows[:2])  # and of an unfinished run
    for change, field in (
        ({"max_new_tokens": 35}, "generation.max_new_tokens was 36 and is 35"),
        ({"seed": 1}, "generation.seed was 0 and is 1"),
        ({"samples": 2, "sampling": Sampling(temperature=0.6)}, "generation.samples"),
        ({"sampling": Sampling(temperature=0.6)}, "generation.temperature"),
        ({"spec": MethodSpec("oracle", 64, 16)}, "method.name was 'dense' and is 'oracle'"),
        ({"model": with_yarn(support.model())}, "model.rope.rope_type was 'default' and is 'yarn'"),
        ({"tokenizer": with_other_template(support.tokenizer())}, r"task\.prompts was '\w+' and is '\w+'"),
        ({"model": support.model(eos=7)}, r"generation\.ends was \[2\] and is \[2, 7\]"),
        ({"model": with_another_weight(support.model())}, r"model\.fingerprint"),
    ):
        refused(f"holds a run with other settings: {field}", small, tmp_path, **change)


def test_the_version_that_mathematics_was_graded_with_may_not_change(tmp_path, monkeypatch):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "boxed a1 1 a2 2", "answer": "3"}\n{"prompt": "boxed a1 1 a2 3", "answer": "4"}\n')

    def run(grader):
        small(tmp_path / grader, task=make_task(str(path), grader=grader), max_new_tokens=4)

    for grader in ("math", "exact"):
        run(grader)
        edit_samples(tmp_path / grader, lambda rows: rows[:1])
    installed = environment.version_of
    monkeypatch.setattr(environment, "version_of", lambda name: "0" if name == "math-verify" else installed(name))
    refused(r"other settings: environment\.math-verify was '[\d.]+' and is '0'; use", run, "math")
    run("exact")  # compares by itself


def test_batch_size_may_differ_on_resume_but_versions_may_not(tmp_path):
    small(tmp_path)
    edit_samples(tmp_path, lambda rows: rows[:2])
    assert small(tmp_path, batch_size=4)["n_samples"] == 4
    edit_samples(tmp_path, lambda rows: rows[:2])
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("transformers: ", "transformers: 0."))
    refused(r"environment\.transformers", small, tmp_path)


def test_several_greedy_samples_are_refused(tmp_path):
    """They would be the same answer, at as many times the cost; also where the model's configuration is greedy."""
    path, out = tmp_path / "mine.jsonl", tmp_path / "out"
    path.write_text('{"prompt": "a1 1 a2 2", "answer": "3"}\n')
    task = make_task(str(path), grader="exact")
    RunOptions(samples=2).check(task)
    for options in ({}, {"task": task, "max_new_tokens": 4}):
        invalid("samples is 2; with greedy decoding", small, out, samples=2, **options)
        assert not out.exists()
    model, methods = str(support.save(tmp_path / "model")), ["dense", "lazy_eviction:window=auto"]
    asked = {"task": str(path), "task_options": {"grader": "exact"}, "samples": 2, "max_new_tokens": 4}
    with pytest.raises(ValueError, match="samples is 2; with greedy decoding"):
        run_plan(SweepPlan(model=model, method=methods, budget=[4096], out=str(out), **asked))
    assert not (out / "calibration").exists(), "nothing was measured before"
    plan = SweepPlan(model=model, method=methods, budget=[4096], out=str(out), **asked | {"samples": 1})
    (measured,) = (run_plan(plan) / "calibration").iterdir()
    before = measured.read_bytes()
    refused("max_new_tokens was 4 and is 5", run_plan, replace(plan, max_new_tokens=5))
    assert measured.read_bytes() == before
