"""How many samples fit into memory, and what happens where one more did not."""

import pytest
import torch

from seergate import attached, resources
from seergate.eval.generation import batch_memory as memory
from seergate.eval.generation import engine
from seergate.eval.generation.batch import Batch
from seergate.eval.generation.batch_memory import estimated_batch, is_out_of_memory, sample_bytes
from seergate.eval.generation.samples import Limit
from seergate.eval.sampling import Sampling
from seergate.eval.tasks.prompts import encode
from tests.decode.test_passes import SHARED
from tests.eval.test_engine import LONG, PROMPTS, requests_for, run, tokens
from tests.support import evaluation as support
from tests.support import naive_views
from tests.support.models import tiny_model
from tests.support.running import refused


def test_running_out_of_memory_halves_the_batch_and_loses_nothing():
    model, sampling = support.model(), Sampling(temperature=1.0)
    expected = run(model, LONG, batch_size=1, max_new_tokens=20, sampling=sampling)
    sizes: list[int] = []

    def full(module, args, kwargs):
        sizes.append(kwargs["input_ids"].shape[0])
        if sizes[-1] * (kwargs["position_ids"].max() + 1) > 190:
            torch.zeros(1 << 50)  # more than there is: the allocator's own error

    model.register_forward_pre_hook(full, with_kwargs=True)
    generations = run(model, LONG, batch_size=7, max_new_tokens=20, sampling=sampling)
    assert tokens(generations) == tokens(expected)
    assert max(sizes) == 7 and sizes[-1] < 7


@pytest.mark.parametrize(
    ("batch_size", "says"),
    [(4, "not even one sample fits"), (None, "while the longest prompt, of 3 tokens, was read")],
)
def test_a_sample_that_does_not_fit_is_told(batch_size, says):
    model = support.model()
    model.register_forward_pre_hook(lambda *_: torch.zeros(1 << 50))
    refused(says, run, model, PROMPTS, batch_size=batch_size)


@pytest.mark.parametrize(("batch_size", "survivors"), [(4, 3), (4, 0), (1, 0)])
def test_running_out_of_memory_when_rows_are_dropped_makes_none_of_them_again(monkeypatch, batch_size, survivors):
    """`run` refuses what comes twice. The others start again; a sample that remains is not reported as too large."""
    model, sampling, keep, failed, began = support.model(), Sampling(temperature=1.0), Batch.keep, [], []
    expected = run(model, LONG, batch_size=1, max_new_tokens=20, sampling=sampling)
    limits = {i: 20 if i < survivors else 3 for i in range(len(LONG))}  # of the first four, so many go on

    def full(batch, rows):
        if not failed and len(rows) == survivors:
            failed.append(len(batch))
            raise torch.OutOfMemoryError("CUDA out of memory")
        keep(batch, rows)

    class Limited(engine._Row):
        def __init__(self, request, limit):
            began.append(request.key)
            super().__init__(request, min(limit, limits[request.key]))

    monkeypatch.setattr(Batch, "keep", full)
    monkeypatch.setattr(engine, "_Row", Limited)
    generations = run(model, LONG, batch_size=batch_size, max_new_tokens=20, sampling=sampling)
    assert failed == [batch_size]
    assert tokens(generations) == {key: token_ids[: limits[key]] for key, token_ids in tokens(expected).items()}
    assert sorted(began) == sorted([*range(len(LONG)), *range(survivors)])


def test_memory_that_runs_out_where_samples_are_taken_in_loses_none():
    """It is told: a smaller batch would not help, and the sample would be gone."""
    keys = []

    def refuse(generation):
        keys.append(generation.request.key)
        raise MemoryError("no room to write")

    with attached(support.model(), "dense") as handle:
        run_all = support.engine(handle, refuse, limit=Limit(4)).run
        refused("while a finished sample was taken in: no room to write", run_all, requests_for(PROMPTS))
    assert keys == [0]


