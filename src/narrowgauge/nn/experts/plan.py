"""What the products of a module's experts need: the casts of its two stacks, and the scales of four tensors.

    site                             tensor                                            format
    <experts>.<gate_up>.input        tokens                                            E4M3
    <experts>.<gate_up>.weight       gate and up of all experts                        E4M3
    <experts>.<down>.input           the activation, times the router's weights        E4M3
    <experts>.<down>.weight          down of all experts                               E4M3
    <experts>.<down>.grad_output     the gradient of the module's output               of the recipe's gradients
    <experts>.<gate_up>.grad_output  the gradient of the activation's input            of the recipe's gradients

Experts share the scale of each tensor. So an expert that is fed rarely has no scale of its own that could be stale: its
tokens have the scale of all tokens, and the scale of the stack follows its weights at each step, fed or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from narrowgauge.nn.experts.find import ExpertsSpec
from narrowgauge.scaling.operand import Operand
from narrowgauge.scaling.tensor import ScalingRule, Site, TensorScales
from narrowgauge.weight_copies.casts import WeightCastPlan

Saved = tuple[Tensor | None, Tensor | None, Tensor | None]


class CastStack(Protocol):
    """A stack of matrices as products read it (``weight_copies.casts.BoundWeight``)."""

    def fp8(self) -> Operand: ...

    def fp8_transposed(self) -> Operand: ...

    def get_saved(self) -> Saved: ...

    def restore_saved(self, kept: Saved) -> CastStack: ...

    @property
    def gradient_dtype(self) -> torch.dtype: ...

    @property
    def path(self) -> str: ...


class StackCast(Protocol):
    """How a stack is cast (``weight_copies.casts.WeightCastPlan``)."""

    def use(self, *weights: Tensor, record: bool = True, seen: bool = False, backward: bool = True) -> CastStack: ...

    @property
    def path(self) -> str: ...

    @property
    def keep_for_backward(self) -> bool: ...

    @property
    def gradient_dtype(self) -> torch.dtype | None: ...


@dataclass(frozen=True)
class ExpertsPlan:
    """How a module's experts compute in FP8."""

    path: str
    spec: ExpertsSpec
    scales: TensorScales | ScalingRule
    up: StackCast
    down: StackCast
    tokens: Site
    hidden: Site
    grad_up: Site
    grad_down: Site
    wide_up: bool = False
    """Whether the first product multiplies in BF16 in forward, as in the first block of a model."""
    wide_down: bool = False
    """The same of the last product."""


def make_experts_plan(
    module: nn.Module,
    path: str,
    spec: ExpertsSpec,
    scales: TensorScales,
    lean: bool,
    wide_up: bool = False,
    wide_down: bool = False,
) -> ExpertsPlan:
    """Return the plan of a module."""

    def cast(name: str) -> WeightCastPlan:
        place = f"{path}.{name}"
        stack: Any = getattr(module, name)
        return WeightCastPlan.of(stack, site=scales.sites[f"{place}.weight"], scales=scales, lean=lean, path=place)

    tokens, hidden, grad_up, grad_down = (
        scales.sites[f"{path}.{name}.{tensor}"]
        for tensor in ("input", "grad_output")
        for name in (spec.gate_up, spec.down)
    )
    casts = cast(spec.gate_up), cast(spec.down)
    return ExpertsPlan(path, spec, scales, *casts, tokens, hidden, grad_up, grad_down, wide_up, wide_down)


class WideStack:
    """A stack of matrices in FP32, cast to nothing."""

    path, gradient_dtype, keep_for_backward = "", torch.float32, False

    def __init__(self, stack: Tensor | None = None) -> None:
        self.stack = stack

    def use(self, *weights: Tensor, record: bool = True, seen: bool = False, backward: bool = True) -> CastStack:
        return WideStack(weights[0])

    def fp8(self) -> Operand:
        assert self.stack is not None
        return Operand(None, self.stack, self.stack.t(), torch.ones((), device=self.stack.device))

    def fp8_transposed(self) -> Operand:
        return self.fp8()

    def get_saved(self) -> Saved:
        return None, None, None

    def restore_saved(self, kept: Saved) -> CastStack:
        return self


def make_fp32_plan(spec: ExpertsSpec) -> ExpertsPlan:
    """Return a plan without rounding, to compare the function with a model's own code."""
    one, nothing = torch.ones(()), torch.zeros(2, dtype=torch.int64)
    site = Site("", torch.float32, one, one, torch.zeros(()), nothing, nothing, nothing)
    stack = WideStack()
    return ExpertsPlan("", spec, ScalingRule("none", 0, True), stack, stack, site, site, site, site)
