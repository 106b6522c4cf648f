"""The page says what was read: held to the slow decoder in float64, which scores all blocks anew from all keys."""

import base64
import json
import math
import re
import zlib

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import seergate
from seergate.eval.report.explorer import TEMPLATE, page_data, pieces, write_explorer
from tests.decode.test_decode import BLOCK, gates
from tests.support.evaluation import tokenizer
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.reference_decoder import ReferenceRow, Rule
from tests.support.running import refused

PROMPT, NEW, CELLS = 45, 20, [[0, 0], [0, 1], [1, 0], [1, 1]]


class Watched(ReferenceRow):
    """Notes what each step of each layer and KV head reads, scores, and attends to when it attends to everything."""

    def decode(self, tokens):
        self.steps = []
        for token in tokens:
            self.steps.append([])
            super().decode([token])

    def _chosen(self, layer, kv_head, raw_q, q, length):
        chosen, size, group = super()._chosen(layer, kv_head, raw_q, q, length), BLOCK, self.heads // self.kv_heads
        past = range((length - 1) // size)
        scores = torch.tensor([self._score(layer, kv_head, raw_q, q, block) for block in past]).softmax(-1)
        keys, truth = self.layers[layer].keys[kv_head], []
        weights = [(keys @ q[kv_head * group + i, -1] / math.sqrt(self.width)).softmax(-1) for i in range(group)]
        for block in past:
            truth.append(max(float(each[block * size : (block + 1) * size].max()) for each in weights))
        read = [bool(chosen[block * size]) for block in range(len(past) + 1)]
        self.steps[-1].append((read, scores.tolist(), [share / sum(truth) for share in truth]))
        return chosen


def page_of(path):
    """The data of a page, its steps decoded into ``[3, cells, blocks]``."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)
    data = json.loads(match[1])
    for i, step in enumerate(data["steps"]):
        if step is not None:
            planes = np.frombuffer(zlib.decompress(base64.b64decode(step)), np.uint8)
            data["steps"][i] = planes.reshape(3, len(data["cells"]), -1)
    return data


def answered(model, trace, method, inputs, new, token_budget=2 * BLOCK, **options):
    """What `generate` returns while a trace is written."""
    options["token_budget"] = token_budget
    with seergate.attached(model, method, **options) as handle, handle.traced(trace, attention=True):
        return model.generate(**inputs, max_new_tokens=new)


@pytest.mark.parametrize("name", ["gate", "quest", "oracle"])
def test_the_page_is_what_the_slow_decoder_reads(name, tmp_path):
    model = tiny_model("qwen3", vocab_size=len(tokenizer())).double()
    bank = gates(model).double()
    how = {"block_size": BLOCK, **({"dense_layers": ()} if name == "quest" else {})}
    method, how = (bank, {}) if name == "gate" else (name, how)
    answer = answered(model, tmp_path / "trace", method, {"input_ids": prompt(PROMPT)}, NEW, **how)[0].tolist()
    page = page_of(write_explorer(tmp_path / "trace", tokenizer(), answer, tmp_path / "page.html").path)
    twin = Watched(model, Rule(name, BLOCK, 2 * BLOCK), {layer: bank.gate(layer) for layer in range(2)})
    with torch.no_grad():
        twin.read(answer[:PROMPT])
        twin.decode(answer[PROMPT:-1])

    assert (page["prompt"], page["cells"], page["scored"]) == (PROMPT, CELLS, [True] * 4)
    assert page["tokens"] == pieces(tokenizer(), answer) and len(page["tokens"]) == PROMPT + NEW
    assert (page["name"], page["nominal"], page["block_size"]) == (name, str(2 * BLOCK), BLOCK)
    assert page["steps"][: PROMPT + 1] == [None] * (PROMPT + 1), "the first token comes from the prompt"
    for step, expected in zip(page["steps"][PROMPT + 1 :], twin.steps, strict=True):
        for cell, (read, scores, truth) in enumerate(expected):
            assert step[0, cell].tolist() == read
            for plane, shares in ((step[1, cell], scores), (step[2, cell], truth)):
                assert plane[-1] == 0, "the current block is neither scored nor weighed"
                assert np.abs(plane[:-1] / 255 - np.sqrt(shares)).max() < 0.5 / 255 + 1e-4
    assert len({step[0].tobytes() for step in page["steps"][PROMPT + 1 :]}) > 5, "choices differ: a shift would show"


@pytest.mark.parametrize("reduction", ["max", "separate"])
def test_rows_of_a_batch_and_layers_that_read_everything(reduction, tmp_path):
    model = tiny_model("qwen3")
    inputs = left_padded([prompt(45, 1), prompt(30, 2)])
    how = {"block_size": BLOCK, "dense_layers": (0,), "group_reduction": reduction}
    answered(model, tmp_path / "both", "quest", inputs, 6, **how)
    for row, length in ((0, 45), (1, 30)):
        data = page_data(tmp_path / "both", row)
        assert data["prompt"] == length and list(data["steps"]) == list(range(length + 1, length + 6))
        planes = zlib.decompress(base64.b64decode(data["steps"][length + 5]))
        read = np.frombuffer(planes, np.uint8).reshape(3, 4, -1)[0]
        assert read[:2].all() and set(read[2:].sum(1)) <= ({2} if reduction == "max" else {2, 3})
    refused("no attention of row 2", page_data, tmp_path / "both", 2)


def test_drafts_that_were_dropped_leave_nothing(tmp_path):
    """In assisted decoding a position may be decoded several times; what counts is the token that stayed."""
    model, pages = tiny_model("qwen3").double(), []
    bank, inputs = gates(model).double(), {"input_ids": prompt(10, 5).repeat(1, 4)}
    for path, how in ((tmp_path / "plain", {}), (tmp_path / "drafted", {"prompt_lookup_num_tokens": 4})):
        answer = answered(model, path, bank, inputs | how, 20)[0].tolist()
        pages.append(page_of(write_explorer(path, tokenizer(), answer, tmp_path / "page.html").path))
    rows = [pq.read_table(path).num_rows for path in (tmp_path / "plain", tmp_path / "drafted")]
    assert rows[0] < rows[1], "drafts were dropped"
    plain, drafted = (page.pop("steps") for page in pages)
    assert pages[0] == pages[1] and all(map(np.array_equal, plain[41:], drafted[41:]))


def test_what_makes_no_page(tmp_path):
    model = tiny_model("qwen3")
    with seergate.attached(model, "streaming_llm", token_budget=20) as handle:
        trace = handle.traced(tmp_path / "trace", attention=True)
        refused("'streaming_llm' selects no blocks", trace.__enter__)
        assert not (tmp_path / "trace").exists()
    with seergate.attached(model, "oracle", token_budget=20, block_size=BLOCK) as handle:
        for path, new in ((tmp_path / "plain", 3), (tmp_path / "empty", 1)):
            with handle.traced(path):
                model.generate(input_ids=prompt(45), max_new_tokens=new)
            refused("has no attention of row 0; write it with attention=True", page_data, path)
    answer = answered(model, tmp_path / "trace", gates(model), {"input_ids": prompt(45)}, 6)[0].tolist()
    page = tmp_path / "nowhere" / "page.html"
    refused("nowhere/page.html cannot be written", write_explorer, tmp_path / "trace", tokenizer(), answer, page)


def bytes_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def test_the_text_of_each_token():
    text = "né 日本 🙂 <b> </script>"
    ids = bytes_tokenizer()(text)["input_ids"]
    token_texts = pieces(bytes_tokenizer(), ids)
    assert len(token_texts) == len(ids) == len(text.encode()) and "".join(token_texts) == text
    assert token_texts[:4] == ["n", "", "é", " "], "the last byte of a character has it"
    assert pieces(bytes_tokenizer(), ids[:2]) == ["n", "\ufffd"], "half a character at the end is not lost"
    words = tokenizer()
    ids = words("a1 is the sum of a2")["input_ids"]
    assert "".join(pieces(words, ids)) == words.decode(ids)


def test_a_page_stands_alone(tmp_path):
    """Nothing is loaded from elsewhere, and no text of a model can end the data."""
    assert not re.search(r"https?:|\bsrc=|\bimport\b|@import|\burl\(", TEMPLATE.read_text())
    model, text = tiny_model("qwen3", vocab_size=256), "</script><script>alert(1)</script>" * 2
    inputs = {"input_ids": torch.tensor([bytes_tokenizer()(text)["input_ids"]])}
    answer = answered(model, tmp_path / "trace", "oracle", inputs, 3, block_size=BLOCK)[0].tolist()
    page = write_explorer(tmp_path / "trace", bytes_tokenizer(), answer, tmp_path / "page.html").path
    assert page.read_text().count("</script>") == 2
    assert "".join(page_of(page)["tokens"][: len(text)]) == text