def test_out_of_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(1 << 50)
    assert all(map(is_out_of_memory, (caught.value, torch.OutOfMemoryError("CUDA out of memory"), MemoryError())))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_the_estimate_by_hand(monkeypatch):
    """Of 10 MB, 8 may be used; buffers take 1.25 times what samples hold. Three processes have a third each."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10_000_000)
    device = torch.device("cpu")
    for each, expected in ((512_000, 12), (2_048_000, 3), (10**9, 1), (100, memory.LARGEST_BATCH)):
        assert estimated_batch(device, each) == expected
    assert estimated_batch(device, 512_000, sharing=3) == 4  # 12.5 / 3


def test_pages_of_files_that_were_read_are_free_within_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    free = memory.free_bytes(torch.device("cpu"))
    assert free > 1000
    for name, text in (("max", "1000\n"), ("current", "950\n"), ("stat", "anon 150\nfile 800\ninactive_file 700\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.free_bytes(torch.device("cpu")) == 750
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(torch.device("cpu")) > 1000


HELD = {
    "dense": {},
    "quest": {"token_budget": 32, "block_size": 8},
    "h2o": {"token_budget": 32, "interval": 8},
    "rpc": {"interval": 16, "window": 4},
    "kv4bit": {"residual": 16},
    "snapkv": {"token_budget": 16, "window": 4, "interval": 4},
    "streaming_llm": {"token_budget": 24, "interval": 4},
    "raas": {"token_budget": 32, "block_size": 8},
}


@pytest.mark.filterwarnings("ignore:.*a prompt has .* tokens and token_budget")
@pytest.mark.parametrize("name", support.mostly_soak(HELD, "dense", "h2o", "rpc", "kv4bit"))
def test_a_sample_holds_what_its_method_lets_it(name):
    """As much as is then measured at the peak of the longest answer, within what an eviction may free at the end."""
    model, prompt = support.model(), encode(support.tokenizer(), LONG[0])
    generation = run(model, LONG[:1], batch_size=1, max_new_tokens=200, method=name, **HELD[name])[0]
    with attached(model, name, **HELD[name]):
        estimate = sample_bytes(model, prompt, len(prompt) + 200)
    assert generation.n_tokens == 200 and 1 <= estimate / generation.costs["own_bytes_peak"] < 1.35


def test_an_answer_that_stays_is_counted_under_a_gate_too():
    """A prompt that is compressed once, and 2000 tokens that all stay."""
    model, prompt, options = support.model(), [5] * 20, {"token_budget": 64, "compress": "prompt"}
    gates = {"bank": naive_views.gate_for(model), "read_budget": 64}
    held = []
    for method, more in (("snapkv", {}), ("snapkv+gate", gates)):
        with attached(model, method, **options, **more):
            held.append(sample_bytes(model, prompt, 2000))
    assert held[1] > held[0] > 2000 * 512


def test_methods_that_evict_get_the_rows_that_they_have_room_for(monkeypatch):
    """And those that keep everything fewer: with equal memory."""
    model, prompt = support.model(), [5] * 20
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10_000_000)
    sizes = []
    for method, options in (("dense", {}), ("h2o", {"token_budget": 64, "interval": 16})):
        with attached(model, method, **options):
            sizes.append(estimated_batch(model.device, sample_bytes(model, prompt, 2000)))
    # 6.4 MB; dense: 2000 tokens of 512 bytes. h2o: 80 tokens of 512 and 2 layers of 2 heads of 4 bytes: 42240
    assert sizes == [6, 151]


@pytest.mark.parametrize(("family", "options", "fixed"), [("qwen3_5_text", {}, True), ("gemma4_text", SHARED, False)])
def test_layers_without_keys_are_counted(family, options, fixed):
    """Linear attention holds the same at every length; layers that read the keys of others hold nothing."""
    with attached(tiny_model(family, **options), "dense") as handle:
        short, long = (sample_bytes(handle.model, [5] * 20, length) for length in (200, 400))
    assert short < long and (long == 2 * short) is not fixed
