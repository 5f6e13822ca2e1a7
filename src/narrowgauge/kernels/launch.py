"""Launches Triton kernels, and repeats launches with less work on the host.

For each launch Triton determines again which compiled variant of a kernel fits the arguments: 27 microseconds on an
H200's host, of which 18 can be saved by remembering the variant. What decides it is a key: dtype and alignment of each
tensor, the class of each integer (1, a multiple of 16, wide), and all constants. The first launch with a key is
Triton's own, and so is every launch in Triton's interpreter or while a profiler has set launch hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, rehearsal
from narrowgauge.kernels.dry_run import is_dry_run

_WIDE = 2**31
_compiled: dict[Any, tuple[Any, tuple[Any, ...]] | None] = {}
"""The compiled kernel of each key, and the constants in the order of its parameters; None: launch by Triton."""


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch ``kernel[grid](*args, **constants)``; positional arguments come first in its signature."""
    if is_dry_run():
        return
    if rehearsal.noted is None and (not HAVE_TRITON or not hasattr(kernel, "device_caches") or _has_hooks()):
        kernel[grid](*args, **constants)
        return
    key = (kernel, torch._C._cuda_getDevice(), *map(_classify, args), *constants.items())
    known = _compiled.get(key, _UNKNOWN)
    if rehearsal.noted is not None:
        if known is _UNKNOWN:
            rehearsal.note(key, kernel, args, constants)
    elif known is None:
        kernel[grid](*args, **constants)
    elif known is _UNKNOWN:
        rehearsal.wait_for(key)
        _compiled[key] = _remember(kernel, kernel[grid](*args, **constants), len(args), constants)
    else:
        compiled, tail = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(key[1])
        compiled.run(
            x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *tail
        )  # fmt: skip


_UNKNOWN: Any = object()


def launch_tiled(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a kernel that the tensor memory accelerator (TMA) loads tiles for, always by Triton.

    A tensor with the shape of a tile, as a tuple, becomes a descriptor.
    """
    if is_dry_run():
        return
    if hasattr(kernel, "device_caches") and (rehearsal.noted is not None or rehearsal.is_compiling()):
        key = (kernel, torch._C._cuda_getDevice(), *map(_classify, args), *constants.items())
        if rehearsal.noted is not None:
            rehearsal.note(key, kernel, args, constants)
            return
        rehearsal.wait_for(key)
    elif rehearsal.noted is not None:
        return
    from triton.tools.tensor_descriptor import TensorDescriptor

    given = [TensorDescriptor.from_tensor(arg[0], list(arg[1])) if isinstance(arg, tuple) else arg for arg in args]
    kernel[grid](*given, **constants)


def _classify(value: Any) -> Any:
    """Return what Triton specializes a kernel on, for one argument. Integers are never taken for unspecialized."""
    if isinstance(value, tuple):
        return value[0].dtype, value[1]
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1, value % 16 == 0, value >= _WIDE or value < -_WIDE
    return None if value is None else type(value)


def _remember(kernel: Any, compiled: Any, given: int, constants: dict[str, Any]) -> Any:
    """Return what a repeated launch needs, or None if this version of Triton is not as expected."""
    names = [parameter.name for parameter in getattr(kernel, "params", ())][given:]
    parts = ("run", "function", "packed_metadata")
    if not all(name in constants for name in names) or not all(hasattr(compiled, part) for part in parts):
        return None
    return compiled, tuple(constants[name] for name in names)


def _has_hooks() -> bool:
    """Whether something wants to know of launches."""
    hooks = _get_knobs()
    return any(getattr(hook, "calls", hook) for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook))


_knobs: Any = None


def _get_knobs() -> Any:
    global _knobs
    if _knobs is None:
        from triton import knobs

        _knobs = knobs.runtime
    return _knobs
