"""Every method, storage and correction decodes on the pretended GPU what it decodes on a CPU."""

import copy
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

import seergate
from seergate.models import hooks as call
from tests.decode.test_decode import METHODS, pick
from tests.pretended_gpu.device import Pretended, pretended, recorded
from tests.support.evictors import EVICTORS
from tests.support.models import left_padded, prompt

BUDGET, NEW = 24, 16
SELECTING = ("gate", "quest", "dense")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS},
    **{name: (name, {}) for name in EVICTORS if " " not in name or name.endswith(" and gate")},
    **{f"{name}, static": (name, {"static": True}) for name in SELECTING},
    **{f"{name}, static, as compiled": (name, {"static": True, "compiled": True}) for name in SELECTING},
    **{f"{name}, paging": (name, {"storage": seergate.Paging()}) for name in SELECTING},
    "gate, offload": ("gate", {"storage": seergate.Offload(memory_bytes=25_000)}),
    "gate, offload to the host": ("gate", {"storage": seergate.Offload(memory_bytes=25_000, store="host")}),
    "gate, rectified": ("gate", {"correction": seergate.Rectify(8)}),
    "gate, recall": ("gate", {"measure_recall": True}),
}
READS: dict[str, dict[str, str]] = {
    "streaming_llm": {"seergate/methods/streaming_llm.py select_kept: tolist": "how many tokens stay, at an eviction"},
    "reason_cache": {"seergate/cache/sharing.py _read: tolist": "the tokens, to divide their text into steps"},
    "and gate": {
        "seergate/methods/gate_on_evictor.py attend: item": "the width of an index of what is read",
        "seergate/methods/gate_on_evictor.py attend: tolist": "how much was read, for the statistics",
    },
    "rectified": {
        "seergate/models/masks.py valid_tokens: item": "the mask of the pass that rectifies",
        "seergate/models/masks.py hide_what_is_masked: item": "the same",
    },
}
"""Where the host reads from the device in a decode step, and why, by case."""


def decode(model: Any, name: str, inputs: Any, static: bool = False, compiled: bool = False, **options: Any) -> Any:
    """The tokens; ``compiled`` takes the branches of a compiled step."""
    torch.manual_seed(0)  # gates are drawn
    method = EVICTORS[name].method(model) if name in EVICTORS else pick(model, name, BUDGET)
    how = {"cache_implementation": "static"} if static else {}
    compiling = mock.patch.object(call, "is_compiling", lambda: compiled)
    with seergate.attached(model, method, **options) as handle, compiling:
        tokens = model.generate(**inputs, max_new_tokens=NEW, **how)
        assert handle.stats()["steps"] == NEW - 1
        return tokens


@pytest.mark.parametrize("case", CASES)
def test_decoding(model: Any, case: str) -> None:
    name, options = CASES[case]
    inputs = left_padded([prompt(45, 1), prompt(31, 2)][: 1 if "rectified" in case else 2])
    want = decode(model, name, inputs, **options)
    passes: list[Counter[str]] = []
    with pretended() as device, recorded() as waits:
        gpu, there = copy.deepcopy(model).to(device), {key: x.to(device) for key, x in inputs.items()}
        gpu.register_forward_pre_hook(lambda *_: passes.append(Counter(waits)))
        got = decode(gpu, name, there, **options)
        assert isinstance(got, Pretended) and torch.equal(got.host, want)
    steps = passes[-1] - passes[max(1, len(passes) - 9)]
    reads = {place for place in steps if place.startswith("seergate/") and "pageable" not in place}
    allowed = {place for name, places in READS.items() if name in case for place in places}
    assert reads <= allowed, "the host reads from the device in a decode step"


@pytest.mark.parametrize("case", ["streaming_llm", "gate"])
def test_the_angles_may_be_made_on_another_device(model: Any, case: str) -> None:
    """As where a device map puts ``rotary_emb`` on one GPU and layers on others."""
    inputs = left_padded([prompt(45, 1), prompt(31, 2)])
    want = decode(model, case, inputs)
    with pretended() as device:
        gpu, there = copy.deepcopy(model).to(device), {key: x.to(device) for key, x in inputs.items()}
        gpu.model.rotary_emb.to("cpu")
        add_hook_to_module(gpu.model.rotary_emb, AlignDevicesHook(execution_device=torch.device("cpu")))
        for layer in gpu.model.layers:
            add_hook_to_module(
                layer, AlignDevicesHook(execution_device=device, skip_keys=["past_key_values", "cache"])
            )
        assert torch.equal(decode(gpu, case, there).host, want)


@pytest.mark.parametrize("case", ["gate", "gate, static", "gate, paging", "gate, offload", "gate, rectified", "h2o"])
def test_the_default_device_may_be_the_gpu(model: Any, case: str) -> None:
    """What the host counts stays in host memory (`torch.set_default_device`)."""
    name, options = CASES[case]
    inputs = left_padded([prompt(45, 1), prompt(31, 2)])
    want = decode(model, name, inputs, **options)
    with pretended() as device, recorded() as waits:
        gpu, there = copy.deepcopy(model).to(device), {key: x.to(device) for key, x in inputs.items()}
        decode(gpu, name, there, **options)
        usual = Counter(waits)
        waits.clear()
        with torch.device(device):
            got = decode(gpu, name, there, **options)
        assert isinstance(got, Pretended) and torch.equal(got.host, want)
        more = waits - usual
    assert not [place for place in more if place.startswith("seergate/") and "pageable" not in place]
