"""Compiles kernels before they are launched, many at the same time.

Triton compiles a kernel at its first launch, and the host waits: half a second for each of the 30 to 40 variants of a
first step. Inside ``rehearsing`` nothing is launched. What would have been launched is noted, and then compiled by a
thread for each core, as Triton's compiler and ptxas do not hold Python's lock. A launch waits for its own kernel only.
A variant that was not foreseen is compiled at its launch, as without a rehearsal.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_THREADS = 16


class Tiles(NamedTuple):
    """A tensor that is read by tiles, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]

    def describe(self) -> Any:
        """Return a descriptor for Triton's compiler."""
        from triton.runtime.jit import MockTensor
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(MockTensor(self.dtype), list(self.shape), list(self.strides), list(self.tile))


class Variant(NamedTuple):
    """A kernel, and what decides how it is compiled: dtypes in place of tensors, other arguments as they are.

    In place of a tensor that is read by tiles there is a ``Tiles``.
    """

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


noted: dict[Any, Variant] | None = None
"""The variants of a rehearsal by the keys of their launches; None if there is none."""
_pending: dict[Any, Future[None]] = {}
"""What is being compiled, by the keys of launches."""
_compiling: dict[Any, Future[None]] = {}
"""The same by what Triton compiles: launches with different integers may share a kernel."""


def note(key: Any, kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> None:
    """Note a launch. Triton's stand-in for a tensor is aligned: other tensors are left to their launch, and so is a
    kernel of the interpreter."""
    assert noted is not None
    tensors = [value[0] if isinstance(value, tuple) else value for value in args]
    tensors = [value for value in tensors if isinstance(value, Tensor)]
    can_compile = hasattr(kernel, "device_caches") and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    if key not in noted and can_compile:
        noted[key] = Variant(kernel, tuple(map(_omit_values, args)), constants)


def _omit_values(value: Any) -> Any:
    if isinstance(value, tuple):
        tensor, tile = value
        return Tiles(tensor.dtype, tuple(tensor.shape), tensor.stride(), tile)
    return value.dtype if isinstance(value, Tensor) else value


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Launch nothing inside the context, and start to compile the kernels afterwards. Their results are undefined."""
    global noted
    assert noted is None, "a rehearsal inside of another"
    found: dict[Any, Variant] = {}
    noted = found
    try:
        yield
    finally:
        noted = None
    start_compiling(found)


def start_compiling(variants: dict[Any, Variant]) -> None:
    """Compile kernels for the current device in other threads, or load them from Triton's cache on disk."""
    if not variants:
        return
    device = torch.cuda.current_device()

    def compile_one(variant: Variant) -> None:
        torch.cuda.set_device(device)
        with contextlib.suppress(Exception):  # the launch raises it again, with its own traceback
            args = (value.describe() if isinstance(value, Tiles) else value for value in variant.args)
            variant.kernel.warmup(*args, grid=(1,), **variant.constants)

    pool = ThreadPoolExecutor(min(len(variants), MOST_THREADS, os.cpu_count() or 1), "compile kernels")
    for key, variant in variants.items():
        form = device, *_describe(variant)
        if form not in _compiling:
            variant.kernel.device_caches[device]  # made by the first to ask, and two threads may be first
            _compiling[form] = pool.submit(compile_one, variant)
        _pending[key] = _compiling[form]
    pool.shutdown(wait=False)


def is_compiling() -> bool:
    """Whether there are kernels of launches that have not come yet."""
    return bool(_pending)


def wait_for(key: Any) -> None:
    """Wait until the kernel of a launch is compiled, if that has been started."""
    if (future := _pending.pop(key, None)) is not None:
        future.result()


def _describe(variant: Variant) -> tuple[Any, ...]:
    """Return what Triton compiles a kernel for: as ``launch`` has it, without integers that do not matter."""
    parameters = variant.kernel.params[: len(variant.args)]
    forms = [
        value if isinstance(value, torch.dtype)
        else (value.dtype, value.tile) if isinstance(value, Tiles)
        else type(value) if type(value) is not int or parameter.do_not_specialize
        else (value == 1, value % 16 == 0, abs(value) >= 2**31)
        for value, parameter in zip(variant.args, parameters, strict=True)
    ]  # fmt: skip
    return variant.kernel, *forms, *variant.constants.items()
