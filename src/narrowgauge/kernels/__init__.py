"""Kernels in Triton, each beside its plain-torch reference and its torch custom op; here is what all of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from narrowgauge.kernels.dry_run import is_dry_run

FP8_MAX: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest finite value of each FP8 format: casts saturate here."""

SCALE_RANGE = (2.0**-100, 2.0**100)
"""Scales stay in here, so that neither they nor their inverses leave FP32 whatever amax a tensor shows."""

F = TypeVar("F", bound=Callable[..., Any])
HAVE_TRITON = find_spec("triton") is not None

interpreting = False
"""Tests of kernels on a CPU set this, with TRITON_INTERPRET=1 in the environment before Triton is imported."""


def jit(function: Callable[..., Any], unspecialized: tuple[str, ...] = ()) -> Any:
    """``triton.jit``; without Triton the function as it is, so that a kernel file can be imported anywhere."""
    if not HAVE_TRITON:
        return function
    import triton

    return triton.jit(function, do_not_specialize=list(unspecialized))


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """``jit`` for a kernel that is not compiled anew for other values of these arguments, such as a row count."""
    return partial(jit, unspecialized=names)


def fitting_scale(amax: Tensor, largest: Tensor | float, margin: int = 0) -> Tensor:
    """The scale that brings an amax to the format's largest number, lowered by the margin; 1 for 0, inf and NaN."""
    good = torch.isfinite(amax) & (amax > 0)
    top = largest if isinstance(largest, Tensor) else torch.full_like(amax, largest, dtype=torch.float32)
    # A tensor divides with one rounding; torch takes a number divided by a tensor as a product with its inverse.
    scale = top / torch.where(good, amax.float(), 1.0) / 2.0**margin
    return torch.where(good, scale.clamp(*SCALE_RANGE), 1.0)


def have_triton() -> bool:
    """Whether Triton is installed; a dry run acts as if it was."""
    return HAVE_TRITON or is_dry_run()


def use_triton(tensor: Tensor) -> bool:
    """Whether a call on ``tensor`` launches a kernel: on CUDA, and where tests ask for Triton's interpreter."""
    return (HAVE_TRITON or is_dry_run()) and (tensor.is_cuda or interpreting)


def direct(*tensors: Tensor) -> bool:
    """Whether a call may launch its kernel itself instead of through its custom op, whose dispatch costs 50 us.

    Not while compiling, nor where a dispatch mode (FakeTensor, selective recomputation, a FLOP counter) must see the
    op; FakeTensors and other subclasses handed around outside their mode are told by their type.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    )


class Recording(Generic[F]):
    """Two custom ops of one function: one that raises the statistics it is given, and one where there are none.

    inductor (torch 2.11 and 2.13) fails on an op whose arguments to change are all None.
    """

    def __init__(self, name: str, function: F, fake: F, mutates: tuple[str, ...]) -> None:
        self._recording = register(name, function, fake, mutates)
        self._pure = register(f"{name}_unrecorded", function, fake)

    def of(self, *statistics: Tensor | None) -> F:
        return self._pure if all(tensor is None for tensor in statistics) else self._recording


def register(name: str, function: F, fake: F, mutates: tuple[str, ...] = ()) -> F:
    """``function`` as the custom op narrowgauge::``name``, whose results have the shapes that ``fake`` returns."""
    torch.library.custom_op(f"narrowgauge::{name}", function, mutates_args=mutates).register_fake(fake)
    op: F = getattr(torch.ops.narrowgauge, name)
    return op
