"""The training loop on a tiny random Qwen3: it learns, it resumes exactly, and it refuses what cannot work."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from seergate import GateBank, GateConfig, SeergateError
from seergate.distill import TrainConfig, load_train_config, run_distillation, trainer, training_run
from seergate.distill.averages import Averages
from seergate.distill.callbacks import StepLog
from seergate.distill.engines import deepspeed_config
from seergate.distill.losses import block_loss
from seergate.distill.losses.distill_loss import DistillOutput
from seergate.distill.stopping import Stopped
from seergate.distill.trainer import prepare_run
from seergate.distill.training_run import NON_FINITE_LIMIT, scheduled_rate
from seergate.eval.tasks.chain_sum import make_problems
from seergate.yaml_file import read_yaml
from tests.distill.conftest import Recorder, Signalled, assert_identical, assert_same, trained, watched_steps, weights
from tests.support.models import tiny_model
from tests.support.running import output_of, refused


def test_it_learns_and_leaves_an_adapter_that_loads(config: TrainConfig, model_dir: Path) -> None:
    config = replace(config, max_steps=30, eval_steps=10)
    out, heard = trained(config)
    assert out == Path(config.output_dir or "")
    first, last = heard.steps[0], heard.steps[-1]
    assert last.kl < 0.6 * first.kl and last.recall[32][0] > first.recall[32][0]
    assert heard.evals[-1].kl < heard.evals[0].kl < first.kl
    assert [s.step for s in heard.steps] == list(range(1, 31)) and [e.step for e in heard.evals] == [10, 20, 30]

    bank = GateBank.from_pretrained(out)
    assert (bank.config.block_size, bank.config.gate_dim) == (16, 16)  # as wide as the model's heads
    assert bank.geometry.base_model == str(model_dir) and bank.training_record["config"]["max_steps"] == 30
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    ids = torch.randint(0, 256, (1, 200))
    fresh = GateBank.for_model(base.eval(), bank.config)
    assert bank.distill_loss(base, input_ids=ids) < fresh.distill_loss(base, input_ids=ids)  # on text it never saw

    best = min(heard.evals, key=lambda log: log.kl)
    assert GateBank.from_pretrained(out / "best").training_record["kl_held_out"] == best.kl
    assert bank.training_record["kl_held_out"] == heard.evals[-1].kl
    assert bank.training_record["recall_held_out"] == {str(b): x for b, x in heard.evals[-1].mean_recall().items()}
    assert bank.training_record["kl_held_out_best"] == best.kl
    assert TrainConfig.from_dict(read_yaml(out / "train_config.yaml")) == config
    assert json.loads((out / "data.json").read_text())["samples"] == 80
    assert not [p.name for p in out.rglob("*") if "draft" in p.name or "saving" in p.name]


@pytest.mark.parametrize(("stop_after", "options"), [(1, {}), (4, {"row_stride": 5, "sink_blocks": 1})])
def test_an_interrupted_run_ends_bit_identical(config, tmp_path, stop_after, options):
    config = replace(config, **options)
    whole = run_distillation(replace(config, output_dir=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        run_distillation(config, [Recorder(stop_after)])
    resumed, heard = trained(config)
    assert heard.steps[0].step == (stop_after - 1) // 3 * 3 + 1  # stopped just before that step could be saved
    assert_same(resumed, whole)


def test_each_pack_has_other_rows(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on where the last pack stopped; held-out packs have the same rows at each evaluation."""
    seen = watched_steps(monkeypatch)
    run_distillation(replace(config, row_stride=5, max_steps=4, eval_steps=2))
    learned, looked = ([(s.row_stride, s.row_shift) for on, (s,) in seen if on == grad] for grad in (True, False))
    assert learned == [(5, shift) for shift in range(8)]
    assert looked == [(5, 0), (5, 1)] * 2


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run(config, tmp_path, number):
    before = signal.getsignal(number)
    whole = run_distillation(replace(config, output_dir=str(tmp_path / "whole")))
    with pytest.raises(Stopped, match=f"stopped by {number.name} after step 4 of 8, which is saved") as caught:
        run_distillation(config, [Signalled(3, number)])
    assert caught.value.signal == number and signal.getsignal(number) == before
    assert not (config.run_dir / "gate_model.safetensors").exists()
    resumed, heard = trained(config)
    assert_identical(weights(resumed), weights(whole))
    assert heard.steps[0].step == 5


