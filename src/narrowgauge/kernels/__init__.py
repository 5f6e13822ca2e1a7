"""Triton kernels, each with a plain-torch reference and a torch custom op. This file has what all of them share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from narrowgauge.kernels.dry_run import is_dry_run

SCALE_RANGE = (2.0**-100, 2.0**100)
"""Limits of every scale, so that neither a scale nor its inverse overflows or underflows FP32."""

F = TypeVar("F", bound=Callable[..., Any])
HAVE_TRITON = find_spec("triton") is not None

interpreting = False
"""Kernel tests on a CPU set this to True, with TRITON_INTERPRET=1 set before Triton is imported."""


def jit(function: Callable[..., Any], unspecialized: tuple[str, ...] = ()) -> Any:
    """Apply ``triton.jit``. Without Triton return the function unchanged, so that kernel files import anywhere."""
    if not HAVE_TRITON:
        return function
    import triton

    return triton.jit(function, do_not_specialize=list(unspecialized))


def jit_unspecialized(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Apply ``jit`` to a kernel that must not be recompiled when these arguments (a row count, for example) change."""
    return partial(jit, unspecialized=names)


def compute_scale(amax: Tensor, largest: Tensor | float, margin: int = 0) -> Tensor:
    """Return the scale that maps ``amax`` to ``largest`` / 2**margin; 1 where amax is 0, inf or NaN."""
    good = is_positive_and_finite(amax)
    top = largest if isinstance(largest, Tensor) else torch.full_like(amax, largest, dtype=torch.float32)
    # A tensor divided by a tensor rounds once. torch computes number / tensor as number * (1 / tensor).
    scale = top / torch.where(good, amax.float(), 1.0)
    scale = scale / 2.0**margin if margin else scale
    return torch.where(good, scale.clamp(*SCALE_RANGE), 1.0)


def is_positive_and_finite(x: Tensor) -> Tensor:
    """Return where values are above 0, and neither inf nor NaN; torch.isfinite would take twice as many kernels."""
    return (x > 0) & (x < torch.inf)


def have_triton() -> bool:
    """Whether Triton is installed; a dry run acts as if it was."""
    return HAVE_TRITON or is_dry_run()


def use_triton(tensor: Tensor) -> bool:
    """Whether a call on ``tensor`` launches a kernel: on CUDA, or in Triton's interpreter when a test requests it."""
    return (HAVE_TRITON or is_dry_run()) and (tensor.is_cuda or interpreting)


def can_bypass_op(*tensors: Tensor) -> bool:
    """Whether a call may launch its kernel directly and skip its custom op, whose dispatch costs 50 us.

    The op is needed under torch.compile, under a dispatch mode (FakeTensor, selective recomputation, a FLOP counter),
    and for tensor subclasses, which include FakeTensors used outside their mode.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    )


def is_traced(tensor: Tensor) -> bool:
    """Whether a call on ``tensor`` becomes part of a graph that torch.compile makes."""
    return torch.compiler.is_compiling() or isinstance(tensor, FunctionalTensor)


class OpWithOptionalStats(Generic[F]):
    """One function as two custom ops: one that updates the statistics passed to it, one for calls without statistics.

    inductor (torch 2.11 and 2.13) fails on an op whose mutated arguments are all None.
    """

    def __init__(self, name: str, function: F, fake: F, mutates: tuple[str, ...]) -> None:
        self._with_stats = register(name, function, fake, mutates)
        self._without_stats = register(f"{name}_unrecorded", function, fake)

    def select(self, *statistics: Tensor | None) -> F:
        return self._without_stats if all(tensor is None for tensor in statistics) else self._with_stats


def define_op(name: str, function: F, fake: Callable[..., Any], mutates: tuple[str, ...] = ()) -> F:
    """Define an op for compiled graphs as ``register`` does, but without autograd.

    torch.library.custom_op adds Python code that makes any op work with autograd. Calls inside of an
    autograd.Function do not need it: without it, tracing and calling the op take a fraction of the time.
    """
    library = torch.library.Library("narrowgauge", "FRAGMENT")
    library.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"narrowgauge::{name}", fake, lib=library)
    _libraries.append(library)  # an op disappears with its library
    op: F = getattr(torch.ops.narrowgauge, name).default
    return op


_libraries: list[torch.library.Library] = []


def register(name: str, function: F, fake: F, mutates: tuple[str, ...] = ()) -> F:
    """Register ``function`` as custom op narrowgauge::``name``; ``fake`` returns empty tensors of the result shapes.

    Arguments that it changes have no defaults: torch 2.11 fails on calls that leave them out, or pass the default.
    """
    parameters = inspect.signature(function).parameters
    assert all(parameters[argument].default is inspect.Parameter.empty for argument in mutates), name
    torch.library.custom_op(f"narrowgauge::{name}", function, mutates_args=mutates).register_fake(fake)
    op: F = getattr(torch.ops.narrowgauge, name)
    return op
