"""Checks before SGLang starts a process or loads weights."""

from __future__ import annotations

import os
from typing import Any

from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.serving.common.checks import check_keys, check_model
from seergate.serving.common.settings import Settings
from seergate.serving.sglang import NAME


def settings_of(hf_config: Any) -> Settings | None:
    """The plugin's options, read from the model's configuration, where SGLang puts them; ``None`` without any."""
    return Settings.read(vars(hf_config))


def check_arguments(server_args: Any) -> None:
    """Refuse resolved options that the plugin does not support; does nothing for an engine without seergate."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, resolved_view

    args, model = resolved_view(server_args), model_config_of(server_args)
    config = model.hf_config
    settings, backends = settings_of(config), attention_backends_of(args)
    if settings is None and NAME not in backends:
        return
    if set(backends) != {NAME}:
        raise SeergateError(
            f"the attention backend is {backends[0]} for prompts and {backends[1]} for decoding; with seergate, or "
            "options under that key, it must be seergate for both"
        )
    if settings is None:
        raise SeergateError(
            "the attention backend is seergate, without options; give them by --json-model-override-args "
            '\'{"seergate": {"gates": "ORG/NAME", "token_budget": 4096}}\''
        )
    check_server(args, model)
    bank = settings.bank()
    check_page(bank, args.page_size)
    check_model(config, bank, settings.selector(bank, args.page_size))


def check_page(bank: Gates | None, page: int) -> None:
    """Refuse gates without one compressed key per block, and a page size that does not divide their block."""
    if bank is None:
        if page < 8:
            raise SeergateError(f"--page-size is {page}; it is the block of this method, and must be 8 or more")
        return
    check_keys(bank)
    if bank.config.block_size % page or page == 1:
        raise SeergateError(
            f"--page-size is {page}; it must be the gates' block of {bank.config.block_size} tokens, or divide it"
        )


def check_server(args: Any, model: Any) -> None:
    """Refuse options and language models that the plugin does not support; ``model`` is SGLang's ``ModelConfig``."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelImpl
    from sglang.srt.model_loader.utils import get_resolved_model_impl

    config, text = model.hf_config, model.hf_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    refusals = {
        f"it runs on {args.device!r}; only the CPU has the attention that is extended here": args.device != "cpu",
        "its CPU engine is off: export SGLANG_USE_CPU_ENGINE=1": os.environ.get("SGLANG_USE_CPU_ENGINE") != "1",
        f"tp_size is {args.tp_size}, and gates are not divided": args.tp_size != 1,
        f"pp_size is {args.pp_size}, and layers are counted in one process": args.pp_size != 1,
        f"kv_cache_dtype is {args.kv_cache_dtype!r}, and cached keys must be readable": args.kv_cache_dtype != "auto",
        "drafts are verified (speculative_algorithm)": args.speculative_algorithm is not None,
        "prompts and decoding requests are mixed (enable_mixed_chunk), and all would be read densely": (
            args.enable_mixed_chunk
        ),
        "its decode steps are compiled (enable_torch_compile), unlike torch_native": args.enable_torch_compile,
        "its model has linear-attention layers, for which SGLang takes another backend": (
            mambaish_config(model) is not None
        ),
        f"SGLang reads models of type {config.model_type!r} by a configuration of its own": (
            type(config).__module__.startswith("sglang.")
        ),
        "SGLang runs this model by transformers' code, whose attention is not SGLang's": (
            get_resolved_model_impl(model) is ModelImpl.TRANSFORMERS
        ),
        "SGLang rotates this Gemma 3's keys by other angles than those of its layers' table": (
            text.model_type == "gemma3_text"
            and (
                rope.get("full_attention", {}).get("rope_type", "default") != "default"
                or "Gemma3ForConditionalGeneration" in (config.architectures or ())
            )
        ),
        "its model has positions with several axes": "mrope_section" in rope,
        "pages may come from elsewhere (enable_hierarchical_cache, enable_lmcache, enable_flexkv, "
        "enable_unified_cache_external_linker, radix_cache_backend, disaggregation_mode), without what is kept of "
        "their blocks": (
            args.enable_hierarchical_cache
            or args.enable_unified_cache_external_linker
            or args.enable_lmcache
            or args.enable_flexkv
            or args.radix_cache_backend is not None
            or args.disaggregation_mode != "null"
        ),
    }
    for reason, holds in refusals.items():
        if holds:
            raise SeergateError(f"seergate cannot run inside this server: {reason}")
