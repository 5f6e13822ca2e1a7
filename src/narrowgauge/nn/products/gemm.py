"""The three products of a linear layer, each in FP8 or BF16, and the operands they read.

    output      = input       @ weight.T        [N, I] x [O, I]
    grad_input  = grad_output @ weight          [N, O] x [I, O]    (weight transposed)
    grad_weight = grad_output.T @ input         [O, N] x [I, N]    (both transposed)

Hopper's FP8 products need the summed dimension last in both operands. So each is written as ``a @ b.T`` with a and b
row-major, and FP8 operands have a transposed copy if a product needs it. BF16 products read any layout.

FP8 operands have one scale, or one for each row or block (``scaling/operand.py``): ``multiply_fp8`` takes any pair.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from narrowgauge import events
from narrowgauge.kernels import can_bypass_op, cast, compute_scale, cublas, define_op, is_traced
from narrowgauge.kernels.block_product import can_multiply_blocks, multiply_blocks
from narrowgauge.kernels.cast_rows import cast_rows, record_rows
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.kernels.sum_rows import sum_rows
from narrowgauge.scaling.fine_scales import cast_finely
from narrowgauge.scaling.operand import Operand, get_granularity
from narrowgauge.scaling.tensor import ScaleTables, ScalingRule, Site, TensorScales
from narrowgauge.weight_copies.casts import CastableWeight

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""FP8 products need the summed dimension and the width of the result to be multiples of this."""


DOUBLE_BACKWARD = (
    "FP8 products are differentiable only once, but create_graph=True needs second derivatives; compute the part that "
    "is differentiated twice under engine.forward(double_backward=True), where layers compute in 16 bits instead"
)


def is_graph_retained() -> bool:
    """Whether the current backward may run again (``retain_graph=True``), so that nothing may be freed or changed."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class GemmChoice(NamedTuple):
    """The format of each of the three products: "fp8" or "bf16"; "fp32" where fused code is compared with a model's."""

    output: str = "fp8"
    grad_input: str = "fp8"
    grad_weight: str = "fp8"

    @property
    def without_fp8(self) -> GemmChoice:
        """The same with BF16 in place of FP8."""
        return GemmChoice(*("bf16" if one == "fp8" else one for one in self))


ALL_FP8 = GemmChoice()
ALL_BF16 = GemmChoice("bf16", "bf16", "bf16")
ALL_FP32 = GemmChoice("fp32", "fp32", "fp32")


FAST_DEPTH = 8192
"""Up to this many terms, grad_input uses the tensor cores' fast accumulation, as the output does at any length.
Products take up to a quarter less time on an H200, and lose 0.001 dB at 3,072 terms. grad_weight has as many terms as
tokens, whose terms may agree in sign: fast sums come out too small there, and training is slower (docs/fp8.md)."""


