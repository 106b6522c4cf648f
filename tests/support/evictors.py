"""The table of evicting methods: what the shared tests run, one row each. A new evictor adds a row."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import seergate
from seergate import methods
from seergate.eval.calibration.query_centres import QueryCentres
from seergate.methods.evicting import CompressingMethod
from seergate.methods.scoring import attend_and_weigh
from seergate.methods.tri_attention import Centres
from tests.support import naive, naive_views
from tests.support.models import prompt, tiny_model

retention = naive_views.retention_for
GROUPS = {1: (2, 2), 4: (8, 2), 5: (10, 2)}
"""Query heads per KV head -> query heads, KV heads."""


def model_of(group: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    heads, kv_heads = GROUPS[group]
    return tiny_model("qwen3", dtype=dtype, num_attention_heads=heads, num_key_value_heads=kv_heads, **options)


def centres(model: Any) -> Centres:
    recorder = QueryCentres()
    with seergate.attached(model, recorder):
        model.generate(input_ids=prompt(200, 77), max_new_tokens=2)
    return recorder.centres()


def attention(state: Any, step: Any) -> Any:
    """What a decode step does with a state before anything leaves: `observe_attention`, then `attend`."""
    step.p_BKGT = attend_and_weigh(step)[1] if state.reads_all_keys else None
    state.observe_attention(step)
    return state.attend(step)


def _tri(model: Any, **options: Any) -> CompressingMethod:
    return methods.TriAttention(centres=centres(model), **options)


def _naive_tri(model: Any, *args: Any, **options: Any) -> naive.Tri:
    query_centres, rope = centres(model), model.model.rotary_emb
    for name in ("mean", "modulus"):
        options[name] = {layer: x.double().numpy() for layer, x in getattr(query_centres, name).items()}
    return naive.Tri(*args, frequencies=rope.inv_freq.double().numpy(), factor=rope.attention_scaling, **options)


def _variant(policy: Any, **options: Any) -> Any:
    for name, value in options.items():
        setattr(policy, name, value)
    return policy


@dataclass(frozen=True)
class Evictor:
    """A method small enough to evict in a test.

    Attributes:
        method: makes it for a model.
        policy: makes its simulation.
        bound: the most that a row with this prompt may hold after so many decoded tokens.
        pins_prompt: whether the prompt is never evicted.
    """

    method: Callable[[Any], CompressingMethod]
    policy: Callable[[Any], Any]
    bound: Callable[[int, int], int]
    pins_prompt: bool = False
    covering: dict[str, int] | Callable[[Any], CompressingMethod] | None = None
    """Options with which nothing is evicted in a short test, or such a method; a large token budget by default."""
    grows: bool = False
    """Whether something beside the cache grows with the answer."""

    def covers(self, model: Any) -> CompressingMethod:
        """The method with room for everything."""
        if callable(self.covering):
            return self.covering(model)
        return replace(self.method(model), **(self.covering or {"token_budget": 4096}))


def _pages(prompt_tokens: int, page: int) -> int:
    return -(-prompt_tokens // page) * page


def _with_gate(evictor: Callable[..., CompressingMethod], budget: int = 16) -> Callable[[Any], CompressingMethod]:
    """A method whose residents the gate chooses from."""

    def make(model: Any) -> CompressingMethod:
        gate = methods.Gate(bank=naive_views.gate_for(model), token_budget=budget)
        return methods.GateOnEvictor(evictor=evictor(), gate=gate)

    return make


def gated(model: Any, policy: Any) -> Any:
    """The simulation of a policy whose residents the gate chooses from."""
    return naive_views.gated(policy, model, naive_views.gate_for(model), 16)


C = 24


def _lazy(simulated: dict[str, Any], **options: Any) -> Evictor:
    return Evictor(
        lambda m: methods.LazyEviction(token_budget=C, window=7, alpha=naive.Lazy.alpha, **options),
        lambda m: _variant(naive.Lazy(C, interval=7, recent=7, periodic=True, at_prompt=False), **simulated),
        lambda n, t: max(n, C) + 7 if t <= 7 else C + 7,
    )


def _raas(bound: Callable[[int, int], int], share_of: str = "resident", **options: Any) -> Evictor:
    return Evictor(
        lambda m: methods.RaaS(token_budget=C, block_size=4, share_of=share_of, **options),
        lambda m: naive.RaaS(C, 4, of_budget=share_of == "budget", **options),
        bound,
        pins_prompt=options.get("prompt") != "evictable",
    )


def _beside(n: int, t: int) -> int:
    """The most that RaaS holds if the prompt does not count in the budget."""
    return _pages(n, 4) + C + 1


def _pooled(
    method: Any, policy: Any, window: int, interval: int, simulated: dict[str, Any], **options: Any
) -> Evictor:
    return Evictor(
        lambda m: method(token_budget=C, window=window, interval=interval, kernel=5, **options),
        lambda m: _variant(policy(C, interval=interval, recent=window, periodic=True), **simulated),
        lambda n, t: C + interval,
    )


def _rpc(simulated: dict[str, Any], **options: Any) -> Evictor:
    return Evictor(
        lambda m: methods.RPC(interval=12, window=4, **options),
        lambda m: naive.RPC(12, 4, **simulated),
        lambda n, t: n + max(0, (t - 5) // 12) * 3 + 12 + 4,
        pins_prompt=True,
        covering={"ratio": 1},
    )


EVICTORS = {
    "streaming_llm": Evictor(
        lambda m: methods.StreamingLLM(token_budget=C, sink_tokens=3, interval=7),
        lambda m: naive_views.streaming(m, C, 3, 7),
        lambda n, t: C + 7,
    ),
    "streaming_llm original": Evictor(
        lambda m: methods.StreamingLLM(token_budget=C, sink_tokens=3, interval=7, positions="original"),
        lambda m: naive_views.streaming(m, C, 3, 7, kind=naive_views.SinksAndWindow),
        lambda n, t: C + 7,
    ),
    "h2o": Evictor(
        lambda m: methods.H2O(token_budget=C, recent_tokens=10), lambda m: naive.H2O(C, recent=10), lambda n, t: C + 1
    ),
    "h2o in batches": Evictor(
        lambda m: methods.H2O(token_budget=C, interval=5),
        lambda m: naive.H2O(C, interval=5, recent=C // 2),
        lambda n, t: C + 5,
    ),
    "tova": Evictor(lambda m: methods.TOVA(token_budget=C), lambda m: naive.TOVA(C, recent=1), lambda n, t: C + 1),
    "tova faithful": Evictor(
        lambda m: methods.TOVA(token_budget=C, protect_current=False), lambda m: naive.TOVA(C), lambda n, t: C + 1
    ),
    "lazy_eviction": _lazy({}),
    "lazy_eviction full": _lazy({"shift": 0}, h1="full"),
    "lazy_eviction without H1": _lazy({"use_h1": False}, use_h1=False),
    "snapkv": _pooled(methods.SnapKV, naive.SnapKV, 6, 8, {}),
    "snapkv by group": _pooled(methods.SnapKV, naive.SnapKV, 6, 8, {"by_group": True}, pooled_by="group"),
    "r_kv": _pooled(methods.RKV, naive.RKV, 4, 8, {}),
    "r_kv by length": _pooled(methods.RKV, naive.RKV, 4, 6, {"by_length": True}, trigger="length"),
    "raas": _raas(lambda n, t: max(C, _pages(n, 4) + 4) + 1),
    "raas extra": _raas(_beside, prompt="extra"),
    "raas of the budget": _raas(_beside, prompt="extra", share_of="budget"),
    "raas evictable": _raas(lambda n, t: max(n, C) + 1 if t <= 1 else C + 1, prompt="evictable"),
    "rpc": _rpc({}),
    "rpc per head": _rpc({"layer_wide": False}, scope="kv_head"),
    "rpc newest twice": _rpc({"newest_twice": True}, selector="newest_twice"),
    "random_evict": Evictor(
        lambda m: methods.RandomEvict(token_budget=C, interval=6),
        lambda m: naive.Random(C, interval=6, pinned=True),
        lambda n, t: max(C, n + 6) + 6,
        pins_prompt=True,
    ),
    "random_evict recent": Evictor(
        lambda m: methods.RandomEvict(token_budget=C, interval=6, recent_tokens=3, seed=5),
        lambda m: _variant(naive.Random(C, interval=6, recent=3, pinned=True), seed=5),
        lambda n, t: max(C, n + 6) + 6,
        pins_prompt=True,
    ),
    "tri_attention": Evictor(
        lambda m: _tri(m, token_budget=C, interval=6),
        lambda m: _naive_tri(m, C, interval=6, pinned=True),
        lambda n, t: max(C, n + 6) + 6,
        pins_prompt=True,
    ),
    "tri_attention evictable": Evictor(
        lambda m: _tri(m, token_budget=C, interval=6, prompt="evictable", recent_tokens=2),
        lambda m: _naive_tri(m, C, interval=6, recent=2),
        lambda n, t: C + 6,
    ),
    "fast_kvzip": Evictor(
        lambda m: methods.FastKVzip(
            bank=naive_views.level(retention(m, "fast_kvzip")), token_budget=C, interval=6, window=5, first_tokens=2
        ),
        lambda m: naive_views.FastKVzip(C, interval=6, recent=5, bank=retention(m, "fast_kvzip")),
        lambda n, t: C + 6,
    ),
    "trim_kv": Evictor(
        lambda m: methods.TrimKV(bank=retention(m, "trim_kv"), token_budget=C, interval=6),
        lambda m: naive_views.TrimKV(C, interval=6, bank=retention(m, "trim_kv")),
        lambda n, t: C + 6,
    ),
    "kv4bit": Evictor(
        lambda m: methods.KV4Bit(group=6, residual=5),
        lambda m: naive_views.KV4Bit(6, 5),
        lambda n, t: 11 if t > 1 else max(n, 11),
        covering={"residual": 4096},
        grows=True,
    ),
    "h2o and gate": Evictor(
        _with_gate(partial(methods.H2O, token_budget=C, recent_tokens=10)),
        lambda m: gated(m, naive.H2O(C, recent=10)),
        lambda n, t: C + 1,
        covering=_with_gate(partial(methods.H2O, token_budget=4096), 4096),
        grows=True,
    ),
    "trim_kv and gate": Evictor(
        lambda m: _with_gate(partial(methods.TrimKV, bank=retention(m, "trim_kv"), token_budget=C, interval=6))(m),
        lambda m: gated(m, naive_views.TrimKV(C, interval=6, bank=retention(m, "trim_kv"))),
        lambda n, t: C + 6,
        covering=lambda m: _with_gate(partial(methods.TrimKV, bank=retention(m, "trim_kv"), token_budget=4096), 4096)(
            m
        ),
        grows=True,
    ),
}
