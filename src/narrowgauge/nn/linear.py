"""A linear layer whose three products run in FP8 or BF16, for any model; the layer's parameters stay what they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.nn.gemm import (
    BF16,
    MULTIPLE,
    CachedWeight,
    Caster,
    GemmChoice,
    Operand,
    backward_input,
    backward_weight,
    forward_output,
)
from narrowgauge.nn.overrides import override
from narrowgauge.scaling.tensor import Site, TensorScales


@dataclass(frozen=True)
class LinearPlan:
    """How one linear layer is computed."""

    weight: CachedWeight
    """Of shape [outputs, inputs], whatever the layer's own layout."""
    choice: GemmChoice
    input: Site
    grad: Site
    scales: TensorScales
    turned: bool = False
    """The layer keeps its weight as [inputs, outputs] (GPT-2's Conv1D in transformers)."""
    slot: Slot | None = None
    """Where the layer looks first for what others have made of the same input, and leaves it for them."""
    readers: int = 1
    """How many layers have the input's site, this one included."""

    @property
    def reads(self) -> tuple[str, str]:
        """The formats of the products that read the input: the first, and the weight's gradient."""
        return self.choice.output, self.choice.grad_weight


class Slot:
    """The input that one of several layers (query, key and value, say) was given last, and its cast, for the others.

    One for a whole model: they are called one after the other, and nothing is held beyond the last of them. Where one
    reads something else, as in cross-attention, an input and its cast are held until the next group begins, or until
    the engine's forward is over: a cast must not outlive the scale it was made by.
    """

    def __init__(self) -> None:
        self.left = 0
        self.seen: tuple[Any, bool] = (None, False)
        self.clear()

    def clear(self) -> None:
        self.x: Tensor | None = None
        self.site: Site | None = None
        self.operand = Operand()

    def find(self, plan: LinearPlan, x: Tensor, needed: bool) -> Operand | None:
        """What was made of this very input, where it is all that the layer's products read."""
        if self.x is not x or self.site is not plan.input or self.seen != (_state(plan, x), needed):
            return None
        operand = self.operand
        transposed = needed and plan.choice.grad_weight == "fp8"
        whole = not ("fp8" in plan.reads and operand.lp is None) and not (transposed and operand.lp_t is None)
        if not whole or ("bf16" in plan.reads and operand.hp is None):
            return None
        self.left -= 1
        if not self.left:
            self.clear()
        return operand

    def put(self, plan: LinearPlan, x: Tensor, needed: bool, operand: Operand) -> None:
        if plan.readers > 1:
            self.x, self.site, self.operand = x, plan.input, operand
            self.seen, self.left = (_state(plan, x), needed), plan.readers - 1


def _state(plan: LinearPlan, x: Tensor) -> Any:
    """Of the input's data and of the scales; a graph that is traced is taken to change neither between the readers."""
    return None if torch.compiler.is_compiling() else (x._version, plan.scales.moves)


def run_linear(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias for x of any leading shape, in BF16."""
    with torch.autocast(x.device.type, enabled=False):
        needed = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        operand = plan.slot.find(plan, x, needed) if plan.slot is not None else None
        if operand is None:
            operand = _cast(plan, x, needed)
            if plan.slot is not None:
                plan.slot.put(plan, x, needed, operand)
        output: Tensor = _Linear.apply(x, weight, bias, plan, needed, *operand)  # type: ignore[no-untyped-call]
    count = x.numel() // x.shape[-1]
    return (output if len(output) == count else output[:count]).view(*x.shape[:-1], -1)


def _cast(plan: LinearPlan, x: Tensor, needed: bool) -> Operand:
    """The input as the products read it."""
    rows = _pad_rows(x.detach().reshape(-1, x.shape[-1]))
    operand = Operand()
    if "fp8" in plan.reads:
        operand = Caster(plan.scales, needed).cast(rows, plan.input, needed and plan.choice.grad_weight == "fp8")
    return operand._replace(hp=rows.to(BF16)) if "bf16" in plan.reads else operand


class _Copies(NamedTuple):
    """A weight's copies. A compiled graph casts whenever it runs: one FP8 copy in both layouts does for both phases.

    Eager, the cache has them for both; and lean recipes rather cast again than hold one until backward.
    """

    weight: CachedWeight
    made: Operand = Operand()

    @classmethod
    def of(cls, plan: LinearPlan, needed: bool) -> _Copies:
        once = needed and plan.choice[:2] == ("fp8", "fp8") and not plan.weight.lean
        if not (once and torch.compiler.is_compiling()):
            return cls(plan.weight)
        return cls(plan.weight, plan.weight.fp8(needed))

    def fp8(self, record: bool = True) -> Operand:
        return self.weight.fp8(record) if self.made.inv_scale is None else self.made

    def bf16(self) -> Tensor:
        return self.weight.bf16()


class _Linear(torch.autograd.Function):
    """Gives padded rows: a view that left a Function could not be changed in place, as ``ReLU(inplace=True)`` does."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        needed: bool,
        hp: Tensor | None,
        lp: Tensor | None,
        lp_t: Tensor | None,
        inv_scale: Tensor | None,
    ) -> Tensor:
        copies = _Copies.of(plan, needed)
        output = forward_output(Operand(hp, lp, lp_t, inv_scale), copies, plan.choice, needed)
        if bias is not None:
            output = output + bias.to(BF16)
        if needed:  # what only the first product read is let go
            hp = hp if plan.choice.grad_weight == "bf16" else None
            ctx.save_for_backward(hp, lp_t, inv_scale, copies.made.lp_t, copies.made.inv_scale)
            ctx.plan, ctx.shape, ctx.kinds = plan, x.shape, (x.dtype, None if bias is None else bias.dtype)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        plan: LinearPlan = ctx.plan
        hp, lp_t, inv_scale, w_lp_t, w_inv_scale = ctx.saved_tensors
        operand = Operand()
        if "fp8" in (plan.choice.grad_input, plan.choice.grad_weight):
            operand = Caster(plan.scales, True).cast(grad, plan.grad, plan.choice.grad_weight == "fp8")
        if "bf16" in (plan.choice.grad_input, plan.choice.grad_weight):
            operand = operand._replace(hp=grad.to(BF16))
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = dweight = dbias = None
        if needs_x:
            count = ctx.shape.numel() // ctx.shape[-1]
            copies = _Copies(plan.weight, Operand(None, None, w_lp_t, w_inv_scale))
            dx = backward_input(operand, copies, plan.choice)[:count].view(ctx.shape).to(ctx.kinds[0])
        if needs_weight:
            source = Operand(hp, None, lp_t, inv_scale)
            dweight = backward_weight(operand, source, plan.choice, plan.weight.gradient_dtype)
            dweight = dweight.t() if plan.turned else dweight
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
    """nn.Linear itself, or transformers' Conv1D, which is one with its weight turned; not what derives from them."""
    return type(module) is nn.Linear or is_turned(module)


def is_turned(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), nn.Parameter)


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs."""
    layer: Any = module
    first, second = layer.weight.shape
    return (second, first) if is_turned(module) else (first, second)


def replace_forward(module: nn.Module, plan: LinearPlan) -> None:
    """Let the module compute by a plan; parameters, hooks and state dictionary stay."""
    layer: Any = module

    def forward(x: Tensor) -> Tensor:
        output: Tensor = run_linear(plan, x, layer.weight, layer.bias)
        return output

    override(module, forward)
