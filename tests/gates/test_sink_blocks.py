"""Gates that left the first blocks out of what they learned: what is saved with them, and how they decode."""

import pytest
import torch

import seergate
from seergate import DecodeConfig, GateBank
from seergate.methods import Gate, Quest, make_method
from seergate.models.published import export_published
from seergate.models.resolving import method_of
from seergate.serving.common.settings import Settings
from tests.support.models import gates, prompt, tiny_model
from tests.support.running import invalid, output_of, refused

SIZE = 8


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("scorer", ["attn_gate", "msa", "indexer"])
def test_they_are_saved_and_shown(model, tmp_path, scorer, sinks):
    bank = gates(model, scorer=scorer, sink_blocks=sinks)
    bank.save_pretrained(tmp_path)
    assert ("sink_blocks" in (tmp_path / "gate_config.json").read_text()) == (sinks > 0)  # as before there were any
    assert GateBank.from_pretrained(tmp_path).config == bank.config
    assert ("sink blocks          2, always read" in output_of("info", str(tmp_path))) == (sinks == 2)
    assert ("| sink blocks | 2, always read |" in (tmp_path / "README.md").read_text()) == (sinks == 2)


def test_the_published_code_and_other_gates_are_refused(model, tmp_path):
    bank = gates(tiny_model("qwen3"), sink_blocks=1)
    refused(r"cannot use these gates: .*sink_blocks is 1 \(they have none\)", export_published, bank, tmp_path)
    invalid('compat is "published"', Gate, bank=bank, token_budget=64, compat="published")


def test_decoding_reads_as_many_as_the_gates_were_trained_with(model):
    bank = gates(model, sink_blocks=2)
    settings = Settings(gates="org/gates", rule={"token_budget": 64}).selector(bank, SIZE)
    joined = make_method("snapkv+gate", bank=bank, token_budget=64, read_budget=64).gate
    config = DecodeConfig(token_budget=64)
    for method in (Gate(bank=bank), method_of(bank), method_of(bank, config), make_method("gate", bank=bank)):
        assert method.sink_blocks == 2 and "sink_blocks=2" in repr(method)
    assert settings.sink_blocks == joined.sink_blocks == 2
    assert Gate(bank=gates(model)).sink_blocks == Quest(token_budget=64, sink_blocks=None).sink_blocks == 0
    invalid("token_budget is 31; with block_size 8 and 2 sink blocks .* at least 32", Gate, bank=bank, token_budget=31)
    assert Gate(bank=bank, token_budget=32).budget == 32 and Gate(bank=gates(model), token_budget=16).budget == 16
    for sinks in (0, 1):
        assert method_of(bank, sink_blocks=sinks).sink_blocks == sinks
        assert method_of(bank, DecodeConfig(sink_blocks=sinks)).sink_blocks == sinks
    bank.decode_defaults = {"sink_blocks": 3}
    assert method_of(bank).sink_blocks == 3


@pytest.mark.parametrize("rule", [{"token_budget": 4 * SIZE}, {"threshold": 0.2}, {"top_p": 0.5}])
def test_the_sinks_scores_do_not_matter(rule):
    """Whatever the gate says of the first block, the same blocks are read, and the first one among them."""
    model = tiny_model("qwen3")
    bank, ids = gates(model, sink_blocks=1), prompt(90)
    with seergate.attached(model, bank, **rule):
        want = model.generate(ids, max_new_tokens=8, do_sample=False)
    for size in (-1e4, 1e4):
        for _, gate in bank:
            real = gate.step_scores

            def spoilt(*arguments, real=real, size=size):
                scores = real(*arguments)
                scores[..., 0] = size
                return scores

            gate.step_scores = spoilt
        seen = []
        method = Gate(bank=bank, **rule)
        choose = method.choose
        method.choose = lambda *scores, choose=choose, seen=seen: seen.append(choose(*scores)) or seen[-1]
        with seergate.attached(model, method):
            assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), want)
        assert seen and all((selection.indices[..., 0] == 0).all() for selection in seen)
