"""A linear layer whose three products run in FP8 or BF16, for any model; its parameters do not change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from narrowgauge import events
from narrowgauge.errors import UsageError
from narrowgauge.kernels.inductor_lowering import teach_inductor
from narrowgauge.nn.module_changes import Change, apply_change, has_own_method, original_class
from narrowgauge.nn.products.bf16_for_now import is_bf16_for_now
from narrowgauge.nn.products.gemm import (
    BF16,
    DOUBLE_BACKWARD,
    MULTIPLE,
    Fp8Caster,
    GemmChoice,
    compute_grad_bias,
    compute_grad_input,
    compute_grad_weight,
    compute_output,
)
from narrowgauge.nn.products.in_graph import InGraph, compute_in_graph, get_graph_key, skip_version_checks
from narrowgauge.nn.products.own_forward import computes_as_linear
from narrowgauge.parameters import is_sharded
from narrowgauge.scaling.operand import Operand
from narrowgauge.scaling.tensor import ScaleTables, ScalingRule, Site, SiteForm, TensorScales
from narrowgauge.weight_copies.casts import WeightCastPlan


@dataclass(frozen=True)
class LinearPlan:
    """How one linear layer is computed."""

    weight: WeightCastPlan
    choice: GemmChoice
    input: Site
    grad: Site
    scales: TensorScales | ScalingRule
    shared_input: SharedInputCast | None = None
    """Holds the cast of an input that several layers read."""
    readers: int = 1
    """How many layers share the input's site, this one included."""
    tables: ScaleTables | None = None
    """The tables of all scales as inputs of a graph that torch.compile makes; None outside of it."""

    @property
    def reads(self) -> tuple[str, str]:
        """The formats of the products that read the input: output and grad_weight."""
        return self.choice.output, self.choice.grad_weight


STORED_SCALE = "weight_scale"
"""Name of the buffer of a layer whose weight is stored in FP8 (stored_fp8.py): what it is multiplied by."""


class NeededGrads(NamedTuple):
    """Which gradients backward must compute; none in evaluation."""

    input: bool
    weight: bool
    bias: bool

    @property
    def of_input(self) -> tuple[bool, bool]:
        """What decides how an input is cast: whether statistics are recorded, and whether grad_weight reads it."""
        return any(self), self.weight


@dataclass(frozen=True)
class LinearForm(InGraph):
    """What equal layers have in common. ``compute`` is such a layer in a compiled graph."""

    choice: GemmChoice
    weight: WeightCastPlan
    """Without site and scales."""
    sites: tuple[SiteForm, SiteForm, SiteForm | None]
    """Those of the input, the gradient and, if it has one, the weight."""
    mode: str
    margin: int
    readers: int
    is_stored: bool
    """Whether the weight is stored in FP8."""

    @staticmethod
    def of(plan: LinearPlan) -> LinearForm:
        site = plan.weight.site
        sites = plan.input.form, plan.grad.form, None if site is None else site.form
        weight = replace(plan.weight, site=None, scales=None, path="", stored_scale=None)
        is_stored = plan.weight.stored_scale is not None
        return LinearForm(plan.choice, weight, sites, plan.scales.mode, plan.scales.margin, plan.readers, is_stored)

    def compute(self, *args: Any) -> Tensor:
        """Compute the layer from the arguments that ``ConvertedLinear.run`` gives."""
        teach_inductor()
        delayed, *needs = args[:4]
        x, weight, bias, stored_scale = args[4:8]
        inputs, tables = args[8:-5], ScaleTables(*args[-5:])
        skip_version_checks((tables.amax, tables.backward_amax, tables.backward_counts, tables.pending))
        groups = (inputs[start : start + 3] for start in range(0, len(inputs), 3))
        forms = (form for form in self.sites if form is not None)
        sites = [Site.from_graph_inputs(form, *group) for form, group in zip(forms, groups, strict=True)]
        rule = ScalingRule(self.mode, self.margin, delayed)
        source, grad, *own = sites
        cast = replace(self.weight, site=own[0] if own else None, scales=rule, stored_scale=stored_scale)
        plan = LinearPlan(cast, self.choice, source, grad, rule, _shared_in_graph, self.readers, tables)
        return run_linear(plan, x, weight, bias, NeededGrads(*needs))


@dataclass
class ConvertedLinear(Change):
    """A linear layer that computes as its plan says."""

    plan: LinearPlan
    differentiable_twice = False

    def __post_init__(self) -> None:
        self.graph_key = get_graph_key(LinearForm.of(self.plan))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # keys are those of a process, and the scales of a copy have another mode

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        weight, bias = module.weight, module.bias
        if is_bf16_for_now() and self.plan.weight.stored_scale is None:
            return _compute_in_bf16(self.plan, x, weight, bias)
        needs = _find_needed_grads(x, weight, bias)
        if not torch.compiler.is_compiling():
            return run_linear(self.plan, x, weight, bias, needs)
        plan, scales = self.plan, self.plan.scales
        assert isinstance(scales, TensorScales)
        # read here, so that the graph is guarded on it; an evaluation reads the tensors first, unless nothing is scaled
        delayed = (any(needs) or scales.mode == "none") and scales.delayed
        inputs = [*plan.input.graph_inputs, *plan.grad.graph_inputs]
        if plan.weight.site is not None:
            inputs += plan.weight.site.graph_inputs
        own = (weight, bias, plan.weight.stored_scale)
        made: Tensor = compute_in_graph(self.graph_key, delayed, *needs, x, *own, *inputs, *scales.tables)
        return made


