"""Checks before vLLM loads any weights, and the options of vLLM that follow from the gates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.serving.common.checks import check_keys, check_model
from seergate.serving.common.settings import Settings

SUPPORTED = ("0.32", "0.33")
"""Supported minor versions of vLLM. The tests run with 0.32."""

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "seergate.serving.vllm.worker.CPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "seergate.serving.vllm.worker.GPUWorker",
}
READABLE = ("auto", "float32", "float16", "bfloat16")
"""Cache dtypes in which keys are stored without quantization."""


def configured(settings: Settings, engine_args: Any, create: Callable[[], Any]) -> Any:
    """Return the configuration that ``create`` makes from ``engine_args``, with a worker of seergate; sets the block
    size first unless the user did. Refuses options, models and gates that seergate does not support.
    """
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) not in SUPPORTED:
        warnings.warn(
            f"this is vLLM {vllm.__version__}; seergate's plugin was written for {' and '.join(SUPPORTED)} and may "
            "fail with another",
            stacklevel=3,
        )
    bank = settings.bank()
    if engine_args.block_size is None:
        engine_args.block_size = bank.config.block_size if bank is not None else default_page()
    check_page(bank, engine_args.block_size)
    config = create()
    check_engine(config)
    page = config.cache_config.block_size
    check_page(bank, page)
    selector = settings.selector(bank, page)
    check_model(config.model_config.hf_config, bank, selector)
    if selector.anchors and (ranks := config.parallel_config.pipeline_parallel_size) > 1:
        raise SeergateError(
            f"pipeline_parallel_size is {ranks} and anchors {list(selector.anchors)}; a layer cannot read the choice "
            "of an anchor in another process: leave one of them out"
        )
    choose_backend(config.attention_config)
    worker = config.parallel_config.worker_cls
    if worker not in WORKERS:
        raise SeergateError(f"worker_cls is {worker!r}; with seergate it must be left out, on a CPU or a CUDA GPU")
    config.parallel_config.worker_cls = WORKERS[worker]
    return config


def choose_backend(attention_config: Any) -> None:
    """Select FlashAttention on a GPU, where vLLM might choose another backend; refuse one that the user chose."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if not current_platform.is_cuda():
        return
    per_kind, flash_attn = attention_config.backend_per_kind, AttentionBackendEnum.FLASH_ATTN
    if (given := per_kind.get("full_attention", attention_config.backend)) not in (None, flash_attn):
        raise SeergateError(f"the attention backend is {given.name}; with seergate it must be FLASH_ATTN or left out")
    per_kind["full_attention"] = flash_attn


def default_page() -> int | None:
    """Tokens per page without gates. With vLLM's default of 16, summaries would take a sixteenth of a GPU's cache."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else 64


def check_page(bank: Gates | None, page: int | None) -> None:
    """Refuse gates with more than one key per block, and gates whose block is not a whole number of cache pages."""
    from vllm.platforms import CpuArchEnum, current_platform

    if bank is not None:
        check_keys(bank)
    # Of CPUs, only x86 has a kernel for pages of 16 tokens that was tested, vLLM's "vec16".
    small = not current_platform.is_cpu() or current_platform.get_cpu_architecture() == CpuArchEnum.X86
    unit = 16 if small else 32
    if bank is not None and bank.config.block_size % unit:
        raise SeergateError(
            f"these gates are for blocks of {bank.config.block_size} tokens; inside vLLM a block is one page of its "
            f"cache or several, and on this platform a page has a multiple of {unit} tokens: train gates with "
            f"--block-size {unit}, {2 * unit} or {4 * unit}"
        )
    if page is not None and (page % unit or (bank is not None and bank.config.block_size % page)):
        fits = f" that divides the gates' block of {bank.config.block_size}" if bank is not None else ""
        raise SeergateError(f"block_size is {page}; with seergate it must be a multiple of {unit}{fits}")


def check_engine(config: Any) -> None:
    """Refuse engine options and models that the plugin does not support, such as a cache that gates cannot read."""
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.fa_utils import uses_fa4_hd256_kernel

    model, parallel, drafts = config.model_config, config.parallel_config, config.speculative_config
    dtype = config.cache_config.cache_dtype
    if dtype == "auto" and getattr(config.quant_config, "kv_cache_scheme", None) is not None:
        dtype = "fp8"  # as vLLM sets it when it makes the layers
    context = max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    refusals = {
        f"its runner is {model.runner_type!r}": model.runner_type != "generate",
        "kv_transfer_config is given, and blocks from elsewhere have no summaries": config.kv_transfer_config
        is not None,
        f"kv_cache_dtype is {dtype!r}, and cached keys must be readable": dtype not in READABLE,
        "context parallelism spreads the tokens of a block over ranks": context > 1,
        "tensor_parallel_size exceeds the number of KV heads, which would divide groups of query heads": (
            parallel.tensor_parallel_size > model.get_total_num_kv_heads()
        ),
        "drafts are verified asynchronously (async_scheduling), and only a GPU knows which tokens of a row count": (
            drafts is not None and config.scheduler_config.async_scheduling
        ),
        "only a GPU knows how many drafts are verified (enable_adaptive_verification)": (
            drafts is not None and drafts.enable_adaptive_verification
        ),
        "its model has linear-attention or state-space layers, whose states set how many tokens a page of the cache "
        "has, more than a block": model.is_hybrid,
        "its model has positions of several axes, and RoPE is undone by the number of the token": model.uses_mrope,
        "it denoises many tokens at once, which are no drafts": getattr(config, "diffusion_config", None) is not None,
        "vLLM reads its params.json, which names no architecture (config_format='hf' reads its config.json)": (
            model.hf_text_config.model_type == "transformer"  # as vLLM calls all models in Mistral's format
        ),
        "vLLM runs this model by transformers' code, whose RoPE has no table of angles": (
            model.using_transformers_backend()
        ),
        "microbatches (enable_dbo, ubatch_size) do not say which requests are prompts": parallel.use_ubatching,
        "a step's scores are computed in another way if a prompt is in its batch (VLLM_BATCH_INVARIANT)": (
            current_platform.is_cuda() and envs.VLLM_BATCH_INVARIANT
        ),
        "tokens of an image see each other, for which FlashAttention has no mask here (serve text only: "
        "limit_mm_per_prompt={'image': 0})": current_platform.is_cuda() and model.is_mm_prefix_lm,
        "its GPU is not an NVIDIA GPU": not (current_platform.is_cpu() or current_platform.is_cuda()),
        "FlashAttention takes other pages on this GPU for heads of 256 channels (flash_attn_version=2 does not)": (
            current_platform.is_cuda()
            and uses_fa4_hd256_kernel(model.get_head_size())
            and config.attention_config.flash_attn_version != 2
        ),
    }
    for reason, holds in refusals.items():
        if holds:
            raise SeergateError(f"seergate cannot run inside this engine: {reason}")
