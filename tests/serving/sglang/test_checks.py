"""What does not fit is refused in the process that was called, before SGLang starts others or loads weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.plugins import load_plugins

from seergate import GateBank, GateConfig, SeergateError
from seergate.serving.sglang.checks import check_page
from tests.support.models import tiny_model
from tests.support.reasoner import GATES, REASONER


def resolve(settings: Any, **options: Any) -> Any:
    """Have SGLang work out the options of an engine."""
    load_plugins()
    from sglang.srt.server_args import ServerArgs

    given = {
        "model_path": REASONER,
        "device": "cpu",
        "attention_backend": "seergate",
        "json_model_override_args": json.dumps({} if settings is None else {"seergate": settings}),
        "page_size": 32,
        "skip_tokenizer_init": True,
    }
    args = ServerArgs(**{**given, **options})
    args.resolve_once()
    return args


@pytest.mark.parametrize(
    ("settings", "options"),
    [({"gates": GATES, "token_budget": 128}, {}), (None, {"attention_backend": "torch_native", "page_size": 1})],
    ids=["with seergate", "without"],
)
def test_what_fits_is_left_alone(settings: Any, options: Any) -> None:
    assert resolve(settings, **options).attention_backend == options.get("attention_backend", "seergate")


@pytest.mark.parametrize(
    ("settings", "options", "sentence"),
    [
        (None, {}, "the attention backend is seergate, without options"),
        ({"gate": GATES}, {}, "no key 'gate' under seergate; did you mean 'gates'?"),
        ({"gates": GATES, "dense_layers": [7]}, {}, r"dense_layers holds \[7\]; the model has the layers 0..3"),
        ({"gates": GATES}, {"page_size": 64}, "--page-size is 64; it must be the gates' block of 32 tokens"),
        ({"method": "quest"}, {"page_size": None}, "--page-size is 1; it is the block of this method"),
        ({"gates": GATES}, {"attention_backend": "torch_native"}, "the attention backend is torch_native for prompts"),
        (
            {"gates": GATES},
            {"attention_backend": "torch_native", "decode_attention_backend": "seergate"},
            "torch_native for prompts and seergate for decoding; .* it must be seergate for both",
        ),
        ({"gates": GATES}, {"device": "cuda"}, "it runs on 'cuda'"),
        ({"gates": GATES}, {"tp_size": 2}, "tp_size is 2"),
        ({"gates": GATES}, {"pp_size": 2}, "pp_size is 2"),
        ({"gates": GATES}, {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is 'fp8_e5m2'"),
        (
            {"gates": GATES},
            {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1},
            "drafts are verified",
        ),
        ({"gates": GATES}, {"enable_mixed_chunk": True}, "prompts and decoding requests are mixed"),
        ({"gates": GATES}, {"enable_lmcache": True}, "pages may come from elsewhere"),
        ({"gates": GATES}, {"enable_hierarchical_cache": True}, "pages may come from elsewhere"),
        ({"gates": GATES}, {"enable_unified_cache_external_linker": True}, "pages may come from elsewhere"),
        ({"gates": GATES}, {"enable_torch_compile": True}, "its decode steps are compiled"),
        ({"gates": GATES}, {"model_impl": "transformers"}, "SGLang runs this model by transformers' code"),
    ],
)
def test_what_does_not_fit_is_refused(settings: Any, options: Any, sentence: str) -> None:
    with pytest.raises(SeergateError, match=sentence):
        resolve(settings, **options)


def test_sglang_must_know_that_it_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    with pytest.raises(SeergateError, match="export SGLANG_USE_CPU_ENGINE=1"):
        resolve({"gates": GATES, "token_budget": 128})


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
SCALED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("qwen3_next", {}, "its model has linear-attention layers"),
        ("olmo3", {}, "SGLang reads models of type 'olmo3' by a configuration of its own"),
        ("smollm3", {}, "SGLang runs this model by transformers' code"),
        ("gemma3_text", {"rope_parameters": SCALED}, "SGLang rotates this Gemma 3's keys by other angles"),
        ("qwen3", {"rope_parameters": MROPE}, "its model has positions with several axes"),
    ],
)
def test_models_that_are_refused(family: str, options: Any, sentence: str, tmp_path: Path) -> None:
    """There are no weights in the directory."""
    model = tiny_model(family, head_dim=32)
    for name, value in {"architectures": [type(model).__name__], **options}.items():
        setattr(model.config, name, value)
    model.config.save_pretrained(tmp_path)
    settings = {"method": "quest", "dense_layers": []}
    with pytest.raises(SeergateError, match=sentence):
        resolve(settings, model_path=str(tmp_path), disable_radix_cache=family == "qwen3_next")


@pytest.mark.parametrize(
    ("config", "page", "sentence"),
    [
        (GateConfig(block_size=32), 1, "--page-size is 1; it must be"),
        (GateConfig(block_size=32, gate_dim=16, scorer="msa"), 32, "these gates have the scorer 'msa'"),
    ],
)
def test_pages_that_do_not_fit(config: Any, page: int, sentence: str) -> None:
    with pytest.raises(SeergateError, match=sentence):
        check_page(GateBank.for_model(tiny_model("qwen3"), config), page)
