"""One optimizer step, worked out by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from seergate import GateBank, GateConfig
from seergate.distill.distributed import DistributedState
from seergate.distill.engines import BETAS, PlainEngine, bucket_bytes, check_zero, deepspeed_config
from seergate.distill.losses.teacher_forward import distill_step
from seergate.distill.packing import packed
from seergate.paths import shipped
from tests.distill.conftest import assert_identical
from tests.support.models import prompt
from tests.support.running import refused


@pytest.mark.parametrize("clip", [1e-3, 1e3, 0.0])
def test_gradients_are_clipped_by_their_global_norm(model, data_config, clip):
    """The first step's moments are (1 - beta1) times the clipped gradient, and (1 - beta2) times its square."""
    bank = GateBank.for_model(model, GateConfig(8, 16))
    ids = prompt(60)
    data_config = replace(data_config, max_grad_norm=clip, packs_per_step=1)
    rows = {"row_start": data_config.row_start, "reduction": data_config.reduction}
    bank.distill_loss(model, input_ids=ids, **rows).backward()
    gradients = {name: parameter.grad.double() for name, parameter in bank.named_parameters()}
    norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    assert 1e-3 < norm < 1e3
    bank.zero_grad()
    engine = PlainEngine(bank, data_config, DistributedState(0, 1, 0, torch.device("cpu")))
    engine.accumulate(distill_step(bank, model, ids, **data_config.loss_options).loss)
    assert engine.update(1e-4) == pytest.approx(norm, rel=1e-4)
    scale = clip / norm if clip == 1e-3 else 1.0
    state = engine.state()
    for name, gradient in gradients.items():
        clipped = gradient * scale
        first, second = ((1 - BETAS[0]) * clipped).float(), ((1 - BETAS[1]) * clipped.square()).float()
        torch.testing.assert_close(state[f"exp_avg.{name}"], first, rtol=2e-3, atol=1e-5 * scale)
        torch.testing.assert_close(state[f"exp_avg_sq.{name}"], second, rtol=4e-3, atol=1e-7 * scale**2)


def test_a_process_without_a_pack_takes_the_step_of_the_others(model, data_config):
    data_config = replace(data_config, packs_per_step=1)
    banks = [GateBank.for_model(model, GateConfig(8, 16)) for _ in range(2)]
    banks[1].load_state_dict(banks[0].state_dict())
    busy = PlainEngine(banks[0], data_config, DistributedState(0, 1, 0, torch.device("cpu")))
    busy.accumulate(distill_step(banks[0], model, prompt(60), **data_config.loss_options).loss)
    gradient = torch.cat([parameter.grad.reshape(-1) for parameter in banks[0].parameters()])
    idle = PlainEngine(banks[1], data_config, SimpleNamespace(size=2, sum=lambda own: own + gradient))
    idle.skip()
    assert idle.update(1e-2) == busy.update(1e-2) > 0
    assert_identical(idle.state(), busy.state())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_are_those_of_the_definition_on_a_cpu(model, data_config, device, monkeypatch):
    """Losses and norms of gradients, each after the updates before it."""
    data_config = replace(data_config, packs_per_step=1)

    def train(backend: str, device: torch.device) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
        monkeypatch.setenv("SEERGATE_BACKEND", backend)
        torch.manual_seed(1)
        bank = GateBank.for_model(model, GateConfig(8, 16)).to(device)
        engine = PlainEngine(bank, data_config, DistributedState(0, 1, 0, device))
        pack = packed([prompt(90, 1)[0].numpy(), prompt(41, 2)[0].numpy()])
        losses, norms = [], []
        for _ in range(4):
            out = distill_step(bank, model.to(device), *pack, **data_config.loss_options)
            engine.accumulate(out.loss)
            losses.append(out.loss.item())
            norms.append(engine.update(1e-2))
        gates = {name: x for name, x in engine.state().items() if name.startswith("gates.")}
        return losses, norms, gates

    want_losses, want_norms, want_gates = train("reference", torch.device("cpu"))
    losses, norms, gates = train("triton" if device == "cuda" else "torch", torch.device(device))
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(want_losses, rel=1e-3) and norms == pytest.approx(want_norms, rel=1e-2)
    torch.testing.assert_close(gates, want_gates, rtol=0, atol=5e-3)


def test_deepspeed_takes_its_defaults_for_auto(data_config, tmp_path):
    file = tmp_path / "ds.json"
    zero = {"stage": 2, "reduce_bucket_size": "auto", "contiguous_gradients": "auto", "overlap_comm": False}
    zero["round_robin_gradients"] = True  # as in an example of Hugging Face
    section = {"enabled": "auto"}
    file.write_text(json.dumps({"zero_optimization": zero, "steps_per_print": "auto", "bf16": section}), "utf-8")
    data_config = replace(data_config, deepspeed=str(file), packs_per_step=6)
    assert bucket_bytes(data_config, 2) == 4 * 500_000_000
    values = deepspeed_config(data_config, 2)
    kept = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 500_000_000, "round_robin_gradients": False}
    assert values["zero_optimization"] == kept
    assert values["gradient_accumulation_steps"] == 3 and "steps_per_print" not in values and "bf16" not in values


def test_what_deepspeed_does_not_know_is_refused_with_the_file(data_config, tmp_path):
    pytest.importorskip("deepspeed")
    (file := tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "overlap_com": true}}')
    refused("zero_optimization of .*ds.json: .*overlap_com", check_zero, replace(data_config, deepspeed=str(file)), 2)


def test_deepspeed_does_not_wait_for_the_device_to_time_it(data_config):
    settings = pytest.importorskip("deepspeed.utils.config")
    values = deepspeed_config(replace(data_config, deepspeed=str(shipped("ds_configs/zero2.json"))), 1)
    assert settings.get_timers_config(values).enabled is False
