"""Linear layers whose operands are rounded to a block format (MXFP8, MXFP4, NVFP4) and multiplied in BF16.

    output      = Q(input)    @ Q(weight).T          blocks along the inputs
    grad_input  = Q(grad)     @ Q(weight.T).T        blocks along the outputs
    grad_weight = Q(grad.T)   @ Q(input.T).T         blocks along the tokens

Q quantizes to blocks along the dimension that is summed, as hardware needs it, so each tensor is rounded twice.
Elements times scales of blocks have few bits and are exact in BF16; products are summed in FP32. The scales of tensors
(NVFP4) multiply the sum. So the results are those of hardware with these formats, but for the order of sums.

Where the recipe says so, gradients are rounded stochastically, and both operands of grad_weight are multiplied by a
random Hadamard matrix first, the same in all layers and steps (``scaling/round_matrix.py``).

torch.compile does not see into these layers, and would only cut the model into pieces around them: engines do not
compile models that are emulated.

Heads stay in BF16, as in NVIDIA's recipes for these formats. So do layers with dimensions that are not a multiple of
the block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.block_formats import BLOCK_FORMATS, BlockFormat, ScaleRule
from narrowgauge.errors import UsageError
from narrowgauge.events import is_listening, report_rounding, run_product
from narrowgauge.kernels.round_blocks import HADAMARD_BLOCK
from narrowgauge.nn.find_heads import find_heads
from narrowgauge.nn.matrix_inventory import LayerUse, explain_kept_fp32
from narrowgauge.nn.module_changes import Change, apply_change
from narrowgauge.nn.products.gemm import BF16, multiply_wide
from narrowgauge.nn.products.linear import get_weight_shape, has_transposed_weight, is_linear
from narrowgauge.parameters import gradient_dtype
from narrowgauge.recipe import Recipe
from narrowgauge.scaling.block_quantize import Rounding
from narrowgauge.scaling.round_matrix import RoundedMatrix, round_matrix, spread_outliers

FORMATS = {"mxfp4": ("mxfp4", "mxfp4"), "nvfp4": ("nvfp4", "nvfp4")}
"""By name: the formats of inputs and weights, and of gradients."""
SCALE_RULES: dict[str, ScaleRule] = {"mxfp8_e4m3": "up", "mxfp8_e5m2": "up"}
"""NVIDIA's recipe for MXFP8 rounds scales up, so that nothing saturates: 31.5 dB instead of 30.7 for normal numbers.
The others follow their specifications."""
DOUBLE_BACKWARD = (
    "emulated products are differentiable only once, but create_graph=True needs second derivatives; compute the part "
    "that is differentiated twice under engine.forward(double_backward=True), where layers compute in BF16 instead"
)


@dataclass(frozen=True)
class Emulation:
    """How operands are rounded."""

    forward: BlockFormat
    """Of inputs and weights."""
    gradients: BlockFormat
    rounding: Rounding
    """Of gradients."""
    has_hadamard: bool

    @staticmethod
    def of(recipe: Recipe) -> Emulation:
        """Return what a recipe's fields say."""
        forward, gradients = FORMATS.get(recipe.emulate, ("mxfp8_e4m3", f"mxfp8_{recipe.gradients_format}"))
        rounding: Rounding = "stochastic" if recipe.gradient_rounding == "stochastic" else "nearest"
        return Emulation(BLOCK_FORMATS[forward], BLOCK_FORMATS[gradients], rounding, recipe.hadamard == "random")

    def describe(self, quantity: str) -> str:
        """Return what is rounded for a product (output, grad_input or grad_weight)."""
        formats = [self.forward] if quantity == "output" else [self.gradients, self.forward]
        titles = dict.fromkeys(format.title for format in formats)
        return f"rounding of its operands to {' and '.join(titles)} (emulated)"

    def get_format(self, operand: str) -> tuple[BlockFormat, ScaleRule, Rounding]:
        """Return how an operand (input, weight or gradient) is rounded: its format, the rule for scales, rounding."""
        if operand == "gradient":
            return self.gradients, SCALE_RULES.get(self.gradients.name, "floor"), self.rounding
        return self.forward, SCALE_RULES.get(self.forward.name, "floor"), "nearest"

    def round(self, operand: str, x: Tensor, *, with_blocks: bool = False) -> RoundedMatrix:
        """Round an operand along its last dimension."""
        format, rule, rounding = self.get_format(operand)
        return round_matrix(x, format, rounding=rounding, scale_rule=rule, with_blocks=with_blocks)

    def spread(self, x: Tensor) -> Tensor:
        """Return an operand of grad_weight [D, tokens] as it is rounded, with columns of zeros up to whole blocks."""
        return spread_outliers(x, _draw_signs(x.device)) if self.has_hadamard else x


