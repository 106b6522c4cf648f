"""The frozen model of a run: check it from its configuration alone, then load it in the run's precision."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from seergate.checks import is_int, is_number
from seergate.distill.config import MAX_LENGTH, TrainConfig
from seergate.distill.distributed import DistributedState
from seergate.errors import SeergateError, did_you_mean, first_line, how_to_install
from seergate.fingerprint import rope_of
from seergate.gates.files import WEIGHTS_FILE
from seergate.models.families import (
    decoder_of,
    family_of,
    full_attention_modules,
    head_dim_of,
    layer_type,
    rope_kind,
    text_config,
    usable_positions,
    why_no_longer,
    why_one_sequence,
)
from seergate.models.gate_bank import GateBank
from seergate.models.loading import base_config, load_base, skeleton
from seergate.models.rope import Rotary
from seergate.ops.backend import choose
from seergate.ops.gate_math import rotate
from seergate.paths import gguf_file, is_local_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from seergate.gates.scorer import Scorer

FROZEN = ("model", "revision", "rope_scaling", "dtype", "quantize", "base_memory_gb", "shard_base", "deepspeed")
"""Options that must be equal for runs to share a frozen model: model identity, placement and process layout."""

NOT_SCALING = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Entries of the model's ``rope_parameters`` that ``rope_scaling`` keeps unless it names them."""

_PACKAGES = {"bnb-4bit": "bitsandbytes", "bnb-8bit": "bitsandbytes", "torchao-int8": "torchao"}


def own_format(shape: Any) -> tuple[str, int | None] | None:
    """Return the format of a quantised checkpoint, and its bits per weight if they are known."""
    own = getattr(shape, "quantization_config", None) or {}
    name, eight = own.get("quant_method", "bitsandbytes"), own.get("load_in_8bit")
    bits = own.get("bits", 4 if own.get("load_in_4bit") else 8 if eight or name == "fp8" else None)
    return (name, bits if is_int(bits) else None) if own else None


def is_divisible(shape: Any) -> bool:
    """Return whether a checkpoint can be sharded: it is not quantised, or in MXFP4, which transformers may convert."""
    own = own_format(shape)
    return own is None or own[0] == "mxfp4"


def fresh_gates(config: TrainConfig, model: PreTrainedModel) -> GateBank:
    """Create the gates of the run, initialised as ``config.init`` says."""
    bank = GateBank.for_model(model, config.gates(head_dim_of(model)))
    if config.anchors:
        bank = bank.with_anchors(config.anchors)
    if config.init == "model":
        for layer, attention in full_attention_modules(model):
            if layer in bank.geometry.layers:
                _begin_as_model(bank.gate(layer), model, layer, attention)
    return bank


def _begin_as_model(gate: Scorer, model: PreTrainedModel, layer: int, attention: nn.Module) -> None:
    """Initialise a gate with the layer's own product. If the layer rotates a part of its channels, or none, or norms
    them after RoPE, this is only near to it.
    """
    config, width, order = text_config(model), head_dim_of(model), None
    kind = rope_kind(config, attention)
    if kind == "plain" and gate.inv_freq is not None and gate.config.gate_dim == width:
        rotary = Rotary(decoder_of(model), attention, layer_type(config, layer), kind)
        home = rotary.frequencies().device  # meta if only shapes are asked for
        units, at = torch.eye(width, device="cpu")[None, None], torch.full((1, width), 1, device="cpu")
        interleaved = torch.arange(width, device="cpu").view(-1, 2).T.flatten()
        ours = rotate(units[..., interleaved], at, gate.inv_freq.cpu(), gate.attention_scaling)
        if home.type != "meta":
            theirs = rotary.rotate(units.to(home), at.to(home)).cpu()
            order = interleaved if torch.allclose(ours, theirs[..., interleaved], atol=1e-3) else None
    scale = float(getattr(attention, "scaling", width**-0.5)) * width**0.5
    gate.begin_as_model(1.0 if math.isclose(scale, 1.0) else scale, order)


def given_gates(config: TrainConfig, fresh: GateBank) -> GateBank | None:
    """Load the gates of ``init_gates`` in float32 and check that they match ``fresh``; ``None`` without the option."""
    if config.init_gates is None:
        return None
    bank, named = GateBank.from_pretrained(config.init_gates).float(), f"init_gates {config.init_gates!r}"
    if config.anchors and set(config.anchors) <= set(bank.geometry.layers):
        bank = bank.subset(config.anchors)
    if problems := bank.geometry.mismatches(fresh.geometry):
        raise SeergateError(f"{named} are for another model: {'; '.join(problems)}")
    here, there = ({**vars(one.config), "layers": one.geometry.layers} for one in (fresh, bank))
    for name, value in there.items():
        if value != here[name]:
            raise SeergateError(f"{named} have {name}={value!r}, this run {here[name]!r}")
    return bank


