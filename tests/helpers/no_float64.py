"""Simulated device of type `mps`: computes on the CPU and, like the real one, without float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

MPS = torch.device("mps")


class OnMps(torch.Tensor):
    """Tensor that reports the device `mps`; `inner` has its values."""

    inner: torch.Tensor
    device = property(lambda self: MPS)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnMps:
        if inner.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        sizes = inner.size(), inner.stride(), inner.storage_offset()
        # PyTorch sees a CPU tensor, because this build has no autograd on other devices.
        tensor = torch.Tensor._make_wrapper_subclass(cls, *sizes, dtype=inner.dtype)
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class SimulatedMps(TorchFunctionMode):
    """Mode in which tensors can be created on `mps` and moved there."""

    def __enter__(self) -> SimulatedMps:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._operations = _Operations()
        self._operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)
        torch.__future__.set_overwrite_module_params_on_conversion(False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            given = (torch.device("cpu"),) if func is torch.Tensor.cpu else args[1:]
            rest = {key: value for key, value in kwargs.items() if key != "copy"}
            device, dtype, *_ = torch._C._nn._parse_to(*given, **rest)
            if device is not None:
                x = args[0] if dtype is None else args[0].to(dtype)
                if device.type == x.device.type:
                    return x
                x = x.detach()
                return OnMps(x.clone()) if device == MPS else x.inner.clone()
        if func is torch.Tensor.tolist and isinstance(args[0], OnMps):
            return args[0].inner.tolist()
        return func(*args, **kwargs)


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation on the inner tensors; wrap results that are on the simulated device."""
    own = [x for x in tree_leaves((args, kwargs)) if isinstance(x, OnMps)]
    device, is_on_mps = kwargs.get("device"), bool(own)
    if device is not None:
        is_on_mps = is_on_mps or torch.device(device).type == "mps"
        kwargs = {**kwargs, "device": torch.device("cpu") if is_on_mps else device}
    args, kwargs = tree_map_only(OnMps, lambda x: x.inner, (args, kwargs))
    result = func(*args, **kwargs)
    if not is_on_mps:
        return result
    # In-place operations return their argument.
    known = {id(x.inner): x for x in own}
    return tree_map_only(
        torch.Tensor, lambda x: known[id(x)] if id(x) in known else OnMps(x), result
    )
