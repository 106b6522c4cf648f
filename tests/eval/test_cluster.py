"""Several workers by Ray: each sample is made once, whoever makes it, and whatever is lost meanwhile."""

import json
import random
import sys
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from seergate import GateBank, GateConfig
from seergate.eval import MethodSpec, RunOptions, Sampling, make_task, store, sweep
from seergate.eval.generation.cluster import Cluster
from seergate.eval.run_plan import checked_task
from seergate.eval.sweep_plan import SweepPlan
from tests.support import evaluation as support
from tests.support.killed_run import compared
from tests.support.running import invalid, refused

OPTIONS = RunOptions(samples=2, max_new_tokens=60, batch_size=2, sampling=Sampling(temperature=1.0))
SPECS = [MethodSpec("dense"), *(MethodSpec("gate", 32, size, named_block_size=True) for size in (8, 16))]


def load(directory):
    """With untrained gates for two block sizes, the same at every call."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    torch.manual_seed(0)
    banks = {size: GateBank.for_model(model, GateConfig(block_size=size, gate_dim=16)) for size in (8, 16)}
    return model, AutoTokenizer.from_pretrained(directory), banks


def load_nothing():
    raise OSError("there is no model here")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return str(support.save(tmp_path_factory.mktemp("model")))


def run(out, saved, *, specs=SPECS, options=OPTIONS, loader=None, **given):
    """What a sweep's directories hold that must be the same however it was made."""
    model, tokenizer, banks = load(saved)
    task, given = make_task("chain_sum", problems=8, variables=6), given | {"loader": loader or partial(load, saved)}
    metrics = sweep(model, tokenizer, task, specs, out, options, gates=banks, **given)
    rows = {spec.label: store.read_samples(out / spec.label) for spec in specs}
    assert all(len(samples) == 16 for samples in rows.values())
    lines = {label: sorted(json.dumps(compared(row)) for row in samples) for label, samples in rows.items()}
    return {label: (text, compared(metrics[label])) for label, text in lines.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, saved):
    return run(tmp_path_factory.mktemp("alone"), saved)


def ray_cluster():
    from ray.cluster_utils import Cluster

    return Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})


@pytest.mark.soak
def test_workers_make_what_one_process_makes(tmp_path, saved, alone):
    """Several settings, and gates of several block sizes, which every worker loads. Somebody else's cluster on the
    machine is left alone. `make test-slow` has one setting, in a cluster that the test starts.
    """
    others = ray_cluster()
    try:
        assert run(tmp_path, saved, workers=2) == alone
    finally:
        others.shutdown()
    assert json.dumps(alone["gate-32-b8"]) != json.dumps(alone["gate-32-b16"])


def with_a_node_lost(out, saved, options, after, delay):
    """A run on two nodes, of which one is removed, so many seconds after so many samples were there."""
    cluster = ray_cluster()
    try:
        second, timers = cluster.add_node(num_cpus=1), []

        def remove(now):
            if now.done >= after and not timers:
                assert now.done < 16, "all samples are there"
                timers.append(threading.Timer(delay, cluster.remove_node, (second,), {"allow_graceful": False}))
                timers[0].start()

        options = replace(options, on_progress=remove)
        result = run(out, saved, specs=SPECS[1:2], options=options, workers=2, ray_address=cluster.address)
        timers[0].join()
        assert len(cluster.list_all_nodes()) == 1
        return result
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_the_samples_of_a_lost_node_are_made_by_another(tmp_path, saved):
    options = replace(OPTIONS, max_new_tokens=120)
    whole = run(tmp_path / "whole", saved, specs=SPECS[1:2], options=options)
    assert with_a_node_lost(tmp_path / "lost", saved, options, after=1, delay=0) == whole


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_node_is_lost_at_ten_moments(tmp_path, saved):
    options, moments = replace(OPTIONS, max_new_tokens=400), random.Random(0)
    whole = run(tmp_path / "whole", saved, specs=SPECS[1:2], options=options)
    for number in range(10):
        result = with_a_node_lost(
            tmp_path / str(number), saved, options, moments.randrange(1, 8), moments.uniform(0, 1)
        )
        assert result == whole


@pytest.mark.soak
def test_what_goes_wrong_in_a_worker_is_told(tmp_path, saved):
    refused("there is no model here", run, tmp_path, saved, loader=load_nothing, workers=1)


def test_more_workers_than_gpus_are_refused(monkeypatch):
    """Ray would wait for ever for a place."""
    ray = pytest.importorskip("ray")
    for name, given in {"init": None, "shutdown": None, "cluster_resources": {"CPU": 8, "GPU": 2}}.items():
        monkeypatch.setattr(ray, name, lambda given=given, **_: given)
    refused("workers is 4 and this machine has 2 GPUs", Cluster, load_nothing, 4)


def test_workers_need_a_loader_and_ray(tmp_path, saved, monkeypatch):
    task = make_task("chain_sum", problems=2, variables=6)
    arguments = (support.model(), support.tokenizer(), task, SPECS[:1], tmp_path, OPTIONS)
    refused("need a loader", sweep, *arguments, workers=1)
    invalid("workers is -1", sweep, *arguments, workers=-1)
    monkeypatch.setitem(sys.modules, "ray", None)
    message = r"several workers need Ray; run: pip install .*\[ray\]"
    refused(message, sweep, *arguments, loader=partial(load, saved), workers=1)
    refused(message, checked_task, SweepPlan(workers=1))  # before the model is loaded
