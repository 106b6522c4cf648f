"""The pretended GPU: a tensor type, the ops on it, and what is patched where PyTorch asks for a real device."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
HERE = os.path.dirname(__file__)
PACKAGES = ("/seergate/", "/transformers/", "/tests/")

waits: Counter[str] = Counter()
"""How often the host waits for the device, or reads from it, by function; see `recorded`."""


class MixedDevices(RuntimeError):
    """One op got tensors of both devices."""


class Pretended(torch.Tensor):
    """A tensor on the pretended GPU, with its values in ``host``."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> "Pretended":
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        with torch.inference_mode(False):  # the numbers know whether they were made in it
            made = torch.Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, device=CUDA, **layout)
        made.host = host
        return made

    def __repr__(self) -> str:
        return f"Pretended({self.host!r})"

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_lists_copied(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_lists_copied(index), value)

    def tolist(self) -> Any:
        waited("tolist")
        return self.host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, kwargs or {})


class Dispatch(TorchDispatchMode):
    """Runs ops without a tensor of the device among their arguments, which may make one."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, kwargs or {})


def waited(what: str) -> None:
    """Count a wait, by the innermost function that belongs to a package of `PACKAGES`."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(HERE) and any(name in path for name in PACKAGES):
            name = max(PACKAGES, key=path.rfind)
            waits[f"{name[1:]}{path.rpartition(name)[2]} {frame.f_code.co_name}: {what}"] += 1
            return
        frame = frame.f_back  # type: ignore[assignment]


@contextlib.contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Count the waits within."""
    waits.clear()
    yield waits


def run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Check the devices of an op and run it on the values in host memory."""
    if composite(op):
        with Dispatch():
            return op.decompose(*args, **kwargs)
    name = op._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in tensors if isinstance(x, Pretended)]
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if here and name in KERNELS:
        return tree_map(Pretended, KERNELS[name](*tree_map(_host, args), **kwargs))
    check(name, args, tensors, here)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if device == "cuda":
        kwargs["device"] = torch.device("cpu")
    result = op(*tree_map(_host, args), **tree_map(_host, kwargs))
    if name == "_local_scalar_dense" or not isinstance(result, (Tensor, tuple, list)):
        return result
    if name == "_to_copy" and result is _host(args[0]):
        result = result.clone()
    there = isinstance(args[0], Pretended) if name == "copy_" else bool(here) and device != "cpu"
    if not (there or device == "cuda"):
        return result
    by_id = {id(x.host): x for x in here}  # an op in place returns the tensor that it was given
    return tree_map(lambda x: by_id[id(x)] if id(x) in by_id else Pretended(x) if isinstance(x, Tensor) else x, result)


@cache
def composite(op: Any) -> bool:
    """Whether an op consists of others, which inference mode does not resolve."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def check(name: str, args: Any, tensors: list[Tensor], here: list[Pretended]) -> None:
    """Count waits, and raise `MixedDevices` where CUDA would refuse the op."""
    elsewhere = [x for x in tensors if not isinstance(x, Pretended)]
    if name in ("copy_", "_to_copy"):
        target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        if isinstance(source, Pretended) and not isinstance(target, Pretended | None):
            waited("copy to the host")
        return
    if name in ("_local_scalar_dense", "nonzero") and here:
        waited("item" if name == "_local_scalar_dense" else name)
    if name.startswith(("index.", "index_put", "_index_put", "_unsafe_index")) or name == "index":
        if here and not isinstance(tensors[0], Pretended):
            raise MixedDevices(f"{name}: indices on cuda:0 for a tensor in host memory")
        if here and "put" in name and elsewhere and elsewhere[-1] is tensors[-1] and elsewhere[-1].ndim:
            raise MixedDevices(f"{name}: values in host memory for a tensor on cuda:0")
        if here and elsewhere:
            waited("indices in host memory")
        if any(isinstance(x, Pretended) and x.dtype == torch.bool for x in tensors[1:]):
            waited("mask as index")
        return
    if here and any(x.ndim for x in elsewhere):
        raise MixedDevices(f"{name}: cuda:0 and host memory, {[tuple(x.shape) for x in elsewhere if x.ndim]}")


def _lists_copied(index: Any) -> Any:
    """An index of a tensor; lists in it are copied to the device."""
    if isinstance(index, tuple):
        return tuple(map(_lists_copied, index))
    if not isinstance(index, list):
        return index
    waited("copy from pageable memory")
    return Pretended(torch.tensor(index, device="cpu"))


def _host(x: Any) -> Any:
    return x.host if isinstance(x, Pretended) else x


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, dropout: float, causal: bool, *, scale: float):
    """`_scaled_dot_product_efficient_attention`: the log-sum-exp is padded to 32 rows."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    sums = torch.nn.functional.pad(scores.logsumexp(-1), (0, -scores.shape[-2] % 32), value=torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v, sums, torch.zeros(()), torch.zeros(())