def multiply_fp8(
    a: Tensor,
    b: Tensor,
    inv_a: Tensor,
    inv_b: Tensor,
    out_dtype: torch.dtype = BF16,
    fast: bool = True,
    bias: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Return a @ b.T + bias of FP8 operands divided by their scales: for the tensor, rows or blocks.

    ``fast``: tensor-core accumulation with fewer bits. ``bias`` is BF16, and needs a BF16 result. ``into`` takes the
    result.
    """
    if is_traced(a):
        return _store(_multiply_fp8_op(a, b, inv_a, inv_b, out_dtype, fast, bias), into)
    return _multiply_fp8_into(into, a, b, inv_a, inv_b, out_dtype, fast, bias)


def _multiply_fp8(
    a: Tensor, b: Tensor, inv_a: Tensor, inv_b: Tensor, out_dtype: torch.dtype, fast: bool, bias: Tensor | None
) -> Tensor:
    return _multiply_fp8_into(None, a, b, inv_a, inv_b, out_dtype, fast, bias)


def _multiply_fp8_into(
    into: Tensor | None,
    a: Tensor,
    b: Tensor,
    inv_a: Tensor,
    inv_b: Tensor,
    out_dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
) -> Tensor:
    kinds = get_granularity(inv_a, a), get_granularity(inv_b, b)
    if "block" in kinds:
        return _store(multiply_blocks(a, b, inv_a, inv_b, out_dtype, bias), into)
    has_rows = "row" in kinds
    if has_rows:
        inv_a, inv_b = _give_each_row(inv_a, a), _give_each_row(inv_b, b)
    if not a.is_cuda:
        sums = a.float() @ b.float().t()
        product = sums * inv_a * inv_b.t() if has_rows else sums * (inv_a * inv_b)
        return _store((product if bias is None else product + bias.float()).to(out_dtype), into)
    scaled: dict[str, Any] = {"bias": bias, "out_dtype": out_dtype, "use_fast_accum": fast}
    if not has_rows:
        by_torch = functools.partial(_scaled_mm, a, b.t(), {**scaled, "scale_a": inv_a, "scale_b": inv_b})
        made = cublas.product(a, b.t(), out_dtype, by_torch, (inv_a, inv_b), fast, bias, into)
        return by_torch(into) if made is None else made
    if out_dtype is not torch.float32 or can_return_fp32(a.device):
        return _scaled_mm(a, b.t(), {**scaled, "scale_a": inv_a, "scale_b": inv_b.view(1, -1)}, into)
    one = torch.ones((), device=a.device)
    return multiply_fp8(a, b, one, one, out_dtype, fast, into=into).mul_(inv_a).mul_(inv_b.view(1, -1))


def _give_each_row(inv_scale: Tensor, operand: Tensor) -> Tensor:
    """Return an inverse scale for each row, [rows, 1]."""
    return inv_scale if inv_scale.dim() == 2 else inv_scale.reshape(1, 1).expand(operand.shape[0], 1).contiguous()


def can_return_fp32(device: torch.device) -> bool:
    """Whether torch returns products of operands with row scales in FP32, which grad_weight may need.

    torch leaves them to cuBLAS 12.9 and later on Hopper, and elsewhere to a CUTLASS kernel, which writes 16 bits only
    in torch 2.11 (pytorch #162022, #187569). A forecast assumes Hopper.
    """
    return can_multiply_blocks(device)  # which is in the same versions


def _scaled_mm(a: Tensor, b_t: Tensor, how: dict[str, Any], out: Tensor | None) -> Tensor:
    if out is None or not can_bypass_op(a, b_t):  # torch cannot simulate it with ``out``
        return _store(torch._scaled_mm(a, b_t, **how), out)
    return torch._scaled_mm(a, b_t, **how, out=out)


def _store(made: Tensor, into: Tensor | None) -> Tensor:
    return made if into is None else into.copy_(made)


def multiply_bf16(
    a: Tensor, b_t: Tensor, out_dtype: torch.dtype = BF16, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Return a @ b_t + bias of BF16 operands in any layout, accumulated in FP32. ``into`` takes the result."""
    if is_traced(a):
        return _store(_multiply_bf16_op(a, b_t, out_dtype, bias), into)
    return _multiply_bf16_into(into, a, b_t, out_dtype, bias)


def _multiply_bf16(a: Tensor, b_t: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    return _multiply_bf16_into(None, a, b_t, out_dtype, bias)


def _multiply_bf16_into(
    into: Tensor | None, a: Tensor, b_t: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    if a.is_cuda:
        by_torch = functools.partial(_mm, a, b_t, out_dtype, bias)
        made = cublas.product(a, b_t, out_dtype, by_torch, bias=bias, into=into)
        return by_torch(into) if made is None else made
    product = a.float() @ b_t.float()
    return _store((product if bias is None else product + bias.float()).to(out_dtype), into)


def _mm(a: Tensor, b_t: Tensor, out_dtype: torch.dtype, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if bias is not None:
        return torch.addmm(bias, a, b_t, out=out)
    return torch.mm(a, b_t, out=out) if out_dtype is BF16 else torch.mm(a, b_t, out_dtype=out_dtype, out=out)


# In a compiled graph the products are ops, so that they run with the algorithm that was measured to be the fastest.
_multiply_fp8_op = define_op(
    "multiply_fp8",
    _multiply_fp8,
    lambda a, b, inv_a, inv_b, out_dtype, fast, bias: a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype),
)
_multiply_bf16_op = define_op(
    "multiply_bf16",
    _multiply_bf16,
    lambda a, b_t, out_dtype, bias: a.new_empty((a.shape[0], b_t.shape[1]), dtype=out_dtype),
)


def multiply_wide(
    a: Tensor,
    b_t: Tensor,
    format: str,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Multiply in BF16 or FP32. ``into`` takes the result."""
    if format == "bf16":
        return multiply_bf16(a, b_t, out_dtype or BF16, bias, into)
    product = a @ b_t
    return _store(product if bias is None else product + bias, into)


def add_product(out: Tensor, a: Tensor, b_t: Tensor, factor: float = 1.0, *, replace: bool = False) -> None:
    """Add factor * a @ b_t to a BF16 or FP32 tensor, which may be columns of another; or replace its values."""
    if out.is_cuda or out.dtype is not BF16:
        out.addmm_(a, b_t, beta=0.0 if replace else 1.0, alpha=factor)
        return
    product = (a.float() @ b_t.float()) * factor  # torch's BF16 products on a CPU depend on the layouts
    out.copy_(product if replace else out.float() + product)


def get_address(tensor: Tensor) -> int:
    """Return a tensor's address; 0 for a FakeTensor."""
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()


class HasPath(Protocol):
    """Anything that knows the path of its layer."""

    @property
    def path(self) -> str: ...


def compute_output(x: Operand, weight: CastableWeight, choice: GemmChoice, bias: Tensor | None = None) -> Tensor:
    """Return input @ weight.T + bias in BF16; in FP32 if that is the product's format."""
    if events.is_listening():
        return events.run_product("output", weight.path, _compute_output, x, weight, choice, bias)
    return _compute_output(x, weight, choice, bias)


def _compute_output(x: Operand, weight: CastableWeight, choice: GemmChoice, bias: Tensor | None) -> Tensor:
    if choice.output == "fp8":
        w = weight.fp8()
        assert x.lp is not None and x.inv_scale is not None and w.lp is not None and w.inv_scale is not None
        return multiply_fp8(x.lp, w.lp, x.inv_scale, w.inv_scale, bias=bias)
    assert x.hp is not None
    return multiply_wide(x.hp, weight.wide(choice.output).t(), choice.output, bias=bias)


def compute_grad_input(grad: Operand, weight: CastableWeight, choice: GemmChoice, into: Tensor | None = None) -> Tensor:
    """Return grad_output @ weight in BF16; in FP32 if that is the product's format. ``into`` takes the result."""
    if events.is_listening():
        return events.run_product("grad_input", weight.path, _compute_grad_input, grad, weight, choice, into)
    return _compute_grad_input(grad, weight, choice, into)


def _compute_grad_input(grad: Operand, weight: CastableWeight, choice: GemmChoice, into: Tensor | None) -> Tensor:
    if choice.grad_input == "fp8":
        w, fast = weight.fp8_transposed(), grad.lp is not None and grad.lp.shape[1] <= FAST_DEPTH
        inv_w = w.transposed_inv_scale
        assert grad.lp is not None and grad.inv_scale is not None and w.lp_t is not None and inv_w is not None
        return multiply_fp8(grad.lp, w.lp_t, grad.inv_scale, inv_w, fast=fast, into=into)
    assert grad.hp is not None
    return multiply_wide(grad.hp, weight.wide(choice.grad_input), choice.grad_input, into=into)


def compute_grad_weight(
    grad: Operand, x: Operand, choice: GemmChoice, out: torch.dtype = torch.float32, weight: HasPath | None = None
) -> Tensor:
    """Return grad_output.T @ input, in the dtype of the weight's gradient. ``weight`` is for listeners."""
    if events.is_listening():
        path = "" if weight is None else weight.path
        return events.run_product("grad_weight", path, _compute_grad_weight, grad, x, choice, out)
    return _compute_grad_weight(grad, x, choice, out)


def _compute_grad_weight(grad: Operand, x: Operand, choice: GemmChoice, out: torch.dtype) -> Tensor:
    if choice.grad_weight == "fp8":
        g, x = grad.transposed(), x.transposed()
        inv_g, inv_x = g.transposed_inv_scale, x.transposed_inv_scale
        assert g.lp_t is not None and inv_g is not None and x.lp_t is not None and inv_x is not None
        return multiply_fp8(_pad_columns(g.lp_t), _pad_columns(x.lp_t), inv_g, inv_x, out, fast=False)
    assert grad.hp is not None and x.hp is not None
    return multiply_wide(grad.hp.t(), x.hp, choice.grad_weight, out)


def compute_grad_bias(grad: Operand) -> Tensor:
    """Return the sum of grad_output over its rows, in FP32: of the values that grad_weight sums as well.

    Not for FP8 whose rows or blocks have scales: callers have the gradient in 16 bits.
    """
    if grad.hp is not None:
        return grad.hp.sum(0, dtype=torch.float32)
    lp = grad.lp if grad.lp is not None else grad.lp_t
    assert lp is not None and grad.inv_scale is not None and not grad.has_fine_scales
    return sum_rows(lp, transposed=grad.lp is None) * grad.inv_scale


def _pad_columns(x_t: Tensor) -> Tensor:
    """Pad with columns of zeros to a multiple of 16; they add nothing to the sum over columns."""
    missing = -x_t.shape[1] % MULTIPLE
    return F.pad(x_t.view(torch.uint8), (0, missing)).view(x_t.dtype) if missing else x_t


@dataclass(frozen=True)
class Fp8Caster:
    """Casts tensors to FP8 with delayed or current scaling, and optionally records their statistics."""

    scales: TensorScales | ScalingRule
    record: bool
    """Whether to record amax and counts: once per microbatch in training, not in evaluation or recomputation."""
    evaluating: bool = False
    """Whether to use current scaling whatever scaling training uses: an evaluation must not saturate silently after
    weights of another step or model were loaded."""
    tables: ScaleTables | None = None
    """The inputs of a compiled graph with the scales."""

    @property
    def delayed(self) -> bool:
        # In this order: torch.compile guards on what it reads, and an evaluation is not compiled again after an update.
        return (not self.evaluating or self.scales.mode == "none") and self.scales.delayed

    def amax(self, site: Site) -> Tensor | None:
        return site.amax if self.record else None

    def counts(self, site: Site) -> Tensor | None:
        return site.counts if self.record else None

    def cast(self, x: Tensor, site: Site, transposed: bool) -> Operand:
        """Cast a BF16 or FP32 tensor [N, D] to FP8: one pass with delayed scaling, two with current scaling."""
        if site.granularity != "tensor":
            return cast_finely(
                x, site, self.scales, transposed, record=self.record, margin=self.scales.margin, tables=self.tables
            )
        if self.tables is not None:
            return self._cast_in_graph(x, site, transposed, self.tables)
        scale, inv_scale, amax = self.scale_of(x, site)
        if transposed:
            lp, lp_t = cast.cast_transpose(x, scale, site.dtype, amax, self.counts(site))
            return Operand(None, lp, lp_t, inv_scale)
        return Operand(None, cast.cast(x, scale, site.dtype, amax, self.counts(site)), None, inv_scale)

    def _cast_in_graph(self, x: Tensor, site: Site, transposed: bool, tables: ScaleTables) -> Operand:
        """Cast in a graph that torch.compile makes, where inductor fuses the cast with what computes ``x``."""
        scale, inv_scale = site.scale, site.inv_scale
        if not self.delayed:
            scale = compute_scale(x.abs().amax(1).amax().float(), FP8_MAX[site.dtype], self.scales.margin)
            inv_scale = scale.reciprocal()
        lp, row_amax, saturated, flushed = cast_rows(x, scale, site.dtype)
        lp_t = None
        if self.record:
            made = record_rows(lp, row_amax, saturated, flushed, *tables.locate(site), transposed)
            lp_t = made if transposed else None
        elif transposed:
            lp_t = cast.transpose(lp)
        return Operand(None, lp, lp_t, inv_scale)

    def scale_of(self, x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return scale, inverse scale, and the amax tensor the cast should update (None: recorded already, or off)."""
        if self.delayed:
            return site.scale, site.inv_scale, self.amax(site)
        amax = cast.max_abs(x)
        if self.record:
            torch.maximum(site.amax, amax, out=site.amax)
        scale = compute_scale(amax, FP8_MAX[site.dtype], self.scales.margin)
        return scale, scale.reciprocal(), None
