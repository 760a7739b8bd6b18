"""A CUDA device on paper: code for GPUs runs where there is none, with real values, and may not mix devices.

torch's ``FakeTensorMode`` makes tensors that say they are on ``cuda`` and hold nothing, and refuses operations that mix
devices by the rules of real ones. `OnPaper` lies on top of it: it computes each operation on the host too, and keeps
the result beside the fake tensor. So values decide branches and shapes as they do on a GPU (``item``, ``nonzero``,
masks), results can be compared with those of the CPU, and each wait for the device is counted.

What a walk proves: no operation mixes devices, none is given the host's memory where it needs the device's, and the
code's road for CUDA computes the same numbers. What it cannot: that CUDA has a kernel for an operation, its dtype and
shape, what that kernel rounds, how streams order it, how much memory it takes, how fast it is.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
_HOST, _META = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten


class OnPaper(TorchDispatchMode):
    """Computes on the host what fake tensors only describe. Entered by `paper_gpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """How often the host had to wait for the device, by operation."""
        self.uploads = 0
        """Copies from the host to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_meant, (args, kwargs or {}))
        with _disable_current_modes():
            real = _REPLACED.get(func, func)(*_on_host(args), **_on_host(kwargs))
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in tensors)
        if func is aten._local_scalar_dense.default:
            self._note_wait(func, on_device)
            return real
        if func is aten._fused_sdp_choice.default:
            return real  # which kernel CUDA would take is not known here
        if _sizes_by_values(func, args):
            self._note_wait(func, on_device)
            if len({tensor.device for tensor in tensors}) > 1:
                raise RuntimeError(f"{func} on more than one device: {[tensor.device for tensor in tensors]}")
            device = CUDA if on_device else _HOST
            fake = tree_map(lambda value: _like(value, device), real)
        else:
            fake = func(*args, **kwargs)
        _keep(fake, real)
        if func is aten._to_copy.default and isinstance(fake, torch.Tensor):
            if on_device and fake.device.type == "cpu":
                self._note_wait(func, on_device)
            self.uploads += not on_device and fake.device.type == "cuda"
        return fake

    def _note_wait(self, func: Any, on_device: bool) -> None:
        if on_device:
            self.waits[func.name().removeprefix("aten::")] += 1


@contextlib.contextmanager
def paper_gpu() -> Iterator[OnPaper]:
    """Make ``cuda`` a device for the body; tensors of before are on the host."""
    with (
        mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, {torch.ops.prim.device.default: _device_in_cpp}),
        mock.patch.object(FakeTensor, "data_ptr", lambda tensor: values_of(tensor).data_ptr()),
        mock.patch.object(FakeTensor, "data", property(torch.Tensor.data.__get__, _set_data), create=True),
        FakeTensorMode(allow_non_fake_inputs=True),
        OnPaper() as gpu,
    ):
        yield gpu


def on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf on the device with the values of a tensor on the host; it requires a gradient if that does."""
    return tensor.detach().to(CUDA).requires_grad_(tensor.requires_grad)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor of the body, on the host."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value: torch.Tensor = tensor._value  # type: ignore[attr-defined]
    return value


def assert_values(found: torch.Tensor, expected: torch.Tensor, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Assert that a tensor is on the device and has the values of one on the host."""
    assert found.device == CUDA
    with _disable_current_modes():
        torch.testing.assert_close(values_of(found), values_of(expected).detach(), rtol=rtol, atol=atol)


def move_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """Put the parameters and buffers of a module on the device, tied ones still tied; return it."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                moved[id(parameter)] = torch.nn.Parameter(on_cuda(parameter), parameter.requires_grad)
            setattr(part, name, moved[id(parameter)])
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, on_cuda(buffer))
    return module


def _set_data(tensor: Any, other: Any) -> None:
    """Give a tensor the memory of another one, on whatever device that is."""
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]
    tensor.fake_device, tensor._value = other.fake_device, values_of(other)


def _device_in_cpp(args: Any) -> torch.device:
    """Return what C++ takes for the device of a tensor; in Python, FakeTensor itself answers ``cuda``.

    Autograd and indexing ask for a guard of the device, which the build has for its own devices and for ``meta``.
    """
    device: torch.device = args[0].fake_device
    return _META if args[0].fake_mode.in_kernel_invocation or device == CUDA else device


def _sizes_by_values(func: Any, args: Any) -> bool:
    """Return whether the size of the result depends on values, so that torch waits for the device."""
    if func is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    is_repeat = func is aten.repeat_interleave.Tensor
    return func in (aten.nonzero.default, aten.masked_select.default) or is_repeat


def _meant(leaf: Any) -> Any:
    """Return the device that is meant where C++ says ``meta``, see `_device_in_cpp`."""
    return CUDA if isinstance(leaf, torch.device) and leaf == _META else leaf


def _on_host(tree: Any) -> Any:
    """Return arguments with real tensors, and the host in place of the device."""

    def on_host(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return values_of(leaf)
        if isinstance(leaf, torch.device):
            return _HOST
        return leaf

    return tree_map(on_host, tree)


def _like(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _keep(fake: Any, real: Any) -> None:
    """Keep real results beside fake ones."""
    for description, value in zip(tree_flatten(fake)[0], tree_flatten(real)[0], strict=True):
        if isinstance(description, FakeTensor):
            assert description.shape == value.shape, f"described as {description.shape}, computed as {value.shape}"
            assert description.dtype == value.dtype, f"described as {description.dtype}, computed as {value.dtype}"
            description._value = value  # type: ignore[attr-defined]


def _mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


_REPLACED: dict[Any, Callable[..., torch.Tensor]] = {
    # Products of 16-bit inputs with float32 sums, which torch has on CUDA only.
    aten.mm.dtype: _mm,
    aten.mm.dtype_out: lambda a, b, out_dtype, *, out: out.copy_(_mm(a, b, out_dtype)),
    aten.addmm.dtype: lambda c, a, b, out_dtype: c + _mm(a, b, out_dtype),
    aten.addmm.dtype_out: lambda c, a, b, out_dtype, *, out: out.copy_(c + _mm(a, b, out_dtype)),
}
"""Operations without a kernel on the host."""
