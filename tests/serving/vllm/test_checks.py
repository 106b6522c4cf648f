"""Wrong options are refused before any weights are read; without the key nothing changes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from seergate import GateBank, GateConfig
from seergate.serving.vllm.checks import check_engine, check_page
from tests.support.models import tiny_model
from tests.support.reasoner import GATES, REASONER
from tests.support.running import refused


def configured(seergate: Any, model: Any = REASONER, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    extra = {} if seergate is None else {"additional_config": {"seergate": seergate}}
    return EngineArgs(model=str(model), dtype="float32", max_model_len=2048, **options, **extra).create_engine_config()


def test_without_the_key_vllm_is_as_it_was() -> None:
    config = configured(None)
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.cache_config.block_size == 128


def test_gates_set_the_page_and_the_worker_and_no_environment() -> None:
    """`PYTHONHASHSEED` determines the hashes of cached prefixes, which routers compute too."""
    before = dict(os.environ)
    config = configured({"gates": GATES, "token_budget": 256})
    assert config.parallel_config.worker_cls == "seergate.serving.vllm.worker.CPUWorker"
    assert config.cache_config.block_size == 32
    assert {name: value for name, value in os.environ.items() if name == "PYTHONHASHSEED" or name in before} == before


@pytest.mark.parametrize(
    ("values", "options", "sentence"),
    [
        ({"gates": f"{REASONER}/gates"}, {}, "blocks of 8 tokens; .* a page has a multiple of 16 tokens"),
        ({"gates": GATES}, {"block_size": 64}, "block_size is 64; .* divides the gates' block of 32"),
        ({"gates": GATES, "dense_layers": [7]}, {}, r"dense_layers holds \[7\]; the model has the layers 0..3"),
        ({"gates": GATES, "anchors": [0]}, {"pipeline_parallel_size": 2}, r"size is 2 and anchors \[0"),
        ({"gates": GATES}, {"tensor_parallel_size": 4}, "tensor_parallel_size exceeds the number of KV heads"),
        ({"gates": GATES}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'"),
        ({"gates": GATES}, {"model_impl": "transformers"}, "by transformers' code, whose RoPE has no table"),
        ({"gates": GATES}, {"worker_cls": "some.Worker"}, "worker_cls is 'some.Worker'; with seergate"),
    ],
)
def test_engines_that_do_not_fit(values: Any, options: Any, sentence: str) -> None:
    refused(sentence, configured, values, **options)


def test_gates_without_a_key_per_block() -> None:
    bank = GateBank.for_model(tiny_model("qwen3"), GateConfig(block_size=32, gate_dim=16, scorer="msa"))
    refused("these gates have the scorer 'msa'; a server's cache keeps all", check_page, bank, 32)


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
QUANTIZED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("qwen3_next", {}, "linear-attention or state-space layers, whose states set how many tokens a page"),
        ("qwen3", {"rope_parameters": MROPE}, "positions of several axes, and RoPE is undone by the number of the"),
        (
            "qwen3",
            {"quantization_config": QUANTIZED | {"kv_cache_scheme": FP8}},
            "kv_cache_dtype is 'fp8', and cached keys must be readable",
        ),
        ("gpt_oss", {}, "attention sinks for all heads together"),
        ("olmo2", {}, "vLLM runs this model by transformers' code"),
    ],
    ids=["hybrid", "axes", "fp8", "sinks", "transformers"],
)
def test_models_refused_before_their_weights(family: str, options: Any, sentence: str, tmp_path: Any) -> None:
    """There are none in the directory."""
    model = tiny_model(family, head_dim=32)
    for name, value in {"architectures": [type(model).__name__], **options}.items():
        setattr(model.config, name, value)
    model.config.save_pretrained(tmp_path)
    refused(sentence, configured, {"method": "quest", "dense_layers": []}, tmp_path, skip_tokenizer_init=True)


def test_mistrals_own_format_is_refused_with_the_option_that_reads_the_other(tmp_path: Path) -> None:
    """vLLM prefers it where a repository has both, as Mistral's own have."""
    model, sizes = tiny_model("mistral", head_dim=32), {"dim": 64, "n_layers": 2, "head_dim": 32, "hidden_dim": 96}
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    save_file({"norm.weight": torch.ones(64)}, tmp_path / "consolidated.safetensors")
    sizes |= {"n_heads": 4, "n_kv_heads": 2, "vocab_size": 128}
    (tmp_path / "params.json").write_text(json.dumps(sizes | {"norm_eps": 1e-6, "rope_theta": 1e4}))
    given = {"method": "quest", "dense_layers": []}, tmp_path
    refused("reads its params.json, .*config_format='hf' reads", configured, *given, skip_tokenizer_init=True)
    configured(*given, skip_tokenizer_init=True, config_format="hf")


def test_engines_that_do_not_fit_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.platforms import current_platform

    config = configured({"gates": GATES})
    config.parallel_config.ubatch_size = 2
    refused("microbatches", check_engine, config)
    config.parallel_config.ubatch_size = 0
    monkeypatch.setattr("vllm.v1.attention.backends.fa_utils.uses_fa4_hd256_kernel", lambda size: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    check_engine(config)
    vars(config.model_config)["is_mm_prefix_lm"] = True  # as Gemma 3 with images has it
    refused("tokens of an image see each other", check_engine, config)
    vars(config.model_config)["is_mm_prefix_lm"] = False
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    refused("VLLM_BATCH_INVARIANT", check_engine, config)


def test_drafts_whose_numbers_only_a_gpu_knows() -> None:
    """As engines on GPUs have them; on CPUs vLLM turns both off."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    config = configured({"gates": GATES}, speculative_config=drafts)
    check_engine(config)
    config.speculative_config.enable_adaptive_verification = True
    refused("only a GPU knows how many drafts are verified", check_engine, config)
    config.scheduler_config.async_scheduling = True
    refused(r"drafts are verified asynchronously \(async_scheduling\)", check_engine, config)
