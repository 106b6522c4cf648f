"""A GGUF file is a base model like another: what was written is what decodes, learns and is named by its gates."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

import seergate
from seergate import GateBank, GateConfig
from seergate.distill.base_model import with_run_rope
from seergate.distill.config import load_train_config
from seergate.distill.estimate import make_plan
from seergate.distill.memory import decide_sharding
from seergate.fingerprint import fingerprint
from seergate.models.loading import base_config, load_base
from seergate.paths import gguf_file, is_hub_id
from seergate.pretrained import load_tokenizer
from tests.support.models import tiny_model
from tests.support.running import output_of, refused, run_seergate

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + END + "{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
VOCABULARY = [*bytes_to_unicode().values(), "he", END]
KIND = gguf.GGMLQuantizationType.Q8_0
Weights = dict[str, np.ndarray]


def llama() -> PreTrainedModel:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 512}
    return tiny_model("llama", vocab_size=len(VOCABULARY), **shape)


def name_in_gguf(name: str) -> str:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    return names.get_name(name.removesuffix(".weight")) + ".weight"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp keeps them: the halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    without: str = "",
    add: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    **split: int,
) -> Weights:
    """Write a model with a byte-level tokenizer, its matrices in 8 bits, and what ``add`` adds; returns the weights in
    the file.
    """
    config, written = model.config, Weights()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([*[gguf.TokenType.NORMAL] * (len(VOCABULARY) - 1), gguf.TokenType.CONTROL])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(len(VOCABULARY) - 1)
    writer.add_pad_token_id(len(VOCABULARY) - 1)
    writer.add_chat_template(TEMPLATE)
    for key, value in split.items():
        writer.add_uint16(f"split.{key}", value)
    add(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" or name_in_gguf(name) == without:  # tied
            continue
        weight = kept = written[name] = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                kept = permuted(weight, heads)
        if weight.ndim == 1:
            writer.add_tensor(name_in_gguf(name), kept)
        else:
            writer.add_tensor(name_in_gguf(name), gguf.quantize(kept, KIND), raw_dtype=KIND)
            # Rows are quantised by themselves, so the order of rows is all that the permutation changes.
            written[name] = gguf.dequantize(gguf.quantize(weight, KIND), KIND)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    return file, write_gguf(file, llama())


@pytest.fixture
def file(made: tuple[Path, Weights]) -> Path:
    return made[0]


def test_weights_are_those_that_were_written(made: tuple[Path, Weights], tmp_path: Path) -> None:
    file, written = made
    loaded = load_base(file)
    weights = loaded.state_dict()
    assert weights.keys() == {*written, "lm_head.weight"}
    for name, weight in written.items():
        np.testing.assert_array_equal(weights[name].numpy(), weight, err_msg=name)
    assert not any(torch.equal(weights[n], w) for n, w in llama().state_dict().items() if w.ndim > 1), "quantised"
    twin = llama()
    twin.load_state_dict(weights)
    assert fingerprint(loaded) == fingerprint(twin)
    ids = torch.arange(1, 40)[None]
    torch.testing.assert_close(loaded(ids).logits, twin(ids).logits)
    loaded.save_pretrained(tmp_path / "saved")
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")) == fingerprint(loaded)
    assert load_base(file, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, part in enumerate(parts):
        write_gguf(part, llama(), no=number, count=2)
        for read in (load_base, base_config, load_tokenizer):
            refused("one of several files of a GGUF model; .* --merge", read, part)
    refused("holds a GGUF model in several files; .* --merge", base_config, tmp_path)
    whole = tmp_path / "m-00001-of-00001.gguf"
    write_gguf(whole, llama(), no=0, count=1)
    assert load_base(whole).config.num_hidden_layers == llama().config.num_hidden_layers
    write_gguf(tmp_path / "torn.gguf", llama(), without="blk.1.ffn_up.weight")
    lacking = r"lacks 1 of its weights, such as model\.layers\.1\.mlp\.up_proj\.weight"
    refused(lacking, load_base, tmp_path / "torn.gguf")


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
            "scaled RoPE .rope_freqs.weight.",
        ),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "scaled RoPE .yarn."),
        (lambda writer: writer.add_key_length(32), "RoPE of 16 of 32 dimensions"),
        (lambda writer: writer.add_sliding_window(64), "a sliding window of 64 tokens"),
    ],
)
def test_what_transformers_would_leave_out_is_refused(
    tmp_path: Path, add: Callable[[gguf.GGUFWriter], Any], what: str
) -> None:
    write_gguf(tmp_path / "m.gguf", llama(), add=add)
    for read in (base_config, load_base, load_tokenizer):
        refused(f"m.gguf has {what}, which transformers does not read", read, tmp_path / "m.gguf")


def test_a_tokenizer_splits_as_its_file_states(tmp_path: Path) -> None:
    def pieces(stated: str) -> list[str]:
        file = tmp_path / f"{stated}.gguf"
        write_gguf(file, llama(), add=lambda writer: writer.add_tokenizer_pre(stated))
        splitter = load_tokenizer(file).backend_tokenizer.pre_tokenizer  # type: ignore[attr-defined]
        return [piece for piece, _ in splitter.pre_tokenize_str("a\n\n12")]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pieces("gpt-2") == ["a", "Ċ", "Ċ", "12"]
        assert pieces("smollm") == ["a", "ĊĊ", "1", "2"], "every digit apart, so the line feeds stay together"
        assert pieces("qwen2") == ["a", "ĊĊ", "1", "2"], "by transformers"
    with pytest.warns(UserWarning, match=r"does not know how the tokenizer of .* splits texts \('falcon9'\)"):
        pieces("falcon9")


def test_its_tokenizer_comes_with_it(file: Path) -> None:
    tokenizer = load_tokenizer(file)
    ids = tokenizer("he says: où?").input_ids
    assert ids[0] == VOCABULARY.index("he") and tokenizer.decode(ids) == "he says: où?"
    assert tokenizer.eos_token == END
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == "user: x\nassistant: "


def test_gates_name_the_file_and_find_it_again(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    bank = GateBank.for_model(load_base(file.name), GateConfig(8, 16))
    bank.save_pretrained(tmp_path / "gates")
    monkeypatch.chdir(tmp_path)
    prompt = torch.arange(1, 60)[None]
    answers = []
    for options in ({}, {"base_model": file}, {"base_model": file.parent}):
        model = seergate.load("gates", token_budget=16, **options)
        answers.append(model.generate(prompt, max_new_tokens=5, do_sample=False).tolist())
        assert seergate.handle_of(model).stats()["density"] < 0.5
        assert model.config.name_or_path == str(file)
    assert answers[0] == answers[1] == answers[2]
    assert str(file) in output_of("info", "gates")
    (tmp_path / "blob").write_bytes(file.read_bytes())
    (linked := tmp_path / "linked.gguf").symlink_to(tmp_path / "blob")  # as in the Hub's cache
    GateBank.for_model(load_base(linked), GateConfig(8, 16)).save_pretrained("linked")
    assert seergate.load("linked", token_budget=16).config.name_or_path == str(linked)
    # The model as transformers reads it remembers its directory only, in which there is one GGUF file.
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    GateBank.for_model(theirs, GateConfig(8, 16)).save_pretrained("others")
    assert seergate.load("others", token_budget=16).config.name_or_path == str(file)
    whole_path = r"gguf_file is 'x\.gguf'; name the whole path of the file as base_model="
    refused(whole_path, seergate.load, "gates", gguf_file="x.gguf")
    refused("is a GGUF model, not gates; to use both: load\\(GATES, base_model=", seergate.load, file)


def test_train_evaluate_and_answer(file: Path, tmp_path: Path) -> None:
    rows = [{"text": "the hen and the egg, " * 20 + str(number)} for number in range(8)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = ["train", "--model", str(file), "--data", str(tmp_path / "text.jsonl"), "--output-dir"]
    train += [str(tmp_path / "gates"), "--max-length", "256", "--block-size", "8", "--max-steps", "2"]
    train += ["--packs-per-step", "1", "--recall-budgets", "64", "--report-to", "none"]
    output_of(*train)
    output_of(*train)  # the same weights are found again
    assert GateBank.from_pretrained(tmp_path / "gates").geometry.base_model == str(file)
    model = ["--model", str(file), "--gates", str(tmp_path / "gates"), "--method", "gate", "--budget", "32"]
    (tmp_path / "task.jsonl").write_text(json.dumps({"question": "he " * 30, "answer": "1"}) + "\n")
    task, out = ["--task", str(tmp_path / "task.jsonl"), "--max-new-tokens", "4"], tmp_path / "runs"
    output_of("eval", *model, *task, "--no-report", "--out", str(out))
    (record,) = out.glob("gate-32/config.yaml")
    assert fingerprint(load_base(file)) in record.read_text()
    done = run_seergate("generate", *model, "--prompt", "he " * 30, "--max-new-tokens", "4")
    assert done.returncode == 0 and "of the tokens before it" in done.stderr, done.stderr
    prompt_file = tmp_path / "asked.jsonl"
    prompt_file.write_text(json.dumps({"prompt": "he " * 30}) + "\n")
    traces = ["--prompts", str(prompt_file), "--max-length", "120", "--out", str(tmp_path / "traces.jsonl")]
    assert "1 questions" in output_of("traces", *model, *traces)
    assert "supported. llama, 2 of 2 layers" in output_of("doctor", "--model", str(file))


def test_what_a_file_cannot_do(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"max_length": 256, "block_size": 8, "recall_budgets": "64"}
    for name, value in {"shard_base": True, "quantize": "torchao-int8", "base_memory_gb": 1.0}.items():
        config = load_train_config(str(file), {**common, name: value})
        message = f"^{name} is {value!r}; it must be left out for .* GGUF file"
        refused(message, with_run_rope, base_config(file), config)
    config = load_train_config(str(file), common)
    model = llama()
    bank = GateBank.for_model(model, GateConfig(8, 16))
    assert decide_sharding(model, bank, config, torch.device("cpu"), 4, room=0).shard_base is False
    assert "does NOT fit" in (text := make_plan(config, memory_gb=1e-3).text())
    assert "--quantize" not in text and "--base-memory-gb" not in text and "--processes" not in text
    left_out = "^quantization_config is given; it must be left out for"
    refused(left_out, load_base, file, quantization_config=object())
    refused(r"^the model file '.*absent\.gguf' does not exist", load_train_config, str(tmp_path / "absent.gguf"))
    refused(r"absent\.gguf could not be loaded: there is no such file", base_config, "models/absent.gguf")
    assert not is_hub_id("models/absent.gguf")
    (tmp_path / "damaged.gguf").write_bytes(file.read_bytes()[:200])
    refused(r"damaged\.gguf could not be loaded: ", base_config, tmp_path / "damaged.gguf")
    (tmp_path / "second.gguf").write_bytes(b"")
    assert gguf_file(tmp_path) is None and gguf_file(file.parent) == file
    refused("holds several GGUF files; name one", load_base, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(r"needs the package gguf; run: pip install \"seergate\[gguf\]\"", load_base, file)