@functools.cache
def _draw_signs(device: torch.device) -> Tensor:
    """Return the signs of the Hadamard matrix, once per device: a copy to a GPU would wait for it."""
    bits = torch.randint(0, 2, (HADAMARD_BLOCK,), generator=torch.Generator().manual_seed(0), device="cpu")
    return (bits * 2 - 1).to(device)


class EmulatedLinear(Change):
    """A linear layer that rounds its operands."""

    differentiable_twice = False

    def __init__(self, emulation: Emulation, path: str) -> None:
        self.emulation, self.path = emulation, path

    def round(self, product: str, **operands: Tensor) -> tuple[RoundedMatrix, RoundedMatrix]:
        """Round the two operands of a product, named input, weight or gradient, along their last dimensions."""
        left, right = (self._round(product, name, x) for name, x in operands.items())
        return left, right

    def _round(self, product: str, operand: str, x: Tensor) -> RoundedMatrix:
        made = self.emulation.round(operand, x, with_blocks=is_listening())
        if made.blocks is not None:
            report_rounding(operand, product, self.path, x, made.blocks)
        return made

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        weight = module.weight.t() if has_transposed_weight(module) else module.weight
        with torch.autocast(x.device.type, enabled=False):
            rows: Tensor = _Products.apply(x, weight, self, gradient_dtype(module.weight))  # type: ignore[no-untyped-call]
            made = rows.view(*x.shape[:-1], len(weight))  # here: code may change it in place
            return made if module.bias is None else made + module.bias.to(BF16)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: EmulatedLinear, dtype: torch.dtype) -> Tensor:
        rows = x.detach().reshape(-1, x.shape[-1]).to(BF16)
        ctx.save_for_backward(rows, weight)
        ctx.layer, ctx.shape, ctx.dtypes = layer, x.shape, (x.dtype, dtype)
        operands = layer.round("output", input=rows, weight=_widen(weight))
        made: Tensor = run_product("output", layer.path, _multiply, *operands, BF16)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        rows, weight = ctx.saved_tensors
        layer: EmulatedLinear = ctx.layer
        emulation, path = layer.emulation, layer.path
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1]).to(BF16)
        of_input = of_weight = None
        if needs_input:
            operands = layer.round("grad_input", gradient=grad, weight=_widen(weight).t())
            made = run_product("grad_input", path, _multiply, *operands, BF16)
            of_input = made.view(ctx.shape).to(ctx.dtypes[0])
        if needs_weight:
            left, right = (emulation.spread(one.t()) for one in (grad, rows))
            operands = layer.round("grad_weight", gradient=left, input=right)
            of_weight = run_product("grad_weight", path, _multiply, *operands, ctx.dtypes[1])
        return of_input, of_weight, None, None


def _widen(weight: Tensor) -> Tensor:
    return weight.detach() if weight.dtype in (BF16, torch.float16) else weight.detach().float()


def _multiply(a: RoundedMatrix, b: RoundedMatrix, dtype: torch.dtype) -> Tensor:
    """Return a @ b.T, summed in FP32 and rounded once."""
    product = multiply_wide(a.values, b.values.t(), "bf16", torch.float32)
    for scale in (a.tensor_scale, b.tensor_scale):
        product = product if scale is None else product * scale
    return product.to(dtype)


def find_layers(model: nn.Module, recipe: Recipe) -> dict[str, LayerUse]:
    """Return by path how each linear layer computes under an emulation: rounded, or in BF16 and why."""
    emulation, name = Emulation.of(recipe), recipe.emulate.upper()
    modules, heads = dict(model.named_modules()), find_heads(model)
    found: dict[str, LayerUse] = {}
    for path, module in modules.items():
        if not is_linear(module) or explain_kept_fp32(modules, path, recipe):
            continue
        misfit = [size for size in get_weight_shape(module) if size % emulation.forward.block]
        if path in heads:
            found[path] = LayerUse("head", ("bf16",) * 3, f"heads stay in BF16 in the emulation of {name}")
        elif misfit:
            reason = f"{misfit[0]} is not a multiple of {name}'s block of {emulation.forward.block}"
            found[path] = LayerUse("linear", ("bf16",) * 3, reason)
        else:
            reason = f"emulated: operands rounded to {name}, multiplied in BF16"
            found[path] = LayerUse("linear", (recipe.emulate,) * 3, reason)
    return found


def list_rounded(found: dict[str, LayerUse], recipe: Recipe) -> list[str]:
    """Return the paths of the layers of ``find_layers`` that round their operands."""
    return [path for path, use in found.items() if use.formats[0] == recipe.emulate]


def emulate_layers(model: nn.Module, recipe: Recipe) -> dict[str, LayerUse]:
    """Make linear layers round their operands; return by path how each computes now."""
    found = find_layers(model, recipe)
    for path in list_rounded(found, recipe):
        apply_change(model.get_submodule(path), EmulatedLinear(Emulation.of(recipe), path))
    return found