@pytest.mark.parametrize(("at", "evaluated"), [(3, [2]), (4, [2, 4])])
def test_a_signal_ends_the_run_at_the_next_update_or_evaluation(config, tmp_path, at, evaluated):
    """It comes before the fourth step, whose evaluation is left out and made up for, or after that step's update."""
    config = replace(config, eval_steps=2, save_steps=0)
    whole = run_distillation(replace(config, output_dir=str(tmp_path / "whole")))
    first = Signalled(at, signal.SIGTERM)
    with pytest.raises(Stopped, match="after step 4 of 8, which is saved"):
        run_distillation(config, [first])
    resumed, heard = trained(config)
    assert [log.step for log in first.evals] == evaluated
    assert [log.step for log in first.evals + heard.evals] == [2, 4, 6, 8]
    assert_identical(weights(resumed), weights(whole))


def test_a_signal_before_a_made_up_evaluation_is_followed_by_no_step(config, monkeypatch):
    config = replace(config, eval_steps=2, save_steps=0)
    with pytest.raises(Stopped, match="after step 4 of 8"):
        run_distillation(config, [Signalled(3, signal.SIGTERM)])
    evaluate, heard = trainer._evaluate, Recorder()
    monkeypatch.setattr(trainer, "_evaluate", lambda runs: signal.raise_signal(signal.SIGTERM) or evaluate(runs))
    with pytest.raises(Stopped, match="after step 4 of 8"):
        run_distillation(config, [heard])
    assert heard.steps == [] and [log.step for log in heard.evals] == [4]