def frozen_config(path: str, config: TrainConfig) -> Any:
    """Return the frozen model's configuration with the run's RoPE; ``path`` is a directory, GGUF file or Hub id."""
    return with_run_rope(base_config(path, revision=config.revision), config)


def with_run_rope(shape: Any, config: TrainConfig) -> Any:
    """Set the run's RoPE in a model's configuration; raises `SeergateError` if the model does not suit the run."""
    quantize, gguf = config.quantize != "none", gguf_file(config.model) is not None
    whole = "as a GGUF file is read whole and dequantised; save_pretrained makes a directory of it that can be kept so"
    for name, refused, why in (
        ("quantize", quantize and own_format(shape), "which is quantised"),
        ("shard_base", config.shard_base and not is_divisible(shape), "which is quantised"),
        ("quantize", quantize and gguf, whole),
        ("shard_base", config.shard_base and gguf, whole),
        ("base_memory_gb", config.base_memory_gb and gguf, whole),
    ):
        if refused:
            raise SeergateError(f"{name} is {getattr(config, name)!r}; it must be left out for {config.model}, {why}")
    family_of(shape)
    text = shape.get_text_config()
    if config.rope_scaling is not None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        own = getattr(text, "rope_parameters", None) or {}
        if "rope_theta" not in own:
            raise SeergateError(f"rope_scaling is given, but the layers of a {text.model_type} have no RoPE in common")
        kind, factor = config.rope_parameters["rope_type"], config.rope_parameters.get("factor", 1)
        unscaled = {name: own[name] for name in NOT_SCALING if name in own}
        text.rope_parameters = unscaled | config.rope_parameters
        try:
            if kind not in ROPE_INIT_FUNCTIONS:
                raise ValueError(did_you_mean(str(kind), ROPE_INIT_FUNCTIONS))
            if not (is_number(factor) and factor >= 1):
                raise ValueError("its factor must be a number of at least 1")
            text.standardize_rope_params()
            text.validate_rope()
        except (KeyError, TypeError, ValueError) as error:
            raise SeergateError(f"rope_scaling is {config.rope_scaling}: {first_line(error)}") from error
    positions = usable_positions(text)
    if positions is not None and config.max_length > positions and config.max_length != MAX_LENGTH:
        raise SeergateError(
            f"max_length is {config.max_length}, but {why_no_longer(text)}; set --max-length to that at most, or "
            "stretch the positions with --rope-scaling, by a type with constant frequencies such as yarn"
        )
    return shape


def within_positions(config: TrainConfig, shape: Any) -> TrainConfig:
    """Limit ``max_length`` to the model's `usable_positions`; ``shape`` is the configuration from `with_run_rope`."""
    positions = usable_positions(shape.get_text_config())
    return config if positions is None else replace(config, max_length=min(config.max_length, positions))


@dataclass(frozen=True)
class CheckedModel:
    """Facts about the frozen model that a run needs before it reads data.

    Attributes:
        fingerprint: fingerprint of a local model's weights, or revision of a Hub model.
        rope: its RoPE parameters.
        why_one_sample: the reason if a pack may hold only one sample; ``None`` if it holds as many as fit.
        gates: the gates of ``init_gates``; ``None`` if the run trains fresh gates.
        max_length: tokens per pack, limited to the model's positions.
        head_dim: the head dimension.
        vocabulary: number of token embeddings.
    """

    fingerprint: str | None
    rope: Any
    why_one_sample: str | None
    gates: GateBank | None
    max_length: int
    head_dim: int
    vocabulary: int


def check_model(path: str, config: TrainConfig) -> CheckedModel:
    """Check that gates fit the model before data or weights are read."""
    package = _PACKAGES.get(config.quantize)
    if package is not None and importlib.util.find_spec(package) is None:
        raise SeergateError(
            f"quantize is {config.quantize!r}, which needs {package}; {how_to_install('quant')}, or use none"
        )
    shape = frozen_config(path, config)
    bare, length = skeleton(shape), within_positions(config, shape).max_length
    gates = given_gates(config, fresh_gates(config, bare))
    weights = _fingerprint(Path(path)) or config.revision
    why_one, vocabulary = why_one_sequence(text_config(bare)), bare.get_input_embeddings().num_embeddings
    return CheckedModel(weights, rope_of(bare), why_one, gates, length, head_dim_of(bare), vocabulary)