def _flash(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *rest: Any, scale: float, **_: Any):
    """`_flash_attention_forward` of packed segments: the log-sum-exp is ``[H, T]``."""
    assert q_ends.dtype == torch.int32 and torch.equal(q_ends, k_ends) and rest[3], "segments, causal"
    group, out, sums = q.shape[1] // k.shape[1], torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for a, b in zip(q_ends.tolist(), q_ends.tolist()[1:], strict=False):
        parts = [
            x[a:b].float().transpose(0, 1)[None].repeat_interleave(n, 1) for x, n in ((q, 1), (k, group), (v, group))
        ]
        o, lse, *_ = _efficient(*parts, None, True, 0.0, True, scale=scale)
        out[a:b], sums[:, a:b] = o[0].transpose(0, 1).to(q.dtype), lse[0, :, : b - a]
    return out, sums, *(torch.zeros(2) for _ in range(3))


KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_efficient_attention": _efficient,
    "_flash_attention_forward": _flash,
}
"""Kernels of GPUs, in PyTorch."""


def default_device() -> torch.device | str:
    """The device of the innermost ``with torch.device(...)``. `torch.get_default_device` makes a tensor to find it."""
    contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return contexts[-1].device if contexts else "cpu"


@contextlib.contextmanager
def pretended() -> Iterator[torch.device]:
    """Pretend that there is a GPU; yields its device."""
    tensor, as_tensor, to = torch.tensor, torch.as_tensor, torch.Tensor.to

    def on_device(make: Any) -> Any:
        def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if isinstance(data, Pretended):
                return data if device is None and not kwargs else data.to(kwargs.get("dtype", data.dtype))
            if torch.device(device or default_device()).type != "cuda":
                return make(data, *args, device=device, **kwargs)
            waited("copy from pageable memory")
            return Pretended(make(data, *args, device="cpu", **kwargs))

        return made

    def moved(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = to(x, *args, **kwargs)
        if isinstance(result, Pretended) and not isinstance(x, Pretended) and not hasattr(x, "pinned"):
            waited("copy from pageable memory")
        return result

    def pinned(x: Tensor, *_: Any) -> Tensor:
        copy = x.clone()
        copy.pinned = True  # type: ignore[attr-defined]
        return copy

    cuda = {
        "_lazy_init": lambda: None,
        "device": lambda *_: contextlib.nullcontext(),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=80_000_000_000),
        "max_memory_allocated": lambda *_: 0,
        "empty_cache": lambda: None,
    }
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, make in (("tensor", tensor), ("as_tensor", as_tensor)):
            stack.enter_context(mock.patch.object(torch, name, on_device(make)))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", moved))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pinned))
        stack.enter_context(mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True))
        stack.enter_context(Dispatch())
        # `Module.to` replaces parameters, instead of what they hold.
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        torch.__future__.set_swap_module_params_on_conversion(True)
        yield CUDA
