"""What processes of a run know of each other: they wait long enough, and each failure is known to all."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from seergate import SeergateError
from seergate.distill.distributed import CommonError, DistributedState, init_distributed
from tests.support.pairs import pair

SLOW = """
import os, time
from seergate.distill import distributed
from seergate.distill.distributed import init_distributed
world = init_distributed()
distributed.STEP_HOURS = 0.0005  # only now: connecting takes its time
distributed.expect_steps()
with world.fail_together():
    time.sleep(6 if world.is_main else 0)
print("together", flush=True)
world.leave()
os._exit(0)  # how the libraries end a process is not looked at here
"""

SLOW_ZERO = """
import os, time
from datetime import timedelta
import torch.distributed.distributed_c10d as library
library.default_pg_timeout = timedelta(seconds=6)
from seergate.distill import load_train_config
from seergate.distill.distributed import init_distributed
from seergate.distill.engines import make_engine, prepare_deepspeed
from seergate.distill.losses.teacher_forward import distill_step
from seergate.paths import shipped
from tests.support.models import prompt, tiny_model

prepare_deepspeed()
world = init_distributed(alone=True)
options = {"deepspeed": str(shipped("ds_configs/zero2.json")), "packs_per_step": 2, "max_length": 512}
config = load_train_config("tiny-reasoner", options)
model = tiny_model("qwen3")
bank = GateBank.for_model(model, GateConfig(8, 16))
engine = make_engine(bank, config, world)
time.sleep(15 if world.is_main else 0)  # the gradients are summed in a group that DeepSpeed has made
engine.accumulate(distill_step(bank, model, prompt(60), **config.loss_options).loss)
print("norm", engine.update(1e-3) > 0, flush=True)
world.leave()
os._exit(0)
"""

# The library's own default, 30 minutes, is set to two seconds: what counts must be ours.
FATES = """
import json, os, time
from datetime import timedelta
import torch.distributed.distributed_c10d as library
library.default_pg_timeout = timedelta(seconds=2)
from seergate.distill.distributed import init_distributed
from seergate.errors import SeergateError

world = init_distributed()
FAILURES = [
    [None, None], [SeergateError("alike"), SeergateError("alike")], [None, SeergateError("mine alone")],
    [ValueError("this"), SeergateError("that")],
    [FileNotFoundError(2, "No such file or directory", "rows.jsonl"), None], [None, TypeError("a fault of ours")],
]
seen = []
for failures in FAILURES:
    try:
        with world.fail_together():
            time.sleep(6 if world.is_main and not seen else 0)
            if failures[world.rank] is not None:
                raise failures[world.rank]
        seen.append(None)
    except Exception as error:
        seen.append([type(error).__name__, str(error)])
world.must_agree("same", "no")
try:
    world.must_agree(str(world.rank), "they differ")
except ValueError as error:
    seen.append([type(error).__name__, str(error)])
print(json.dumps(seen), flush=True)
world.leave()
os._exit(0)
"""


@pytest.mark.soak
@pytest.mark.timeout(900)  # DeepSpeed may compile first
def test_a_slow_process_is_waited_for_by_deepspeed_too():
    pytest.importorskip("deepspeed")
    done = pair(["-c", SLOW_ZERO], seconds=800)
    assert [one.returncode for one in done] == [0, 0] and all("norm True" in one.stdout for one in done), done


@pytest.mark.soak
def test_a_step_is_not_waited_for_as_long_as_data():
    slow, waiting = pair(["-c", SLOW])
    assert slow.returncode == waiting.returncode == 1 and "together" not in slow.stdout + waiting.stdout
    assert "or has not answered in time" in waiting.stderr.splitlines()[-1]


def test_a_rank_above_the_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SeergateError, match="RANK is 3 and WORLD_SIZE 1"):
        init_distributed()


@pytest.mark.slow
def test_a_failure_of_one_is_known_to_all_and_said_once():
    """A slow process is waited for longer than the library would."""
    done = pair(["-c", FATES])
    assert [one.returncode for one in done] == [0, 0], done
    main, other = (json.loads(one.stdout) for one in done)
    missing = "rows.jsonl cannot be used: no such file or directory"
    messages = [None, "alike", "[rank 1] mine alone", "this; [rank 1] that", missing]
    messages += ["[rank 1] TypeError: a fault of ours", "they differ"]
    assert main == [text and ["CommonError", text] for text in messages]
    assert other.pop(5) == ["TypeError", "a fault of ours"]  # with its traceback
    del main[5]
    assert other == main


def test_a_process_alone_raises_what_it_raised():
    world = DistributedState(0, 1, 0, torch.device("cpu"))
    for error in (SeergateError("mine"), TypeError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, world.fail_together():
            raise error
        assert caught.value is error and not isinstance(error, CommonError)


def test_what_is_said_on_gpus_goes_through_gloo(monkeypatch, tmp_path):
    """NCCL's communicators are made at the first sum of gradients, after processes were forked. Gloo is NCCL here."""
    calls, places = [], []
    for name, value in {"is_available": True, "device_count": 2, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *args, **options: calls.append((args, options)))
        patch.setattr(dist, "all_reduce", lambda x, **_: places.append(x.device.type))
        assert init_distributed().device == torch.device("cuda", 1)
        assert calls[0][0] == ("cpu:gloo,cuda:nccl",) and "device_id" not in calls[0][1]
        world = DistributedState(0, 2, 0, torch.device("meta"))
        world.sum(torch.zeros(1))
    gather = dist.distributed_c10d.all_gather

    def watched(out, x, **options):
        places.append(x.device.type)
        return gather(out, x, **options)

    monkeypatch.setattr(dist.distributed_c10d, "all_gather", watched)
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        world.must_agree("0", "of one process, so they do not")
    finally:
        dist.destroy_process_group()
    assert len(places) > 1 and set(places) == {"cpu"}


# A process that closes its connections while others wait for it may never end, and nobody reads what it has to say.
ONE_FAILS = """
import time
import torch.distributed as dist
from seergate.cli import train
from seergate.distill import training_run
from seergate.errors import SeergateError

dist.destroy_process_group = lambda: time.sleep(600)

def begin(run):
    if run.world.is_main:
        run.world.sum(training_run.torch.zeros(1))
    raise SeergateError("no memory here")

training_run.Run.begin = begin
raise SystemExit(train.main(["--model", "tiny-reasoner", "--output-dir", "unused"]))
"""


@pytest.mark.slow
def test_a_process_that_fails_alone_says_so_and_ends_while_another_waits_for_it(tmp_path: Path) -> None:
    waiting, failed = pair(["-c", ONE_FAILS], places=(tmp_path, tmp_path), seconds=180)
    assert (waiting.returncode, failed.returncode) == (2, 2)
    assert "[rank 1] error: no memory here" in failed.stderr
    assert "error: the connection to the other processes is lost" in waiting.stderr