class SharedInputCast:
    """The cast of an input that several layers read (query, key and value, for example), shared among them.

    A model has one: such layers are called one after another, and the last one clears it. If one of them reads another
    input, as in cross-attention, the input and its cast stay until the next group starts or the engine's forward ends:
    a cast must not outlive its scale. A copy of a model has its own.
    """

    def __reduce__(self) -> Any:
        return SharedInputCast, ()

    def __init__(self) -> None:
        self.left = 0
        self.seen: tuple[Any, Any] = (None, None)
        self.clear()

    def clear(self) -> None:
        self.x: Tensor | None = None
        self.rows: Tensor | None = None
        self.operand = Operand()

    def find(self, plan: LinearPlan, x: Tensor, needs: NeededGrads) -> Operand | None:
        """Return the cast of this input, if it has every format that the layer's products read.

        Tensors of ``torch.inference_mode`` do not say whether they were changed, so that each reader casts them.
        """
        if self.x is not x or self.rows is not plan.input.rows:
            return None
        if self.seen != (_get_version_key(plan, x), needs.of_input):
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

    def put(self, plan: LinearPlan, x: Tensor, needs: NeededGrads, operand: Operand) -> None:
        if plan.readers > 1 and not x.is_inference():
            self.x, self.rows, self.operand = x, plan.input.rows, operand
            self.seen, self.left = (_get_version_key(plan, x), needs.of_input), plan.readers - 1


_shared_in_graph = SharedInputCast()
"""That of the graph that is being traced."""


def _get_version_key(plan: LinearPlan, x: Tensor) -> Any:
    """Return versions of the input and the scales; a traced graph is assumed to change neither between readers."""
    return None if plan.tables is not None else (x._version, plan.scales.moves)


def _find_needed_grads(x: Tensor, weight: Tensor, bias: Tensor | None) -> NeededGrads:
    recorded = torch.is_grad_enabled()
    return NeededGrads(*(recorded and t is not None and t.requires_grad for t in (x, weight, bias)))


def run_linear(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None, needs: NeededGrads) -> Tensor:
    """Return x @ weight.T + bias in BF16, for x of any leading shape."""
    with torch.autocast(x.device.type, enabled=False):
        if not x.numel():  # an expert without tokens
            return _compute_in_bf16(plan, x, weight, bias)
        operand = plan.shared_input.find(plan, x, needs) if plan.shared_input is not None else None
        if operand is None:
            operand = _cast_input(plan, x, needs)
            if plan.shared_input is not None:
                plan.shared_input.put(plan, x, needs, operand)
        output: Tensor = _Linear.apply(x, weight, bias, plan, needs, *operand)  # type: ignore[no-untyped-call]
    count = x.numel() // x.shape[-1]
    return (output if output.shape[0] == count else output[:count]).view(*x.shape[:-1], -1)


