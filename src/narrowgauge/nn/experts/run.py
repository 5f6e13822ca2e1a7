"""Experts as one function with a hand-written backward, in FP8. S slots contain all pairs of tokens and experts.

    forward     x_s = FP8(x[token of s])                       gathered and cast in one pass
                u   = x_s GateUp_e'                            BF16
                a   = FP8(w f(gate) up)                        with the router's weight w of the slot
                out = sum over a token's slots: a Down_e'
    backward    g_s = FP8(grad[token of s])                    in both layouts
                v   = g_s Down_e                               the gradient of a
                du  = FP8(gradient of u)                       in both layouts; also a again, transposed; and grad_w
                grad_x      = sum over a token's slots: du GateUp_e
                grad_Down   = sum over an expert's slots: g_s' a
                grad_GateUp = sum over an expert's slots: du' x_s, with x_s gathered again

In a model's first block some products multiply in BF16 in forward (``ExpertsPlan.wide_up``, ``wide_down``). Backward
casts what it reads of their operands, and records the largest values.

What backward keeps: x in BF16 [N, D], u [S, 2 F], the slots, and the stacks' transposed copies (unless weights are cast
again, as in lean recipes). Nothing waits for the GPU: how many tokens an expert has is known there only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.errors import UsageError
from narrowgauge.kernels import compute_scale
from narrowgauge.kernels.experts import products, wide
from narrowgauge.kernels.experts.activation import activate_experts, activate_experts_backward
from narrowgauge.kernels.experts.rows import gather_cast, sum_slots
from narrowgauge.kernels.experts.slots import Slots, assign_slots
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.nn.experts.arguments import ignore_others
from narrowgauge.nn.experts.plan import CastStack, ExpertsPlan, StackCast
from narrowgauge.nn.fused.rehearse import rehearse_function
from narrowgauge.nn.products.gemm import BF16, DOUBLE_BACKWARD, Fp8Caster
from narrowgauge.scaling.tensor import Site


class Needs(NamedTuple):
    """Which gradients backward must compute."""

    tokens: bool
    weights: bool
    gate_up: bool
    down: bool

    @staticmethod
    def of(*tensors: Tensor) -> Needs:
        """Return the gradients that will be asked for: none in evaluation."""
        return Needs(*(tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors))


class Scale(NamedTuple):
    """A scale, its inverse, and the amax that a cast must record; None if it is recorded already, or not at all."""

    value: Tensor
    inverse: Tensor
    amax: Tensor | None


def run_experts(plan: ExpertsPlan, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, in the shape and dtype of ``x``.

    Args:
        plan: The plan of the module.
        x: [..., D], the tokens.
        index: [N, k], the experts of each token; other numbers are ignored.
        weights: [N, k], the router's weights.
        gate_up: [E, 2 F, D].
        down: [E, D, F].
    """
    needs = Needs.of(x, weights, gate_up, down)
    index, weights = ignore_others(index, weights, plan.spec.count)
    args = x, weights, gate_up, down, index, plan, needs
    with torch.autocast(x.device.type, enabled=False):
        if any(needs):
            sites, casts = (plan.tokens, plan.hidden, plan.grad_up, plan.grad_down), (plan.up, plan.down)
            formats = [site.dtype for site in sites] + [cast.gradient_dtype for cast in casts]
            how = *formats, *(cast.keep_for_backward for cast in casts), plan.scales.mode, needs
            how = *how, plan.wide_up, plan.wide_down
            key = plan.spec, how, describe_tensors(weights, gate_up, down, index)
            rehearse_function(_Experts, plan.scales, x, key, *args)
        made: Tensor = _Experts.apply(*args)  # type: ignore[no-untyped-call]
    return made


