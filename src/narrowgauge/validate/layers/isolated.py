"""Runs a module in isolation, on the inputs and output gradients of the reference's step, and explains its error.

To find the cause, the module is run in FP32 twice more, with operands and result rounded to the candidate's formats:
once with the formats' exponent range, once with an unlimited range. With N the noise of each,

    range          the candidate is not finite; or N(limited) is one bit worse than N(unlimited)
    accumulation   the candidate's own noise is one bit worse than N(limited): the error comes from intermediate results
    cancellation   N(unlimited) relative to the result is ten times that relative to the operands: large terms cancel
    rounding       none of these: the format's normal spacing

One bit worse means four times the noise, 6 dB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from narrowgauge.engine import Engine
from narrowgauge.formats import find_format
from narrowgauge.kernels import compute_scale
from narrowgauge.kernels.cast_block_scales import expand_scales, max_abs_reference
from narrowgauge.kernels.fp8_formats import FP8_DTYPES, FP8_MAX
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.products.emulated import EmulatedLinear
from narrowgauge.nn.step_context import StepContext
from narrowgauge.nn.survey import get_granularity
from narrowgauge.recipe import Recipe
from narrowgauge.validate.layers.sqnr import DTYPES, Tally, format_decibels, measure_shares, round_to_format
from narrowgauge.validate.layers.step import (
    Call,
    FormatIndependentDropout,
    get_loss_scale,
    get_scaling,
    iter_float_tensors,
    operand_dtypes,
)

RANGE, CANCELLATION, ACCUMULATION, ROUNDING = "range", "cancellation", "accumulation", "rounding"
UNKNOWN = "unknown"
QUANTITIES = ("output", "grad_input", "grad_weight")
_BIT = 4.0
_TENFOLD = 10.0
_OPERANDS = {"output": ("input", "weight"), "grad_input": ("weight", "grad"), "grad_weight": ("input", "grad")}
_TITLES = {"input": "its input", "weight": "its weights", "grad": "the gradient of its output"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class ModuleResults:
    """The results of a module's calls: lists of tensors; weight gradients are summed over the calls."""

    output: list[Tensor] = field(default_factory=list)
    grad_input: list[Tensor] = field(default_factory=list)
    grad_weight: list[Tensor] = field(default_factory=list)

    def measure_noise(self, reference: ModuleResults, quantity: str, scale: float = 1.0) -> Tally:
        """The noise relative to the reference. Gradients are divided by ``scale``, the loss scale."""
        tally = Tally()
        for exact, given in zip(getattr(reference, quantity), getattr(self, quantity), strict=True):
            tally.add(exact, given, 1.0 if quantity == "output" else scale)
        return tally


@dataclass(frozen=True)
class OperandCasts:
    """How the operands of a module are cast before it runs."""

    step_context: StepContext
    cast_input: Callable[[Tensor, int, int], Tensor] = lambda x, *_: x
    """Casts an input, given the index of the call and of the input."""
    cast_grad: Callable[[Tensor, torch.dtype], Tensor] = lambda grad, dtype: grad.to(dtype)
    """Casts the gradient of an output, given the output's dtype."""
    weights: dict[str, Tensor] | None = None
    """Replacements for the module's parameters."""


def make_candidate_casts(engine: Engine, dtypes: Sequence[Sequence[torch.dtype]]) -> OperandCasts:
    """The casts of the engine: inputs in the dtypes of its own step, gradients times the loss scale."""
    scale = get_loss_scale(engine)
    return OperandCasts(
        engine.step_context,
        lambda x, call, index: x.to(dtypes[call][index]),
        lambda grad, dtype: (grad * scale).to(dtype),
    )


