"""A linear layer whose three products run in FP8 or BF16, for any model; the layer's parameters stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from narrowgauge.errors import UsageError
from narrowgauge.nn.changes import Change, apply_change, is_replaced, original_class
from narrowgauge.nn.products.gemm import (
    BF16,
    DOUBLE_BACKWARD,
    MULTIPLE,
    Caster,
    GemmChoice,
    Operand,
    backward_input,
    backward_weight,
    forward_output,
)
from narrowgauge.nn.products.weight_casts import WeightPlan
from narrowgauge.optim.sharded import is_sharded
from narrowgauge.scaling.tensor import Site, TensorScales


@dataclass(frozen=True)
class LinearPlan:
    """How one linear layer is computed."""

    weight: WeightPlan
    choice: GemmChoice
    input: Site
    grad: Site
    scales: TensorScales
    slot: Slot | None = None
    """Where the layer looks first for what others have made of the same input, and leaves it for them."""
    readers: int = 1
    """How many layers have the input's site, this one included."""

    @property
    def reads(self) -> tuple[str, str]:
        """The formats of the products that read the input: the first, and the weight's gradient."""
        return self.choice.output, self.choice.grad_weight


class Needs(NamedTuple):
    """Which gradients backward will be asked for; none in evaluation."""

    input: bool
    weight: bool
    bias: bool

    @property
    def of_input(self) -> tuple[bool, bool]:
        """What decides how an input is cast: whether its site sees it, and whether the weight's gradient reads it."""
        return any(self), self.weight


@dataclass
class ConvertedLinear(Change):
    """A linear layer that computes by a plan."""

    plan: LinearPlan
    differentiable_twice = False

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        return run_linear(self.plan, x, module.weight, module.bias)


class Slot:
    """The input that one of several layers (query, key and value, say) was given last, and its cast, for the others.

    One for a whole model: they are called one after the other, and nothing is held beyond the last of them. Where one
    reads something else, as in cross-attention, an input and its cast are held until the next group begins, or until
    the engine's forward is over: a cast must not outlive the scale it was made by. A copy of a model has its own.
    """

    def __reduce__(self) -> Any:
        return Slot, ()

    def __init__(self) -> None:
        self.left = 0
        self.seen: tuple[Any, Any] = (None, None)
        self.clear()

    def clear(self) -> None:
        self.x: Tensor | None = None
        self.site: Site | None = None
        self.operand = Operand()

    def find(self, plan: LinearPlan, x: Tensor, needs: Needs) -> Operand | None:
        """What was made of this very input, where it is all that the layer's products read."""
        if self.x is not x or self.site is not plan.input or self.seen != (_state(plan, x), needs.of_input):
            return None
        operand = self.operand
        transposed = needs.weight and plan.choice.grad_weight == "fp8"
        whole = not ("fp8" in plan.reads and operand.lp is None) and not (transposed and operand.lp_t is None)
        if not whole or ("bf16" in plan.reads and operand.hp is None):
            return None
        self.left -= 1
        if not self.left:
            self.clear()
        return operand

    def put(self, plan: LinearPlan, x: Tensor, needs: Needs, operand: Operand) -> None:
        if plan.readers > 1:
            self.x, self.site, self.operand = x, plan.input, operand
            self.seen, self.left = (_state(plan, x), needs.of_input), plan.readers - 1


def _state(plan: LinearPlan, x: Tensor) -> Any:
    """Of the input's data and of the scales; a graph that is traced is taken to change neither between the readers."""
    return None if torch.compiler.is_compiling() else (x._version, plan.scales.moves)