def test_a_second_interrupt_ends_at_once(config):
    heard = Signalled(2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_distillation(config, [heard])
    assert len(heard.steps) == 2 and not (config.run_dir / "gate_model.safetensors").exists()


def test_a_directory_has_one_run_at_a_time(config: TrainConfig) -> None:
    class Other(Recorder):
        def on_step(self, log: StepLog) -> None:
            super().on_step(log)
            if log.step == 1:
                (offloaded := config.run_dir / "offload-0").mkdir()
                for begin in (run_distillation, prepare_run):
                    refused(f"another process is writing to {config.run_dir}; use", begin, config)
                assert offloaded.exists(), "what the first run has written stays"

    prepare_run(config)
    heard = Other()
    out = run_distillation(config, [heard])
    assert [log.step for log in heard.steps] == list(range(1, config.max_steps + 1)), "it is not disturbed"
    permissions = {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    os.umask(umask := os.umask(0))
    assert permissions == {0o666 & ~umask}


@pytest.mark.parametrize(("event", "number"), [("step", signal.SIGTERM), ("eval", signal.SIGINT)])
def test_a_signal_at_the_last_step_ends_the_command_as_well(config, event, number):
    """Also during the evaluation after it. The checkpoint is whole, and the same run then writes the gates."""
    with pytest.raises(Stopped, match=f"stopped by {number.name} after (step 8 of 8|the last step), which is saved"):
        run_distillation(config, [Signalled(8, number, event=event)])
    assert not (config.run_dir / "gate_model.safetensors").exists()
    out, heard = trained(config)
    assert heard.steps == [] and "continuing after step 8 of 8" in heard.messages
    kept = load_file(out / "checkpoints/step-00000008/state.safetensors")
    assert_identical(weights(out), {name: kept[f"gates.{name}"] for name in weights(out)})


def poisoned(monkeypatch: pytest.MonkeyPatch, packs: set[int] | None = None) -> None:
    """Make the loss of those packs not finite, counted from the first that is trained on, or of all held-out ones."""
    real, seen = block_loss.ops.gate_kl, [0]

    def gate_kl(*args: Any, **options: Any) -> Any:
        loss, stats = real(*args, **options)
        seen[0] += 1
        spoilt = not torch.is_grad_enabled() if packs is None else (seen[0] + 1) // 2 in packs  # of two layers
        return (loss * float("nan") if spoilt else loss), stats

    monkeypatch.setattr(block_loss.ops, "gate_kl", gate_kl)


def test_a_pack_that_is_not_finite_is_left_out_and_counted(config, monkeypatch):
    poisoned(monkeypatch, {2, 5, 6})  # one pack of the first step, both of the third
    config = replace(config, eval_packs=0, max_steps=4, save_steps=1, save_total_limit=4)
    out, heard = trained(config)
    poisoned(monkeypatch, set(range(1000)))
    many = replace(config, max_steps=100, packs_per_step=8, output_dir=f"{config.output_dir}-many")
    refused(f"more than {NON_FINITE_LIMIT} is too many", run_distillation, many)
    poisoned(monkeypatch, {3, 4})
    ended = replace(config, max_steps=2, packs_per_step=2, output_dir=f"{config.output_dir}-last")
    _, late = trained(ended)
    assert "no pack of the last step gave a finite loss" in late.messages[-1]
    assert [math.isfinite(log.loss) for log in heard.steps] == [True, True, False, True]
    assert all(math.isfinite(log.grad_norm) for log in heard.steps)
    messages = [text for text in heard.messages if "no finite loss" in text]
    assert [text.split(" packs")[0] for text in messages] == ["step 1: 1 of 2", "step 3: 2 of 2"]
    assert "(3 in this run)" in messages[1]
    assert [log.learning_rate > 0 for log in heard.steps] == [True, True, False, True]
    gates = [
        {name: x for name, x in load_file(path / "state.safetensors").items() if name.startswith("gates.")}
        for path in sorted((out / "checkpoints").iterdir())
    ]
    assert_identical(gates[1], gates[2])  # nothing was learned in the third step
    assert any(not torch.equal(gates[0][name], gates[1][name]) for name in gates[0])


def test_held_out_packs_that_are_not_finite_are_counted_and_never_the_best(config, monkeypatch):
    poisoned(monkeypatch)
    out, heard = trained(config, max_steps=2, eval_steps=1)
    assert [math.isnan(log.kl) for log in heard.evals] == [True, True]
    count = json.loads((out / "data.json").read_text(encoding="utf-8"))["held_out"]
    message = f"{count} of {count} held-out packs gave no finite loss and were left out"
    assert [f"step {step}: {message}" in heard.messages for step in (1, 2)] == [True, True]
    training = json.loads((out / "gate_config.json").read_text(encoding="utf-8"))["training"]
    assert training["kl_held_out"] is training["kl_held_out_best"] is training["recall_held_out"] is None
    assert math.isfinite(training["kl_last_step"])
    assert not (out / "best").exists()


def test_the_best_is_the_lowest_of_the_rows_that_are_evaluated_now(config):
    """Another part of the rows has another KL, which cannot be compared."""
    options = {"eval_steps": 1, "learning_rate": 0.3, "min_lr": 0.3, "warmup_steps": 0}  # KL falls, then rises
    config = replace(config, max_steps=6, **options)
    out, all_rows = trained(config)
    kls = [log.kl for log in all_rows.evals]
    assert min(kls) < kls[-1]
    assert GateBank.from_pretrained(out / "best").training_record["kl_held_out"] == min(kls)
    best = (out / "best" / "gate_model.safetensors").read_bytes()
    trained(config, eval_row_start=0.9)  # it has ended, and evaluates the last gates only
    assert (out / "best" / "gate_model.safetensors").read_bytes() == best
    assert GateBank.from_pretrained(out).training_record["kl_held_out_row_start"] == 0.9
    config = replace(config, output_dir=str(out.parent / "other"))
    with pytest.raises(Stopped):
        run_distillation(config, [Signalled(4, signal.SIGTERM)])
    out, later = trained(config, eval_row_start=0.9)
    record = GateBank.from_pretrained(out / "best").training_record
    assert record["kl_held_out"] == record["kl_held_out_best"] == min(log.kl for log in later.evals)


def test_a_checkpoint_of_another_run_is_refused_before_long_work(config, model_dir, tmp_path, monkeypatch):
    """Other options, data or weights; nothing is lost by a run that cannot start over."""
    rows, copy, gpt2 = tmp_path / "rows.jsonl", tmp_path / "model", tmp_path / "gpt2"
    texts = [json.dumps({"text": f"some text to learn from {'and more ' * 30}{i}"}) + "\n" for i in range(30)]
    rows.write_text("".join(texts))
    shutil.copytree(model_dir, copy)
    config = replace(config, model=str(copy), data=str(rows), max_steps=2, eval_packs=0)
    run_distillation(config)
    (tmp_path / "short.jsonl").write_text('{"text": "short"}\n')
    (tmp_path / "file").write_text("")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=64)).save_pretrained(gpt2)
    short, nowhere = str(tmp_path / "short.jsonl"), "/does/not/exist.jsonl"
    for options, why in (
        ({"learning_rate": 2e-2}, r"learning_rate=0\.01 and this run has 0\.02.*--no-resume"),
        ({"data_limit": 10}, "data_limit=80"),
        ({"data": short, "resume": False}, "short.jsonl"),
        ({"output_dir": str(tmp_path / "file")}, "output_dir"),
        ({"model": str(gpt2), "data": nowhere}, "gpt2"),
        ({"model": str(tmp_path)}, "could not be loaded"),
        ({"deepspeed": "nope.json", "model": "no/such-model", "data": nowhere}, r"deepspeed is 'nope\.json'; it must"),
    ):
        refused(why, run_distillation, replace(config, **options))
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "load_frozen", lambda *_: (_ for _ in ()).throw(SeergateError("no memory")))
        refused("no memory", run_distillation, replace(config, resume=False))
        with pytest.raises(SeergateError, match="short.jsonl"):
            both = {"first": config, "other": replace(config, data=short, output_dir=str(tmp_path / "other"))}
            trainer.run_together({name: (run, []) for name, run in both.items()})
    assert (config.run_dir / "checkpoints/step-00000002").exists(), "nothing is lost"
    rows.write_text("".join(texts[:-1]))
    (copy / "gate_model.safetensors").touch()  # gates beside the model do not change it
    refused("data_fingerprint", run_distillation, config)
    rows.write_text("".join(texts))
    given = (copy / "config.json").read_text()
    (copy / "config.json").write_text(given.replace('"rope_theta": ', '"rope_theta": 1'))
    refused("model_rope=.* and this run has", run_distillation, config)
    (copy / "config.json").write_text(given)
    model = AutoModelForCausalLM.from_pretrained(copy)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    model.save_pretrained(copy)
    refused("model_fingerprint", run_distillation, config)
    (config.run_dir / "best").mkdir()
    _, heard = trained(config, max_steps=1, resume=False)
    assert [s.step for s in heard.steps] == [1] and not (config.run_dir / "best").exists(), "it was the old run's"
    assert [p.name for p in (config.run_dir / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_run_killed_while_it_tokenises_keeps_to_its_commit(config, pushes, monkeypatch):
    def killed(config: TrainConfig, *_: Any, **__: Any) -> None:
        pushes.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(training_run, "token_files", killed)
    main, others = {"data_revision": "main"}, {"data": "org/others"}  # what is asked for later is another thing
    for options in ({}, {}, main, main, {}, others, others | {"resume": False}, others):
        with pytest.raises(KeyboardInterrupt):
            run_distillation(replace(config, **({"data": "org/rows"} | options)))
    assert [seen.data_revision for seen in pushes] == [digit * 40 for digit in "aabbbcdd"]


def test_a_mixture_is_resumed_exactly(config: TrainConfig, tmp_path: Path) -> None:
    rows = [{"messages": problem.messages} for problem in make_problems(40, (5, 12), 7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(config, data=f"chain_sum:0.7,{tmp_path / 'rows.jsonl'}:0.3", max_steps=6, eval_packs=0)
    whole = run_distillation(replace(config, output_dir=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        run_distillation(config, [Recorder(4)])
    resumed, heard = trained(config)
    assert_identical(weights(resumed), weights(whole))
    assert [log.step for log in heard.steps] == [4, 5, 6]
    refused("was made with data=", run_distillation, replace(config, data=config.data.replace("0.3", "0.9")))


def test_what_is_prepared_is_not_read_again(config: TrainConfig, tmp_path: Path, monkeypatch: Any) -> None:
    cache = ["--token-cache", str(tmp_path / "tokens"), "--output-dir", str(tmp_path / "prepared")]
    config.save(file := tmp_path / "run.yaml")
    assert "samples of 80 rows" in output_of("prepare", "--model", config.model, "--config", str(file), *cache)
    monkeypatch.setattr("seergate.distill.data.tokenise", None)  # nothing is left to do for it
    out = run_distillation(replace(config, token_cache=cache[1], max_steps=1))
    assert json.loads((out / "data.json").read_text()) == json.loads((Path(cache[3]) / "data.json").read_text())
    (Path(cache[3]) / "commits.json").read_text()


@pytest.mark.parametrize(("limit", "packs", "said", "evals"), [(9, 2, 1, 0), (9, 0, 0, 0), (80, 2, 0, 1)])
def test_too_few_packs_to_hold_any_out_are_said_to_have_no_evaluation(config, limit, packs, said, evals):
    out, heard = trained(config, data_limit=limit, eval_packs=packs, max_steps=2)
    assert len(heard.evals) == evals and (out / "best").is_dir() == bool(evals)
    assert sum(text.startswith("no evaluations and no best/: ") for text in heard.messages) == said


def test_preparing_leaves_a_run_that_has_begun_as_it_is(config: TrainConfig) -> None:
    run = run_distillation(replace(config, max_steps=1))
    before = {path: path.read_text() for path in run.glob("*.[jy][sa]*")}
    assert {path.name for path in before} >= {"train_config.yaml", "data.json", "commits.json"}
    prepare_run(replace(config, max_steps=1, save_steps=1))
    prepare_run(replace(config, max_steps=1, gradient_accumulation_steps=2))
    refused("was made with data_limit=", prepare_run, replace(config, max_steps=1, learning_rate=2e-2, data_limit=70))
    assert {path: path.read_text() for path in before} == before


def test_a_run_that_is_refused_for_its_data_writes_nothing(config: TrainConfig, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{i} is one more than {i - 1}. " * 60}) + "\n" for i in range(9)))
    config = replace(config, data=str(rows), data_limit=None, max_steps=1, eval_packs=0)
    run = run_distillation(config)
    before = {path: path.read_bytes() for path in run.rglob("*.[jys]*")}
    rows.write_text(rows.read_text().replace("1 is one more", "one is one more"))
    refused("was made with data_fingerprint=", run_distillation, config)
    assert {path: path.read_bytes() for path in before} == before


def test_schedule() -> None:
    config = load_train_config("qwen3-8b")
    rates = [scheduled_rate(config, step) for step in range(800)]
    assert rates[0] == pytest.approx(5e-5) and rates[19] == rates[20] == 1e-3
    assert rates[799] == pytest.approx(1e-5) and rates == sorted(rates[:20]) + sorted(rates[20:], reverse=True)
    assert rates[410] == pytest.approx((1e-3 + 1e-5) / 2, rel=0.01)  # half-way
    for steps in (1, 5, 20, 21, 22):
        assert all(math.isfinite(scheduled_rate(replace(config, max_steps=steps), step)) for step in range(steps))


def test_the_recommended_rate_is_for_heads_of_64_channels() -> None:
    """Wider heads need a lower one: on Gemma 3, with 256 channels, 3e-3 left half more KL than 1e-3."""
    config = load_train_config("qwen3-8b", {"recipe": "recommended"})
    for head_dim, scale in ((32, 1.0), (64, 1.0), (128, 0.5), (256, 0.25)):
        scaled = config.for_heads(head_dim)
        assert (scaled.learning_rate, scaled.min_lr) == (scale * 3e-3, scale * 1e-4)
        assert scaled.for_heads(head_dim) == scaled
        assert replace(scaled, learning_rate=3e-3, min_lr=1e-4) == replace(config, lr_head_dim=None)


def test_a_run_records_the_rate_that_it_used(config: TrainConfig) -> None:
    scaled = {"max_steps": 2, "warmup_steps": 1, "lr_head_dim": 4}  # its heads have 16 channels
    _, heard = trained(config, **scaled)
    assert heard.steps[0].learning_rate == config.learning_rate / 4
    record = json.loads((config.run_dir / "gate_config.json").read_text())["training"]["config"]
    assert record["learning_rate"] == config.learning_rate / 4 and record["lr_head_dim"] is None
    trained(config, **scaled)  # nothing to do, not refused


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3"),
        ({}, "ZeRO stage 0"),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, "switches bf16 on"),
        ({"zero_optimization": {"stage": 2}, "bfloat16": {"enabled": True}}, "switches bfloat16 on"),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD"}}, "sets the optimizer"),
        ({"zero_optimization": {"stage": 2}, "gradient_clipping": 5.0}, "sets gradient_clipping to 5.0"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, "sets reduce_bucket_size to 'big'"),
        ({"zero_optimization": 2}, "sets zero_optimization to 2; it must be a JSON object"),
        ("not json", "must be a JSON file"),
    ],
)
def test_deepspeed_files_that_contradict_the_run_are_refused(config, tmp_path, contents, why):
    file = tmp_path / "ds.json"
    file.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    refused(why, deepspeed_config, replace(config, deepspeed=str(file)), 2)


@pytest.mark.parametrize("name", ["zero2", "zero2-offload"])
def test_the_shipped_deepspeed_files_fit_every_world(config: TrainConfig, name: str) -> None:
    file = Path(__file__).parents[2] / "ds_configs" / f"{name}.json"
    values = deepspeed_config(replace(config, deepspeed=str(file), packs_per_step=16), 8)
    assert values["gradient_accumulation_steps"] == 2 and values["train_batch_size"] == 16
    assert values["gradient_clipping"] == 1.0


def test_averages_are_over_rows_and_not_over_packs():
    """A pack of which no row counts is no pack with a KL of zero."""
    bank = GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16))
    world = SimpleNamespace(device=torch.device("cpu"), sum=lambda sums: sums)

    def pack(loss, kl, recall, rows):
        kl, recall = torch.tensor([kl, 2 * kl]), torch.full((1, 2, 2), recall)
        return DistillOutput(torch.tensor(loss), kl, recall, 100, torch.tensor(rows))

    packs = [pack(1.0, 3.0, 0.5, 10), pack(2.0, 1.0, 0.1, 30), pack(0.0, 0.0, 0.0, 0), pack(math.nan, 9.0, 0.9, 10)]
    means = Averages.over(bank, (16,), world, packs, 4)
    assert means.kl_per_layer == pytest.approx([1.5, 3.0]) and means.recall[16][0] == pytest.approx([0.2, 0.2])
    assert (means.loss, means.tokens, means.non_finite) == (1.0, 300, 1)
    assert math.isnan(Averages.over(bank, (16,), world, packs[2:3], 1).kl_per_layer[0])