def _compute_in_bf16(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output for an evaluation, or an empty one with the layer's shapes and zero gradients."""
    weight = (weight.t() if plan.weight.transposed_weight else weight).to(BF16)
    return F.linear(x.to(BF16), weight, None if bias is None else bias.to(BF16))


def _cast_input(plan: LinearPlan, x: Tensor, needs: NeededGrads) -> Operand:
    """Cast the input to the formats that the products read."""
    rows = _pad_rows(x.detach().reshape(-1, x.shape[-1]))
    operand = Operand()
    if "fp8" in plan.reads:
        transposed, training = needs.weight and plan.choice.grad_weight == "fp8", any(needs)
        operand = Fp8Caster(plan.scales, training, not training, plan.tables).cast(rows, plan.input, transposed)
    return operand._replace(hp=rows.to(BF16)) if "bf16" in plan.reads else operand


class _Linear(torch.autograd.Function):
    """Returns padded rows: a view returned by a Function could not be changed in place by ``ReLU(inplace=True)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        needs: NeededGrads,
        hp: Tensor | None,
        lp: Tensor | None,
        lp_t: Tensor | None,
        inv_scale: Tensor | None,
        inv_scale_t: Tensor | None,
    ) -> Tensor:
        use = plan.weight.use(weight, record=any(needs), backward=needs.input, tables=plan.tables)
        bias_lp = None if bias is None else bias.to(BF16)
        operand = Operand(hp, lp, lp_t, inv_scale, inv_scale_t)
        output = compute_output(operand, use, plan.choice, bias_lp)
        if any(needs):
            source: tuple[Tensor | None, ...] = (hp if needs.weight else None, None, None)
            if needs.weight and plan.choice.grad_weight == "fp8":  # free what only the output product read
                source = (None, lp_t, operand.transposed_inv_scale)
            made = use.get_saved(wide=plan.choice.grad_input != "fp8")
            lacking = made[0 if plan.choice.grad_input == "fp8" else 2] is None
            ctx.save_for_backward(*source, weight if needs.input and lacking else None, *made)
            ctx.plan, ctx.shape, ctx.count = plan, x.shape, x.numel() // x.shape[-1]
            ctx.kinds = x.dtype, None if bias is None else bias.dtype
            ctx.gradient_dtype = use.gradient_dtype
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        plan: LinearPlan = ctx.plan
        with contextlib.nullcontext() if plan.tables is None else events.paused():  # tracing is no event
            return _Linear._compute_grads(ctx, plan, grad)

    @staticmethod
    def _compute_grads(ctx: Any, plan: LinearPlan, grad: Tensor) -> Any:
        hp, lp_t, inv_scale, weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        formats = {plan.choice.grad_input} if needs_x else set()
        formats |= {plan.choice.grad_weight} if needs_weight else set()
        operand = Operand()
        if "fp8" in formats:
            transposed = needs_weight and plan.choice.grad_weight == "fp8"
            operand = Fp8Caster(plan.scales, True, tables=plan.tables).cast(grad, plan.grad, transposed)
        if "bf16" in formats:
            operand = operand._replace(hp=grad.to(BF16))
        grad_input = grad_weight = grad_bias = None
        if needs_x:
            seen = plan.choice.output == "fp8"
            use = plan.weight.use(*([] if weight is None else [weight]), seen=seen, tables=plan.tables)
            use.restore_saved(tuple(kept))
            grad_input = compute_grad_input(operand, use, plan.choice)[: ctx.count].view(ctx.shape).to(ctx.kinds[0])
        if needs_weight:
            source = Operand(hp, None, lp_t, inv_scale)
            grad_weight = compute_grad_weight(operand, source, plan.choice, ctx.gradient_dtype, plan.weight)
            grad_weight = grad_weight.t() if plan.weight.transposed_weight else grad_weight
        if needs_bias:
            # from FP8 with one scale, if it exists: a compiled graph then never writes the gradient in 16 bits
            source = operand if formats and not operand.has_fine_scales else Operand(hp=grad)
            grad_bias = compute_grad_bias(source).to(ctx.kinds[1])
        return grad_input, grad_weight, grad_bias, *[None] * 7


def _pad_rows(rows: Tensor) -> Tensor:
    """Pad with zero rows to a multiple of 16, as FP8's grad_weight needs; they add nothing to its sums."""
    missing = -rows.shape[0] % MULTIPLE  # len(rows) would make the number of rows a constant of a compiled graph
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def explain_misfit(shape: tuple[int, int]) -> str | None:
    """Return why a product with so many outputs and inputs cannot run in FP8, or None if it can."""
    outputs, inputs = shape
    for name, size in (("inputs", inputs), ("outputs", outputs)):
        if size % MULTIPLE:
            return f"{size} {name} are not a multiple of {MULTIPLE}, which FP8 products need"
    return None


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes as nn.Linear does, or as transformers' Conv1D, which has a transposed weight.

    Subclasses count if they do not change the computation.
    """
    return (isinstance(module, nn.Linear) or has_transposed_weight(module)) and explain_not_converted(module) is None


def explain_not_converted(module: nn.Module) -> str | None:
    """Return why a module whose class is linear cannot be converted, or None if it can."""
    cls, weight = original_class(module), module._parameters.get("weight")
    if weight is None or is_lazy(weight):
        return "its weight is computed from other parameters, or not initialized yet"
    if has_own_forward(module):
        return f"{cls.__name__} has its own forward; not converted"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies its weight itself"
    if hasattr(module, "set_requires_gradient_sync"):
        return "FSDP shards it as a separate unit"
    if type(weight) is not nn.Parameter and not is_sharded(weight):
        return f"its weight is a {type(weight).__name__}"
    if weight.is_floating_point() or STORED_SCALE in module._buffers:
        return None
    return f"its weight has dtype {str(weight.dtype).removeprefix('torch.')}"


def has_own_forward(module: nn.Module) -> bool:
    """Whether a linear layer's forward was replaced by another computation, in its class or on the instance."""
    if has_own_method(module, "forward"):
        return True
    has_bias = module._parameters.get("bias") is not None
    return isinstance(module, nn.Linear) and not computes_as_linear(original_class(module), has_bias)


def has_transposed_weight(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(module._parameters.get("weight"), nn.Parameter)


def get_weight_shape(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of outputs and inputs."""
    layer: Any = module
    first, second = layer.weight.shape
    return (second, first) if has_transposed_weight(module) else (first, second)


def convert_linear(module: nn.Module, plan: LinearPlan) -> None:
    """Make the module compute as the plan says; parameters, hooks and state dictionary do not change."""
    apply_change(module, ConvertedLinear(plan))