def run_linear(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias for x of any leading shape, in BF16."""
    with torch.autocast(x.device.type, enabled=False):
        if not x.numel():  # an expert without tokens
            return _empty_linear(plan, x, weight, bias)
        recorded = torch.is_grad_enabled()
        needs = Needs(*(recorded and t is not None and t.requires_grad for t in (x, weight, bias)))
        operand = plan.slot.find(plan, x, needs) if plan.slot is not None else None
        if operand is None:
            operand = _cast(plan, x, needs)
            if plan.slot is not None:
                plan.slot.put(plan, x, needs, operand)
        output: Tensor = _Linear.apply(x, weight, bias, plan, needs, *operand)  # type: ignore[no-untyped-call]
    count = x.numel() // x.shape[-1]
    return (output if len(output) == count else output[:count]).view(*x.shape[:-1], -1)


def _empty_linear(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Nothing to multiply: the shapes and the zero gradients that the layer would give."""
    weight = (weight.t() if plan.weight.turned else weight).to(BF16)
    return F.linear(x.to(BF16), weight, None if bias is None else bias.to(BF16))


def _cast(plan: LinearPlan, x: Tensor, needs: Needs) -> Operand:
    """The input as the products read it."""
    rows = _pad_rows(x.detach().reshape(-1, x.shape[-1]))
    operand = Operand()
    if "fp8" in plan.reads:
        transposed, training = needs.weight and plan.choice.grad_weight == "fp8", any(needs)
        operand = Caster(plan.scales, training, not training).cast(rows, plan.input, transposed)
    return operand._replace(hp=rows.to(BF16)) if "bf16" in plan.reads else operand


class _Linear(torch.autograd.Function):
    """Gives padded rows: a view that left a Function could not be changed in place, as ``ReLU(inplace=True)`` does."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        needs: Needs,
        hp: Tensor | None,
        lp: Tensor | None,
        lp_t: Tensor | None,
        inv_scale: Tensor | None,
    ) -> Tensor:
        use = plan.weight.use(weight, record=any(needs), backward=needs.input)
        output = forward_output(Operand(hp, lp, lp_t, inv_scale), use, plan.choice)
        if bias is not None:
            output = output + bias.to(BF16)
        if any(needs):
            source: tuple[Tensor | None, ...] = (hp if needs.weight else None, None, None)
            if needs.weight and plan.choice.grad_weight == "fp8":  # what only the first product read is let go
                source = (None, lp_t, inv_scale)
            made = use.for_backward()
            lacking = made[0 if plan.choice.grad_input == "fp8" else 2] is None
            ctx.save_for_backward(*source, weight if needs.input and lacking else None, *made)
            ctx.plan, ctx.shape, ctx.kinds = plan, x.shape, (x.dtype, None if bias is None else bias.dtype)
            ctx.gradient_dtype = use.gradient_dtype
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        plan: LinearPlan = ctx.plan
        hp, lp_t, inv_scale, weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        formats = {plan.choice.grad_input} if needs_x else set()
        formats |= {plan.choice.grad_weight} if needs_weight else set()
        operand = Operand()
        if "fp8" in formats:
            transposed = needs_weight and plan.choice.grad_weight == "fp8"
            operand = Caster(plan.scales, True).cast(grad, plan.grad, transposed)
        if "bf16" in formats:
            operand = operand._replace(hp=grad.to(BF16))
        dx = dweight = dbias = None
        if needs_x:
            count = ctx.shape.numel() // ctx.shape[-1]
            seen = plan.choice.output == "fp8"
            use = plan.weight.use(*([] if weight is None else [weight]), seen=seen).in_backward(tuple(kept))
            dx = backward_input(operand, use, plan.choice)[:count].view(ctx.shape).to(ctx.kinds[0])
        if needs_weight:
            source = Operand(hp, None, lp_t, inv_scale)
            dweight = backward_weight(operand, source, plan.choice, ctx.gradient_dtype, plan.weight)
            dweight = dweight.t() if plan.weight.turned else dweight
        if needs_bias:
            dbias = grad.sum(0, dtype=torch.float32).to(ctx.kinds[1])
        return dx, dweight, dbias, *[None] * 6


def _pad_rows(rows: Tensor) -> Tensor:
    """Zero rows up to a multiple of 16, which FP8's grad_weight sums over: they add nothing."""
    missing = -len(rows) % MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def fits(module: nn.Module) -> str | None:
    """Why a linear layer's shape cannot run in FP8, or None where it can."""
    outputs, inputs = shape_of(module)
    for name, size in (("inputs", inputs), ("outputs", outputs)):
        if size % MULTIPLE:
            return f"{size} {name} are not a multiple of {MULTIPLE}, which FP8 products need"
    return None


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes as nn.Linear does, also as a subclass that changes nothing about it.

    Or as transformers' Conv1D, which is one with its weight turned.
    """
    return (isinstance(module, nn.Linear) or is_turned(module)) and why_left(module) is None


def why_left(module: nn.Module) -> str | None:
    """Why a linear layer, one by its class, cannot be computed in its own place; None where it can."""
    cls, weight = original_class(module), module._parameters.get("weight")
    if weight is None or is_lazy(weight):
        return "its weight is computed from others, or not there yet"
    if has_own_forward(module):
        return f"{cls.__name__} has a forward of its own; not converted"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies its weight itself"
    if hasattr(module, "set_requires_gradient_sync"):
        return "it is sharded as a unit of its own"
    if type(weight) is not nn.Parameter and not is_sharded(weight):
        return f"its weight is a {type(weight).__name__}"
    return None if weight.is_floating_point() else f"its weight is of {str(weight.dtype).removeprefix('torch.')}"


def has_own_forward(module: nn.Module) -> bool:
    """Whether a linear layer's class, or somebody on the module itself, has replaced its forward."""
    if is_replaced(module, "forward"):
        return True
    return isinstance(module, nn.Linear) and original_class(module).forward is not nn.Linear.forward


def is_turned(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(module._parameters.get("weight"), nn.Parameter)


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs."""
    layer: Any = module
    first, second = layer.weight.shape
    return (second, first) if is_turned(module) else (first, second)


def convert_linear(module: nn.Module, plan: LinearPlan) -> None:
    """Let the module compute by a plan; parameters, hooks and state dictionary stay."""
    apply_change(module, ConvertedLinear(plan))
