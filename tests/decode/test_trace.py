"""The trace holds what was read: line by line what the method selected, in sum what the counters have."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import DecodeConfig, SeergateError
from seergate.decode.trace import read_trace
from seergate.methods.gate import Gate
from tests.decode.test_decode import BLOCK, gates, selector
from tests.support.models import left_padded, prompt
from tests.test_house import ROOT, code_blocks


def lines_of(path):
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("options", [{"token_budget": 2 * BLOCK}, {"threshold": 0.05}, {"top_p": 0.7}])
def test_the_trace_is_what_was_selected(model, options, tmp_path, monkeypatch):
    method, seen = Gate.from_config(gates(model), DecodeConfig(**options)), []
    select = Gate.select

    def spied(self, state, step):
        selection = select(self, state, step)
        seen.append((state.spec.layer, list(step.ends), selection))
        return selection

    monkeypatch.setattr(Gate, "select", spied)
    with seergate.attached(model, method) as handle, handle.traced(tmp_path / "trace.parquet"):
        model.generate(**left_padded([prompt(40, 1), prompt(20, 2)]), max_new_tokens=8)
        stats = handle.stats()
    lines = iter(lines_of(tmp_path / "trace.parquet"))
    assert len(seen) == 7 * 2
    for number, (layer, ends, selection) in enumerate(seen):
        for row, end in enumerate(ends):
            for head in range(2):
                line = next(lines)
                assert (line["step"], line["layer"], line["row"], line["head"]) == (number // 2, layer, row, head)
                assert line["position"] == end - 1
                if selection is None:
                    assert line["blocks"] is None and line["tokens"] == end
                    continue
                blocks = [block for block in selection.indices[row, head].tolist() if block >= 0]
                assert line["blocks"] == blocks
                assert line["tokens"] == sum(min(end, (block + 1) * BLOCK) - block * BLOCK for block in blocks)
    assert next(lines, None) is None
    columns, about = read_trace(tmp_path / "trace.parquet")
    assert about["block_size"] == BLOCK and "Gate" in about["method"]
    for index, layer in enumerate(stats["layers"]):
        for head in range(2):
            mine = (columns["layer"] == layer) & (columns["head"] == head)
            assert columns["tokens"][mine].mean() == pytest.approx(stats["tokens_per_head"][index][head])
            context = (columns["position"][mine] + 1).sum()
            assert columns["tokens"][mine].sum() / context == pytest.approx(stats["density_per_head"][index][head])


def test_what_is_read_without_a_choice(model, tmp_path):
    """Dense layers, covering budgets and evicting methods read what they hold."""
    path = tmp_path / "trace.parquet"
    bank = gates(model)
    with seergate.attached(model, bank, token_budget=2 * BLOCK, dense_layers=(0,)) as handle, handle.traced(path):
        model.generate(input_ids=prompt(30), max_new_tokens=4)
    lines = lines_of(path)
    assert {line["blocks"] is None for line in lines if line["layer"] == 0} == {True}
    assert {line["blocks"] is None for line in lines if line["layer"] == 1} == {False}
    with seergate.attached(model, "streaming_llm", token_budget=20) as handle, handle.traced(path):
        model.generate(input_ids=prompt(60), max_new_tokens=4)
        stats = handle.stats()
    lines = lines_of(path)
    assert [line["position"] for line in lines if (line["layer"], line["head"]) == (0, 0)] == [60, 61, 62]
    assert {line["tokens"] for line in lines} == {20} and {line["blocks"] for line in lines} == {None}
    assert stats["tokens_per_head"] == [[20, 20], [20, 20]]


def test_only_while_it_lasts(model, tmp_path):
    path = tmp_path / "trace.parquet"
    with seergate.attached(model, "oracle", token_budget=2 * BLOCK, block_size=BLOCK) as handle:
        with handle.traced(path):
            model.generate(input_ids=prompt(30), max_new_tokens=9)
            with pytest.raises(SeergateError, match="a trace already"), handle.traced(tmp_path / "other"):
                pass
        model.generate(input_ids=prompt(30), max_new_tokens=9)
        assert handle.stats()["steps"] == 16
        assert sorted({line["step"] for line in lines_of(path)}) == list(range(8))
        with pytest.raises(RuntimeError, match="stop"), handle.traced(path):
            model(input_ids=prompt(30), past_key_values=(cache := DynamicCache()))
            model(input_ids=prompt(1), past_key_values=cache)
            raise RuntimeError("stop")
        assert len(lines_of(path)) == 4, "what was read before an error is kept"
        with pytest.raises(SeergateError, match="cannot be written"), handle.traced(tmp_path / "nowhere" / "x"):
            pass
        assert handle.trace is None


def test_a_row_without_a_real_token_yet(model, tmp_path):
    """It has no past blocks, and so no scores or attention of any."""
    method, path = selector(model, "oracle"), tmp_path / "trace.parquet"
    mask = torch.ones(2, 41, dtype=torch.long)
    mask[1] = 0
    with seergate.attached(model, method) as handle, handle.traced(path, attention=True), torch.no_grad():
        cache = DynamicCache()
        model(prompt(40).repeat(2, 1), attention_mask=mask[:, :40], past_key_values=cache)
        model(prompt(1).repeat(2, 1), attention_mask=mask, past_key_values=cache)
    for line in lines_of(path):
        past = 0 if line["row"] else 40 // BLOCK
        assert len(line["scores"]) == len(line["attention"]) == past


def test_a_trace_by_position(model, tmp_path):
    """As in the documents: a budget reads a saw tooth, whole blocks and what the open one holds."""
    path, documented = tmp_path / "trace.parquet", {}
    code = next(block for block in code_blocks(ROOT / "docs/decoding.md", "python") if "by_position" in block)
    assert "max_new_tokens=1000" in code
    exec(code.replace("max_new_tokens=1000", "max_new_tokens=100"), documented)
    table = documented["tokens_by_position"](model, gates(model), prompt(40), path)
    assert table["position"].to_pylist()[:3] == [40, 41, 42] and max(table["tokens_stddev"].to_pylist()) > 0
    with seergate.attached(model, "oracle", token_budget=24, block_size=BLOCK) as handle, handle.traced(path):
        model.generate(input_ids=prompt(40), max_new_tokens=25)
    columns, _ = read_trace(path)
    assert np.array_equal(columns["tokens"], 16 + columns["position"] % BLOCK + 1)


def test_what_is_no_trace(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    for name, message in (("other.parquet", "not a trace of decoding"), ("absent", "cannot be read")):
        with pytest.raises(SeergateError, match=message):
            read_trace(tmp_path / name)
