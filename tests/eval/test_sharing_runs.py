"""Methods that share blocks, in evaluation: the same answers in any batch, and what was shared is known of each."""

import pytest
import torch

import seergate
from seergate import methods
from seergate.cache.forward import cache_of
from seergate.eval import MethodSpec, RunOptions, Sampling, evaluate, make_task
from seergate.eval.proxies import measure_proxies
from seergate.eval.report import write_report
from seergate.eval.report.tables import NONE
from seergate.eval.store import read_samples
from tests.eval.test_engine import LONG, run, tokens
from tests.support import evaluation as support

WORDS = ["plus", "just", "digit", ",", "and", "then", "comes", ".", "start", "with"]
SAMPLING = Sampling(temperature=1.0)
OPTIONS = {"border": "and", "block_size": 2, "strict": 0.0, "soft": 0.0, "structural_check": False}
OPTIONS |= {"percentile": 100, "warm_up": 0}


def babbling():
    """A random model that emits ten words only, one of which ends a step, and sometimes the end token."""
    model, tokenizer = support.model(support.END), support.tokenizer()
    change = torch.full((len(tokenizer),), -1e4)
    change[tokenizer.convert_tokens_to_ids(WORDS)] = 0
    change[support.END] = -3
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + change)
    return model


def sharing(name="reason_cache", **options):
    given = {**OPTIONS, "tokenizer": support.tokenizer(), **options}
    return MethodSpec(name, options=given).method(None)


def test_an_answer_does_not_depend_on_its_batch():
    """Decisions are made between forward passes, from the tokens of one row; so are their counts."""
    model, watched = babbling(), []

    def watch(module, inputs, kwargs, output):
        if kwargs["input_ids"].shape[1] == 1:
            row = cache_of(kwargs).layers[0].storage.pages.rows[0].table
            watched[-1].append(1 - len(set(row)) / len(row))
        else:
            watched.append([])

    hook = model.register_forward_hook(watch, with_kwargs=True)
    alone = run(model, LONG, batch_size=1, max_new_tokens=90, sampling=SAMPLING, method=sharing())
    hook.remove()
    saved = {key: generation.costs["amsr"] for key, generation in alone.items() if generation.costs}
    expected = [sum(ratios) / len(ratios) for ratios in watched if ratios]
    assert list(saved.values()) == pytest.approx(expected, abs=1e-12)
    assert sum(ratio > 0 for ratio in saved.values()) >= 2
    assert len({generation.n_tokens for generation in alone.values()}) > 2, "rows are replaced at different times"
    assert tokens(run(model, LONG, batch_size=7, max_new_tokens=90, sampling=SAMPLING)) != tokens(alone)
    together = run(model, LONG, batch_size=3, max_new_tokens=90, sampling=SAMPLING, method=sharing())
    assert tokens(together) == tokens(alone)
    for key in saved:
        for name in ("amsr", "own_bytes_mean", "own_bytes_peak"):
            assert together[key].costs[name] == pytest.approx(alone[key].costs[name], rel=1e-12)


def test_a_run_says_what_it_shared(tmp_path, monkeypatch):
    """An interrupted run, too; and the report names a setting that shared nothing."""
    monkeypatch.setattr("seergate.eval.environment.git_revision", lambda: None)  # it may change while this runs
    model, task = babbling(), make_task("chain_sum", problems=3, variables=4)
    model.name_or_path = str(support.save(tmp_path / "model"))
    options = RunOptions(max_new_tokens=90, batch_size=2, sampling=SAMPLING)
    metrics_by_label = {}
    for spec in (MethodSpec("dense"), MethodSpec("reason_cache", options=OPTIONS), MethodSpec("reason_cache")):
        out = tmp_path / "runs" / spec.label
        metrics_by_label[spec.label] = evaluate(model, support.tokenizer(), task, spec, out, options)
    dense, shares, shares_not = metrics_by_label.values()
    assert dense["amsr"] is None and shares["amsr"] > 0 and shares_not["amsr"] == 0
    run_dir = tmp_path / "runs" / list(metrics_by_label)[1]
    before = {sample["problem_id"]: sample["completion"] for sample in read_samples(run_dir)}
    support.edit_samples(run_dir, lambda rows: rows[:1])
    resumed = evaluate(model, support.tokenizer(), task, MethodSpec("reason_cache", options=OPTIONS), run_dir, options)
    assert resumed["amsr"] == pytest.approx(shares["amsr"], abs=1e-9)
    assert {sample["problem_id"]: sample["completion"] for sample in read_samples(run_dir)} == before
    report = write_report(tmp_path / "runs").markdown.read_text()
    header, *table = [line for line in report.partition("memory saved by sharing %")[2].splitlines() if "|" in line]
    last = [line.split("|")[-2].strip() for line in table[1:4]]  # below the rule
    assert header.strip() == "|" and sorted(last) == sorted([NONE, f"{100 * shares['amsr']:.1f}", "0.0"])
    assert report.count("- reason_cache b16 shared no block in any answer") == 1
    assert "| reason_cache b2 " in report and "bNone" not in report


def test_proxies_see_what_was_shared():
    """The context is decoded again, token by token: read at once as a prompt, nothing of it would be shared.

    A window of 32 tokens alone has fewer pairs of blocks than the warm-up takes.
    """
    model, tokenizer = support.model(), support.tokenizer()
    step = [WORDS[i % len(WORDS)] for i in (3, 1, 2, 0, 5, 6, 7, 8, 9)]
    reference = [{"prompt": f"a{i} {i}", "completion": " ".join([*step, WORDS[i], "and"] * 9)} for i in range(1, 4)]
    proxies = {}
    shared = sharing("random_sharing", warm_up=20, max_candidates=1)
    for name, method in (("dense", methods.Dense()), ("random", shared)):
        with seergate.attached(model, method) as handle:
            proxies[name] = measure_proxies(handle, tokenizer, reference)
    assert proxies["dense"]["next_token_kl"] < 1e-6
    assert proxies["random"]["next_token_kl"] > 1e-3