def load_frozen(path: str, config: TrainConfig, world: DistributedState, headless: bool = True) -> PreTrainedModel:
    """Load the frozen model without gradients; if ``headless``, without its LM head, which end-to-end gates need."""
    options = _load_options(config, world)
    if config.shard_base or config.rope_scaling:
        options["config"] = frozen_config(path, config)
    if config.shard_base:
        options |= _sharding(options["config"], world)
    model = load_base(path, revision=config.revision, **options)
    model.requires_grad_(False)
    decoder: Any = decoder_of(model)
    if config.shard_base:
        # The decoder becomes the FSDP root of all layers, so that the next layer is gathered while one computes.
        fully_shard(decoder, mesh=next(decoder.parameters()).device_mesh)
    if headless and not model.config.tie_word_embeddings:  # an unused LM head of a large vocabulary takes a gigabyte
        model.set_output_embeddings(nn.Identity())
    whole = config.base_memory_gb is None and not config.shard_base
    plain = whole and config.quantize == "none" and own_format(model.config) is None
    if headless and plain and world.device.type == "cuda" and choose(world.device) == "triton":
        compile_elementwise(model)
    return model


MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def compile_elementwise(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the decoder's RMSNorms and gated MLPs, so that each reads and writes its activations once.

    The ``forward`` methods are compiled instead of the modules: a compiled module would keep the hooks of the first
    pack. Packs of other lengths cause no recompilation. The model runs without an autograd graph.
    """
    for module in decoder_of(model).modules():
        norm = type(module).__name__.endswith("RMSNorm")
        if norm or {name for name, _ in module.named_children()} == MLP_PARTS:
            module.forward = torch.compile(module.forward, dynamic=True, backend=backend)


def join_all_gathers(model: PreTrainedModel) -> None:
    """If the model is sharded, run one token while other processes run a pack: all must join its all-gathers."""
    decoder = decoder_of(model)
    if isinstance(decoder, FSDPModule):
        with torch.no_grad():
            decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


def offload_folder(config: TrainConfig, world: DistributedState) -> Path:
    """Return the directory for layers that do not fit in memory; it is deleted after the run."""
    return config.run_dir / f"offload-{world.rank}"


def base_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype in which the frozen model computes."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    return torch.bfloat16 if device.type == "cuda" or config.quantize != "none" else torch.float32


def _load_options(config: TrainConfig, world: DistributedState) -> dict[str, Any]:
    dtype = base_dtype(config, world.device)
    options: dict[str, Any] = {"dtype": dtype}
    if config.quantize != "none":
        options |= {"quantization_config": _quantization(config.quantize, dtype), "device_map": {"": world.device}}
    elif config.base_memory_gb is not None:
        options |= _offloading(config, world)
    elif world.device.type != "cpu" and not config.shard_base:
        options["device_map"] = {"": world.device}  # load directly to the device, without a copy in host memory
    return options


def _sharding(shape: Any, world: DistributedState) -> dict[str, Any]:
    """Return the loading options for transformers' FSDP2: each process reads only its shard of every tensor."""
    from transformers.distributed import DistributedConfig

    bare = skeleton(shape)
    # Only the decoder runs, so each of its parts is gathered on its own. The usual plan gathers the last norm together
    # with the LM head, which never runs.
    parts = [name for name, part in decoder_of(bare).named_children() if next(part.parameters(), None) is not None]
    shape.get_text_config().base_model_fsdp_plan = {
        "layers.*" if name == "layers" else name: "free_full_weight" for name in parts
    }
    if "lm_head" in bare.fsdp_plan:
        return {"distributed_config": DistributedConfig(fsdp_size=world.size)}
    # The plan of a vision-language model has no LM head; transformers then drops the embedding that is tied to it.
    if not hasattr(DistributedConfig, "fsdp_plan"):
        raise SeergateError(
            f"shard_base is true; for a {type(bare).__name__} it needs a newer transformers, such as 5.23"
        )
    return {"distributed_config": DistributedConfig(fsdp_size=world.size, fsdp_plan={"lm_head": "keep_full_weight"})}


def _quantization(kind: str, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "torchao-int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "bnb-8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _offloading(config: TrainConfig, world: DistributedState) -> dict[str, Any]:
    """Return the loading options for offload: layers that exceed ``base_memory_gb`` go to host memory, then disk."""
    from accelerate.utils import get_max_memory

    assert config.base_memory_gb is not None
    allowed = int(config.base_memory_gb * 1e9)
    places: dict[str | int, int] = {"cpu": allowed}
    if world.device.type != "cpu":
        places = {world.device.index or 0: allowed, "cpu": get_max_memory()["cpu"] // world.local_size}
    folder = str(offload_folder(config, world))
    return {"device_map": "auto", "max_memory": places, "offload_folder": folder}


def _fingerprint(path: Path) -> str | None:
    """Hash the size and the first and last megabyte of each of a local model's weight files; ``None`` for a Hub id.

    Reading a large model in full would take minutes, and retrained weights differ everywhere.
    """
    if not is_local_model(path):
        return None
    file = gguf_file(path)
    weights = (p for p in path.iterdir() if p.suffix in (".safetensors", ".bin"))
    files = [p for p in weights if p.name != WEIGHTS_FILE] if file is None else [file]  # gates may be beside them
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()
