"""A module by itself, on the inputs and output gradients that the reference's step gave it; and why it errs.

To find the reason, the module is run in FP32 twice more, with operands and result rounded to the candidate's formats:
once with the range they have, once without any limit. With N the noise that each adds,

    range          the candidate is not finite; or N(limited) is a bit worse than N(unlimited)
    accumulation   the candidate's own noise is a bit worse than N(limited): what it computes in between is to blame
    cancellation   N(unlimited), beside the result, is ten times what it was beside the operands: their sum is small
    rounding       none of these: the format's spacing, as it is everywhere

A bit worse is four times the noise, 6 dB.
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
from narrowgauge.kernels import FP8_MAX, compute_scale
from narrowgauge.nn.step_context import StepContext
from narrowgauge.recipe import Recipe
from narrowgauge.validate.layers.sqnr import DTYPES, Tally, rounded, shares_of, spoken
from narrowgauge.validate.layers.step import Call, SameMasks, floats, loss_scale, operand_dtypes, scaling_of

RANGE, CANCELLATION, ACCUMULATION, ROUNDING = "range", "cancellation", "accumulation", "rounding"
UNKNOWN = "unknown"
QUANTITIES = ("output", "grad_input", "grad_weight")
_BIT = 4.0
_TENFOLD = 10.0
_OPERANDS = {"output": ("input", "weight"), "grad_input": ("weight", "grad"), "grad_weight": ("input", "grad")}
_TITLES = {"input": "what it reads", "weight": "its weights", "grad": "the gradient of its output"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Made:
    """What a module made of its calls: lists of tensors, the weights' gradients summed over calls."""

    output: list[Tensor] = field(default_factory=list)
    grad_input: list[Tensor] = field(default_factory=list)
    grad_weight: list[Tensor] = field(default_factory=list)

    def against(self, reference: Made, quantity: str, scale: float = 1.0) -> Tally:
        """The noise beside the reference; ``scale`` is the loss scale, which gradients have."""
        tally = Tally()
        for exact, given in zip(getattr(reference, quantity), getattr(self, quantity), strict=True):
            tally.add(exact, given, 1.0 if quantity == "output" else scale)
        return tally


@dataclass(frozen=True)
class Way:
    """How a module is given its operands: inputs by the number of call and of input, gradients by output's dtype."""

    step_context: StepContext
    read: Callable[[Tensor, int, int], Tensor] = lambda x, *_: x
    take: Callable[[Tensor, torch.dtype], Tensor] = lambda grad, dtype: grad.to(dtype)
    weights: dict[str, Tensor] | None = None
    """In the place of the module's own."""


def as_candidate(engine: Engine, dtypes: Sequence[Sequence[torch.dtype]]) -> Way:
    """As the engine computes: inputs in the formats they had in its own step, gradients by the loss scale."""
    scale = loss_scale(engine)
    return Way(
        engine.step_context,
        lambda x, call, index: x.to(dtypes[call][index]),
        lambda grad, dtype: (grad * scale).to(dtype),
    )