def run_isolated(module: nn.Module, calls: Sequence[Call], casts: OperandCasts, seed: int) -> ModuleResults:
    """Repeats each call, forward and backward."""
    results = ModuleResults()
    names: dict[str, Tensor] = dict(module.named_parameters()) if casts.weights is None else casts.weights
    own = {name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad}
    trained = [tensor for name, tensor in names.items() if name in own]
    sums: list[Tensor | None] = [None] * len(trained)
    for number, call in enumerate(calls):
        leaves = [
            casts.cast_input(x, number, index).detach().clone().requires_grad_(need)
            for index, (x, need) in enumerate(zip(call.inputs, call.needs, strict=True))
        ]
        # Clones, because the module may write to its inputs in place.
        args, kwargs = call.fill_arguments([leaf.clone() for leaf in leaves])
        torch.manual_seed(seed)
        with FormatIndependentDropout(), casts.step_context.forward():
            output = module(*args, **kwargs) if casts.weights is None else functional_call(module, names, args, kwargs)
        outputs = list(iter_float_tensors(output))
        results.output += [tensor.detach() for tensor in outputs]
        pairs = [
            (tensor, casts.cast_grad(call.grad_outputs[index], tensor.dtype))
            for index, tensor in enumerate(outputs)
            if index in call.grad_outputs
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not pairs or not (wanted or trained):
            continue
        ends, gradients = zip(*pairs, strict=True)
        with casts.step_context.backward():
            grads = torch.autograd.grad(ends, [*wanted, *trained], gradients, allow_unused=True)
        results.grad_input += [grad for grad in grads[: len(wanted)] if grad is not None]
        for index, grad in enumerate(grads[len(wanted) :]):
            if grad is not None:
                before = sums[index]
                sums[index] = grad if before is None else before + grad
    results.grad_weight = [grad for grad in sums if grad is not None]
    return results


@dataclass(frozen=True)
class Formats:
    """The formats that the candidate rounds to when it computes a quantity of a module; None for no rounding."""

    quantity: str
    input: str | None
    weight: str | None
    grad: str | None
    result: str | None
    scaling: str = "none"
    margin: int = 0
    loss_scale: float = 1.0
    granularity: str = "tensor"

    def scale(self, operand: str, x: Tensor) -> Tensor | float:
        """The factor that a tensor is multiplied by before rounding, or the factors of its rows or values."""
        name = getattr(self, operand)
        largest = FP8_MAX.get(DTYPES[name]) if name in DTYPES else None
        if largest is None or self.scaling == "none":
            gradient = operand == "grad" or (operand == "result" and self.quantity != "output")
            return self.loss_scale if gradient else 1.0
        if self.granularity == "row" and x.dim() > 1:
            summed_last = self.quantity == "output" or (self.quantity, operand) == ("grad_input", "grad")
            summed = (-1,) if summed_last else tuple(range(x.dim() - 1))
            return compute_scale(x.abs().amax(summed, keepdim=True), largest, self.margin)
        if self.granularity == "block" and x.dim() > 1:
            along = x.reshape(-1, x.shape[-1])
            turned = self.quantity == "grad_weight"  # tokens are summed
            along = along.t() if turned else along
            scale = compute_scale(max_abs_reference(along, operand == "weight"), largest, self.margin)
            each = expand_scales(scale, *along.shape)
            return (each.t() if turned else each).reshape(x.shape)
        return float(compute_scale(x.abs().amax(), largest, self.margin))


def find_formats(engine: Engine, path: str, quantity: str, results: ModuleResults, input_format: str | None) -> Formats:
    """The formats of a quantity: FP8 if conversion chose it, else that of the module's output."""
    layer = next((layer for layer in engine.conversion.layers if layer.path == path), None)
    if layer is not None:
        result, recipe = "bf16" if quantity != "grad_weight" else None, engine.recipe
        if getattr(layer.choice, quantity) == "bf16":
            return Formats(quantity, "bf16", "bf16", "bf16", result)
        source, weight, grad = (_NAMES[dtype] for dtype in operand_dtypes(layer, recipe).values())
        granularity = get_granularity(layer, recipe)
        scaling = get_scaling(layer, recipe)
        return Formats(quantity, source, weight, grad, result, scaling, recipe.margin, granularity=granularity)
    if path in engine.conversion.experts:
        gradients, recipe = _NAMES[FP8_DTYPES[engine.recipe.first_gradients_format]], engine.recipe
        return Formats(quantity, "fp8_e4m3", "fp8_e4m3", gradients, "bf16", recipe.scaling, recipe.margin)
    low = next((_NAMES[tensor.dtype] for tensor in results.output if tensor.dtype in _NAMES), None)
    if low is None and engine.recipe.compute == "tf32" and path not in engine.kept:
        return Formats(quantity, "tf32", "tf32", "tf32", None)
    weights = engine.model.get_submodule(path).parameters()
    weight_format = next(
        (_NAMES[weight.dtype] for weight in weights if weight.dtype in _NAMES), None
    )  # lean recipes narrow them
    result = low or {"output": None, "grad_input": input_format, "grad_weight": weight_format}[quantity]
    return Formats(quantity, low or input_format, low or weight_format, low, result, loss_scale=get_loss_scale(engine))


@dataclass(frozen=True)
class Explanation:
    """The cause of a module's error."""

    reason: str
    detail: str
    """The measurement, as the beginning of a sentence."""


class ErrorAnalysis:
    """Finds the cause of one module's error in one quantity."""

    def __init__(self, module: nn.Module, calls: Sequence[Call], quantity: str, seed: int) -> None:
        self.module, self.calls, self.quantity, self.seed = module, calls, quantity, seed

    def explain(
        self, engine: Engine, path: str, candidate: ModuleResults, dtypes: Sequence[Sequence[torch.dtype]]
    ) -> Explanation:
        """Explains the difference between a candidate's results and FP32.

        Args:
            engine: The candidate's engine.
            path: The path of the module.
            candidate: The module's results in isolation.
            dtypes: The dtypes of its inputs in each call.
        """
        emulated = find_change(engine.model.get_submodule(path), EmulatedLinear)
        if emulated is not None:
            return Explanation(ROUNDING, emulated.emulation.describe(self.quantity))
        self.step_context = StepContext(Recipe(), engine.device, False)
        input_format = next((_NAMES[dtype] for call in dtypes for dtype in call if dtype in _NAMES), None)
        formats = find_formats(engine, path, self.quantity, candidate, input_format)
        exact = run_isolated(self.module, self.calls, OperandCasts(self.step_context), self.seed)
        actual = candidate.measure_noise(exact, self.quantity, formats.loss_scale)
        limited, _ = self._measure_rounding(exact, formats, True)
        unlimited, operands_only = self._measure_rounding(exact, formats, False)
        operands = {name: list(self._iter_operands(name)) for name in _OPERANDS[self.quantity]}
        if actual.not_finite or limited.not_finite or _BIT * unlimited.noise < limited.noise >= actual.noise / _BIT:
            return Explanation(RANGE, self._describe_range_error(formats, operands, exact))
        if actual.noise > _BIT * limited.noise:
            floor = f"allows {format_decibels(limited.decibels)} dB" if limited.noise else "is exact"
            text = f"rounding its operands and result {floor}; the rest of the error comes from intermediate results"
            return Explanation(ACCUMULATION, text)
        given = sum(self._operand_noise(name, tensors, formats) for name, tensors in operands.items())
        if given and operands_only.relative > _TENFOLD * given:
            more = 10 * math.log10(operands_only.relative / given)
            text = (
                f"its terms cancel: the rounding error of its operands is {more:.0f} dB larger relative to the result"
            )
            return Explanation(CANCELLATION, text)
        names = [name for operand in operands if (name := getattr(formats, operand))] or [formats.result or "fp32"]
        titles = dict.fromkeys(find_format(name).title for name in names)
        return Explanation(ROUNDING, f"rounding of its operands and result to {' and '.join(titles)}")

    def _measure_rounding(self, exact: ModuleResults, formats: Formats, limited: bool) -> tuple[Tally, Tally]:
        """The noise of rounding operands and result, and the noise of rounding only the operands."""

        def round_operand(operand: str, x: Tensor) -> Tensor:
            format = formats.result if operand == "weight" and x.dim() < 2 else getattr(formats, operand)
            return round_to_format(x, format, formats.scale(operand, x), limited)

        weights = {
            name: round_operand("weight", parameter.detach()).requires_grad_(parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
        }
        casts = OperandCasts(
            self.step_context,
            lambda x, *_: round_operand("input", x),
            lambda grad, dtype: round_operand("grad", grad).to(dtype),
            weights,
        )
        results = run_isolated(self.module, self.calls, casts, self.seed)
        operands_only = results.measure_noise(exact, self.quantity)
        rounded = [round_operand("result", tensor) for tensor in getattr(results, self.quantity)]
        return ModuleResults(**{self.quantity: rounded}).measure_noise(exact, self.quantity), operands_only

    def _iter_operands(self, name: str) -> Iterator[Tensor]:
        if name == "weight":
            yield from (parameter.detach() for parameter in self.module.parameters())
        for call in self.calls:
            yield from call.inputs if name == "input" else call.grad_outputs.values() if name == "grad" else ()

    def _operand_noise(self, name: str, tensors: list[Tensor], formats: Formats) -> float:
        """The relative noise of rounding an operand."""
        tally = Tally()
        for x in tensors:
            tally.add(x, round_to_format(x, getattr(formats, name), formats.scale(name, x), limited=False))
        return tally.relative

    def _describe_range_error(self, formats: Formats, operands: dict[str, list[Tensor]], exact: ModuleResults) -> str:
        """Describes the tensor with the most values outside the format's range."""
        found = [(_TITLES[name], name, x) for name, tensors in operands.items() for x in tensors]
        found += [("its result", "result", x) for x in getattr(exact, self.quantity)]
        worst = (0.0, "an intermediate value is outside the format's range")
        for title, operand, x in found:
            format = getattr(formats, operand)
            if format is None or not x.numel():
                continue
            share, name = measure_shares(x, format, formats.scale(operand, x)), find_format(format).title
            low = share.flushed + share.subnormal
            text = f"{low:.0%} of {title} is below {name}'s normal range, {share.flushed:.0%} is flushed to zero"
            worst = max(worst, (low, text))
            if share.overflow:
                worst = max(worst, (1 + share.overflow, f"{title} exceeds {name}'s largest number"))
        return worst[1]