def describe_tensors(weights: Tensor, gate_up: Tensor, down: Tensor, index: Tensor) -> Any:
    """Return what decides which kernels experts launch, besides their description: dtypes, and choices per token."""
    return weights.dtype, gate_up.dtype, down.dtype, index.dtype, index.shape[-1]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        index: Tensor,
        plan: ExpertsPlan,
        needs: Needs,
    ) -> Tensor:
        spec, training = plan.spec, any(needs)
        caster = Fp8Caster(plan.scales, training, not training)
        rows = x.detach().reshape(-1, spec.width).to(_get_row_dtype(plan))
        factors = weights.detach().reshape(len(rows), -1).float()
        slots = assign_slots(index.reshape(len(rows), -1), spec.count)
        of_tokens = Scale(*caster.scale_of(rows, plan.tokens))
        up = plan.up.use(gate_up.detach().flatten(0, 1), record=training, backward=needs.tokens)
        last = plan.down.use(down.detach().flatten(0, 1), record=training, backward=_needs_hidden(needs))
        if plan.wide_up:
            u = multiply_wide("output", plan.up.path, wide.gather(rows, slots), gate_up.detach().to(BF16), slots, True)
        else:
            x_lp, _ = gather_cast(
                rows, slots, of_tokens.value, plan.tokens.dtype, of_tokens.amax, caster.counts(plan.tokens)
            )  # fmt: skip
            assert x_lp is not None
            u = _multiply("output", x_lp, up, slots, of_tokens.inverse, 2 * spec.inner)
            del x_lp
        of_hidden = _find_scale(
            caster, plan.hidden, lambda one, amax: activate_experts(spec.activation, u, factors, slots, one, amax)
        )
        counts = caster.counts(plan.hidden)
        a_lp = activate_experts(spec.activation, u, factors, slots, of_hidden.value, of_hidden.amax, counts)
        if plan.wide_down:
            a = wide.activate_wide(spec.activation, u, factors, slots)
            y = multiply_wide("output", plan.down.path, a, down.detach().to(BF16), slots, True)
        else:
            y = _multiply("output", a_lp, last, slots, of_hidden.inverse, spec.width)
        if training:
            saved = up.get_saved(), last.get_saved()
            ctx.save_for_backward(
                rows, factors, u, *slots, of_tokens.value, of_tokens.inverse, of_hidden.value, of_hidden.inverse,
                *(copy[0] for copy in saved), *(copy[1] for copy in saved),
                *(w if copy[0] is None else None for w, copy in ((gate_up, saved[0]), (down, saved[1]))),
            )  # fmt: skip
            ctx.plan, ctx.needs, ctx.shape, ctx.dtypes = plan, needs, x.shape, (x.dtype, weights.dtype)
            ctx.weights_shape, ctx.gradient_dtypes = weights.shape, (up.gradient_dtype, last.gradient_dtype)
        return sum_slots(y, slots, x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        plan: ExpertsPlan = ctx.plan
        needs: Needs = ctx.needs
        spec, caster = plan.spec, Fp8Caster(plan.scales, True)
        rows, factors, u, *rest = ctx.saved_tensors
        slots = Slots(*rest[:4])
        tokens, hidden = Scale(rest[4], rest[5], None), Scale(rest[6], rest[7], None)
        copies, inverses, stacks = rest[8:10], rest[10:12], rest[12:14]
        seen = not plan.wide_up, not plan.wide_down  # what forward read in BF16 is first cast here
        casts = zip((plan.up, plan.down), copies, inverses, stacks, seen, strict=True)
        up, last = (_restore(cast, *parts) for cast, *parts in casts)
        rows_of_grad = grad.reshape(-1, spec.width).to(_get_row_dtype(plan))
        of_grad = Scale(*caster.scale_of(rows_of_grad, plan.grad_down))
        g_lp, g_lp_t = gather_cast(
            rows_of_grad, slots, of_grad.value, plan.grad_down.dtype, of_grad.amax, caster.counts(plan.grad_down),
            transposed=needs.down,
        )  # fmt: skip
        grad_x = grad_weights = grad_gate_up = grad_down = None
        if not _needs_hidden(needs) and not needs.down:
            return None, None, None, None, None, None, None
        assert g_lp is not None
        v = _multiply("grad_input", g_lp, last, slots, of_grad.inverse, spec.inner, columns=True)
        del g_lp
        dtype, kind = plan.grad_up.dtype, spec.activation
        of_u = _find_scale(
            caster,
            plan.grad_up,
            lambda one, amax, v=v, u=u: activate_experts_backward(  # type: ignore[misc]
                kind, v, u, factors, slots, one, dtype, hidden.value, amax
            ),
        )
        du, du_t, a_t, of_weights = activate_experts_backward(
            kind, v, u, factors, slots, of_u.value, dtype, hidden.value, of_u.amax, caster.counts(plan.grad_up)
        )
        del v, u
        if needs.down:
            assert g_lp_t is not None
            grad_down = _multiply_slots(
                plan.down.path, g_lp_t, a_t, slots, of_grad.inverse, hidden.inverse, ctx.gradient_dtypes[1]
            )
        del g_lp_t, a_t
        if needs.tokens:
            made = _multiply("grad_input", du, up, slots, of_u.inverse, spec.width, columns=True)
            grad_x = sum_slots(made, slots, ctx.dtypes[0]).view(ctx.shape)
            del made
        if needs.gate_up:
            amax = counts = None
            if plan.wide_up:
                amax, counts = caster.amax(plan.tokens) if caster.delayed else None, caster.counts(plan.tokens)
            _, x_t = gather_cast(
                rows, slots, tokens.value, plan.tokens.dtype, amax, counts, rows=False, transposed=True
            )  # fmt: skip
            assert x_t is not None
            grad_gate_up = _multiply_slots(
                plan.up.path, du_t, x_t, slots, of_u.inverse, tokens.inverse, ctx.gradient_dtypes[0]
            )
        if needs.weights:
            grad_weights = of_weights.to(ctx.dtypes[1]).view(ctx.weights_shape)
        return grad_x, grad_weights, grad_gate_up, grad_down, None, None, None


def _get_row_dtype(plan: ExpertsPlan) -> torch.dtype:
    """Return the format of tokens before they are cast: FP32 where the function is compared with a model's code."""
    return torch.float32 if plan.tokens.dtype is torch.float32 else BF16


def _needs_hidden(needs: Needs) -> bool:
    """Whether backward goes through the last product."""
    return needs.tokens or needs.weights or needs.gate_up


def _restore(
    cast: StackCast, copy: Tensor | None, inverse: Tensor | None, stack: Tensor | None, seen: bool
) -> CastStack:
    """Return a weight with the copy that forward made, or one that casts the stack, again if it was ``seen``."""
    parts = [] if stack is None else [stack.detach().flatten(0, 1)]
    use = cast.use(*parts, seen=seen)
    return use if copy is None else use.restore_saved((copy, inverse, None))


def _find_scale(caster: Fp8Caster, site: Site, measure: Callable[[Tensor, Tensor], Any]) -> Scale:
    """Return a site's scale; with current scaling the kernel runs once only to measure its output."""
    if caster.delayed:
        return Scale(site.scale, site.inv_scale, caster.amax(site))
    amax = torch.zeros_like(site.amax)
    measure(torch.ones_like(site.scale), amax)
    if caster.record:
        torch.maximum(site.amax, amax, out=site.amax)
    scale = compute_scale(amax, FP8_MAX[site.dtype], caster.scales.margin)
    return Scale(scale, scale.reciprocal(), None)


def multiply_wide(product: str, path: str, a: Tensor, stack: Tensor, slots: Slots, transposed: bool) -> Tensor:
    """Multiply each slot by its expert's matrix in BF16 or FP32, and report the product to listeners."""
    if events.is_listening():
        return events.run_product(product, path, wide.multiply_wide, a, stack, slots, transposed)
    return wide.multiply_wide(a, stack, slots, transposed)


def _multiply(
    product: str, a: Tensor, weight: CastStack, slots: Slots, inverse: Tensor, width: int, columns: bool = False
) -> Tensor:
    made = weight.fp8_transposed() if columns else weight.fp8()
    matrix, inv_weight = made.lp_t if columns else made.lp, made.inv_scale
    assert matrix is not None and inv_weight is not None
    args = a, matrix, slots, inverse, inv_weight, width, columns
    if events.is_listening():
        return events.run_product(product, weight.path, products.multiply, *args)
    return products.multiply(*args)


def _multiply_slots(
    path: str, a: Tensor, b: Tensor, slots: Slots, inv_a: Tensor, inv_b: Tensor, dtype: torch.dtype
) -> Tensor:
    args = a, b, slots.starts, inv_a, inv_b, dtype
    if events.is_listening():
        return events.run_product("grad_weight", path, products.multiply_slots, *args)
    return products.multiply_slots(*args)