def run_alone(module: nn.Module, calls: Sequence[Call], way: Way, seed: int) -> Made:
    """Each call once more, forward and backward."""
    made = Made()
    names: dict[str, Tensor] = dict(module.named_parameters()) if way.weights is None else way.weights
    own = {name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad}
    trained = [tensor for name, tensor in names.items() if name in own]
    sums: list[Tensor | None] = [None] * len(trained)
    for number, call in enumerate(calls):
        leaves = [
            way.read(x, number, index).detach().clone().requires_grad_(need)
            for index, (x, need) in enumerate(zip(call.inputs, call.needs, strict=True))
        ]
        args, kwargs = call.filled([leaf.clone() for leaf in leaves])  # not the leaf, which must not be written over
        torch.manual_seed(seed)
        with SameMasks(), way.step_context.forward():
            output = module(*args, **kwargs) if way.weights is None else functional_call(module, names, args, kwargs)
        outputs = list(floats(output))
        made.output += [tensor.detach() for tensor in outputs]
        pairs = [
            (tensor, way.take(call.grad_outputs[index], tensor.dtype))
            for index, tensor in enumerate(outputs)
            if index in call.grad_outputs
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not pairs or not (wanted or trained):
            continue
        ends, gradients = zip(*pairs, strict=True)
        with way.step_context.backward():
            grads = torch.autograd.grad(ends, [*wanted, *trained], gradients, allow_unused=True)
        made.grad_input += [grad for grad in grads[: len(wanted)] if grad is not None]
        for index, grad in enumerate(grads[len(wanted) :]):
            if grad is not None:
                before = sums[index]
                sums[index] = grad if before is None else before + grad
    made.grad_weight = [grad for grad in sums if grad is not None]
    return made


@dataclass(frozen=True)
class Formats:
    """What the candidate rounds to where it computes one of a module's quantities; None: nothing is rounded."""

    quantity: str
    input: str | None
    weight: str | None
    grad: str | None
    result: str | None
    scaling: str = "none"
    margin: int = 0
    loss_scale: float = 1.0

    def scale(self, operand: str, x: Tensor) -> float:
        """What a tensor is multiplied by before it is rounded."""
        name = getattr(self, operand)
        largest = FP8_MAX.get(DTYPES[name]) if name in DTYPES else None
        if largest is None or self.scaling == "none":
            gradient = operand == "grad" or (operand == "result" and self.quantity != "output")
            return self.loss_scale if gradient else 1.0
        return float(compute_scale(x.abs().amax(), largest, self.margin))


def formats_of(engine: Engine, path: str, quantity: str, made: Made, read: str | None) -> Formats:
    """The formats of a quantity: FP8 where conversion chose it, else that of the output; ``read`` is the input's."""
    layer = next((layer for layer in engine.conversion.layers if layer.path == path), None)
    if layer is not None:
        result, recipe = "bf16" if quantity != "grad_weight" else None, engine.recipe
        if getattr(layer.choice, quantity) == "bf16":
            return Formats(quantity, "bf16", "bf16", "bf16", result)
        source, weight, grad = (_NAMES[dtype] for dtype in operand_dtypes(layer).values())
        return Formats(quantity, source, weight, grad, result, scaling_of(layer, recipe), recipe.margin)
    low = next((_NAMES[tensor.dtype] for tensor in made.output if tensor.dtype in _NAMES), None)
    if low is None and engine.recipe.compute == "tf32" and path not in engine.kept:
        return Formats(quantity, "tf32", "tf32", "tf32", None)
    weights = engine.model.get_submodule(path).parameters()
    kept = next(
        (_NAMES[weight.dtype] for weight in weights if weight.dtype in _NAMES), None
    )  # lean recipes narrow them
    result = low or {"output": None, "grad_input": read, "grad_weight": kept}[quantity]
    return Formats(quantity, low or read, low or kept, low, result, loss_scale=loss_scale(engine))


@dataclass(frozen=True)
class Explanation:
    """Why a module errs."""

    reason: str
    detail: str
    """What was measured, as the beginning of a sentence."""


class Inquest:
    """Asks for the reason of one module's error in one quantity."""

    def __init__(self, module: nn.Module, calls: Sequence[Call], quantity: str, seed: int) -> None:
        self.module, self.calls, self.quantity, self.seed = module, calls, quantity, seed

    def explain(
        self, engine: Engine, path: str, candidate: Made, dtypes: Sequence[Sequence[torch.dtype]]
    ) -> Explanation:
        """Why what the engine's module at a path made, of inputs in these formats, is not what FP32 makes of them."""
        self.step_context = StepContext(Recipe(), engine.device, False)
        read = next((_NAMES[dtype] for call in dtypes for dtype in call if dtype in _NAMES), None)
        formats = formats_of(engine, path, self.quantity, candidate, read)
        exact = run_alone(self.module, self.calls, Way(self.step_context), self.seed)
        actual = candidate.against(exact, self.quantity, formats.loss_scale)
        limited, _ = self._rounded(exact, formats, True)
        free, beside = self._rounded(exact, formats, False)
        operands = {name: list(self._operand(name)) for name in _OPERANDS[self.quantity]}
        if actual.not_finite or limited.not_finite or _BIT * free.noise < limited.noise >= actual.noise / _BIT:
            return Explanation(RANGE, self._misfit(formats, operands, exact))
        if actual.noise > _BIT * limited.noise:
            floor = f"would leave {spoken(limited.decibels)} dB" if limited.noise else "costs nothing"
            text = f"rounding what it reads and writes {floor}; the rest is lost in what it computes in between"
            return Explanation(ACCUMULATION, text)
        given = sum(self._noise(name, tensors, formats) for name, tensors in operands.items())
        if given and beside.relative > _TENFOLD * given:
            more = 10 * math.log10(beside.relative / given)
            text = f"its terms cancel: the rounding of what it reads is {more:.0f} dB larger beside the result"
            return Explanation(CANCELLATION, text)
        names = [name for operand in operands if (name := getattr(formats, operand))] or [formats.result or "fp32"]
        titles = dict.fromkeys(find_format(name).title for name in names)
        return Explanation(ROUNDING, f"the spacing of {' and '.join(titles)} in what it reads and writes")

    def _rounded(self, exact: Made, formats: Formats, limited: bool) -> tuple[Tally, Tally]:
        """The noise of rounding operands and result, and that of rounding operands alone."""

        def hold(operand: str, x: Tensor) -> Tensor:
            format = formats.result if operand == "weight" and x.dim() < 2 else getattr(formats, operand)
            return rounded(x, format, formats.scale(operand, x), limited)

        weights = {
            name: hold("weight", parameter.detach()).requires_grad_(parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
        }
        way = Way(
            self.step_context,
            lambda x, *_: hold("input", x),
            lambda grad, dtype: hold("grad", grad).to(dtype),
            weights,
        )
        made = run_alone(self.module, self.calls, way, self.seed)
        before = made.against(exact, self.quantity)
        results = [hold("result", tensor) for tensor in getattr(made, self.quantity)]
        return Made(**{self.quantity: results}).against(exact, self.quantity), before

    def _operand(self, name: str) -> Iterator[Tensor]:
        if name == "weight":
            yield from (parameter.detach() for parameter in self.module.parameters())
        for call in self.calls:
            yield from call.inputs if name == "input" else call.grad_outputs.values() if name == "grad" else ()

    def _noise(self, name: str, tensors: list[Tensor], formats: Formats) -> float:
        """How much noise rounding adds to an operand, beside the operand."""
        tally = Tally()
        for x in tensors:
            tally.add(x, rounded(x, getattr(formats, name), formats.scale(name, x), limited=False))
        return tally.relative

    def _misfit(self, formats: Formats, operands: dict[str, list[Tensor]], exact: Made) -> str:
        """Which tensor leaves the format's range most, and how."""
        found = [(_TITLES[name], name, x) for name, tensors in operands.items() for x in tensors]
        found += [("its result", "result", x) for x in getattr(exact, self.quantity)]
        worst = (0.0, "a value on the way leaves the format's range")
        for title, operand, x in found:
            format = getattr(formats, operand)
            if format is None or not x.numel():
                continue
            share, name = shares_of(x, format, formats.scale(operand, x)), find_format(format).title
            low = share.flushed + share.subnormal
            text = f"{low:.0%} of {title} lies below {name}'s normal range, {share.flushed:.0%} is flushed to zero"
            worst = max(worst, (low, text))
            if share.overflow:
                worst = max(worst, (1 + share.overflow, f"{title} goes beyond {name}'s largest number"))
        return worst[1]
