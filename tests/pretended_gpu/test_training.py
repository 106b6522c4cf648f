"""Training on the pretended GPU gives the losses, gradients and checkpoints of a CPU, and waits where listed."""

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import seergate
from seergate.distill import TrainConfig, run_distillation, trainer, training_run
from seergate.distill.distributed import DistributedState
from seergate.distill.losses.distill_loss import DistillSpec
from seergate.distill.losses.teacher_forward import distill_steps
from tests.distill.conftest import Recorder, model_directory, run_config, weights  # noqa: F401 (fixtures)
from tests.pretended_gpu.device import CUDA, Pretended, pretended, recorded
from tests.support.models import prompt, tiny_model

SCORERS = ("attn_gate", "attn_gate, a query per head", "msa", "indexer", "fast_kvzip", "trim_kv")
_STUDENT, _FORWARD = "seergate/distill/losses/retention_loss.py", "seergate/distill/losses/teacher_forward.py"
WAITS: dict[str, dict[str, str]] = {
    "fast_kvzip": {"seergate/ops/torch_impl/retention_kl.py retention_kl: copy from pageable memory": "counts"},
    "trim_kv": {
        "seergate/ops/torch_impl/retention_kl.py retention_kl: copy from pageable memory": "counts",
        f"{_FORWARD} distill_steps: copy from pageable memory": "the rows of which the model's output is compared",
        f"{_FORWARD} distill_steps: mask as index": "the same",
        f"{_STUDENT} _gated_logits: copy from pageable memory": "the same",
        f"{_STUDENT} compare: copy from pageable memory": "the same",
        f"{_STUDENT} compare: mask as index": "the same",
        f"{_STUDENT} compare: item": "how many there are",
    },
}
"""Where a pack's step waits for the device, and why; block gates never wait."""


@pytest.mark.parametrize("case", SCORERS)
def test_a_scorer_learns_the_same(model: Any, case: str) -> None:
    pooling = "none" if "per head" in case else "proj"
    bank = seergate.GateBank.for_model(
        model, seergate.GateConfig(16, 16, scorer=case.split(",")[0], q_pooling=pooling)
    )
    ends = torch.tensor([0, 120, 200], dtype=torch.int32)
    options: dict[str, Any] = {"recall_budgets": (32, 64)}
    if case == "trim_kv":
        options["target_budget"] = 64
    want = distill_steps([DistillSpec(bank, **options)], model, prompt(200), ends)[0]
    want.loss.backward()
    with pretended() as device:
        there = copy.deepcopy(bank).to(device)
        for parameter in there.parameters():
            parameter.grad = None
        gpu = copy.deepcopy(model).to(device)
        with recorded() as waits:
            got = distill_steps([DistillSpec(there, **options)], gpu, prompt(200), ends)[0]
            got.loss.backward()
        seen = Counter(waits)
    assert isinstance(got.loss, Pretended)
    torch.testing.assert_close(got.loss.host, want.loss)
    torch.testing.assert_close(got.recall.host, want.recall)
    for ours, theirs in zip(there.parameters(), bank.parameters(), strict=True):
        assert isinstance(ours.grad, Pretended) and theirs.grad is not None
        torch.testing.assert_close(ours.grad.host, theirs.grad, atol=1e-6, rtol=1e-4)
    assert {place for place in seen if place.startswith("seergate/")} == set(WAITS.get(case, {}))


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer finds a GPU; weights are loaded to host memory first."""

    def load(path: str, *_: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False).eval().to(CUDA)

    monkeypatch.setattr(trainer, "init_distributed", lambda alone: DistributedState(0, 1, 0, CUDA))
    monkeypatch.setattr(training_run, "load_frozen", load)


def test_a_run_with_checkpoint_and_resume(config: TrainConfig, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    small = {"max_length": 256, "chain_sum_variables": (5, 6), "max_steps": 5}
    config = replace(config, dtype="float32", report_to=("none",), **small)
    want = Recorder()
    run_distillation(replace(config, output_dir=str(tmp_path / "cpu")), [want])
    request.getfixturevalue("on_the_gpu")
    there = replace(config, output_dir=str(tmp_path / "gpu"))
    with pretended(), recorded() as waits:
        first, second, counts = Recorder(stop_after=4), Recorder(), []

        class Counting(Recorder):
            def on_step(self, log: Any) -> None:
                counts.append(Counter(waits))

        with pytest.raises(KeyboardInterrupt):
            run_distillation(there, [Counting(), first])
        run_distillation(there, [second])
    losses = {log.step: log.loss for log in (*first.steps, *second.steps)}
    assert [log.step for log in second.steps] == [4, 5], "from the checkpoint of step 3"
    assert losses == pytest.approx({log.step: log.loss for log in want.steps}, abs=1e-6)
    for name, x in weights(tmp_path / "cpu").items():
        torch.testing.assert_close(weights(tmp_path / "gpu")[name], x, atol=1e-6, rtol=1e-5)
    assert counts[1] - counts[0] == {
        "seergate/distill/averages.py over: tolist": 1,  # the losses, for the log and to leave out what is not finite
        "seergate/distill/engines.py update: item": 1,  # the norm of the gradient
    }


def test_packs_of_sixteen_bits() -> None:
    """The kernel of packed segments, whose log-sum-exp lies the other way round."""
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    bank = seergate.GateBank.for_model(model, seergate.GateConfig(16, 16))
    ends = torch.tensor([0, 120, 200], dtype=torch.int32)
    want = distill_steps([DistillSpec(bank)], model, prompt(200), ends)[0]
    with pretended() as device:
        there, gpu = copy.deepcopy(bank).to(device), copy.deepcopy(model).to(device)
        got = distill_steps([DistillSpec(there)], gpu, prompt(200), ends)[0]
        torch.testing.assert_close(got.kl_per_layer.host, want.kl_per_layer, atol=2e-2, rtol=2e-2)
