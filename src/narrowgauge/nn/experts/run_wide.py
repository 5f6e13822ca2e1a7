"""Experts as one function with a hand-written backward, in BF16. S slots contain all pairs of tokens and experts.

    forward     x_s = x[token of s]
                u   = x_s GateUp_e'
                a   = w f(gate) up                             with the router's weight w of the slot
                out = sum over a token's slots: a Down_e'
    backward    g_s = grad[token of s]
                v   = g_s Down_e                               the gradient of a
                du, a, grad_w                                  from v and u
                grad_x      = sum over a token's slots: du GateUp_e
                grad_Down   = sum over an expert's slots: g_s' a
                grad_GateUp = sum over an expert's slots: du' x_s, with x_s gathered again

What backward keeps: x [N, D], u [S, 2 F], the slots, and BF16 copies of the stacks if their weights are FP32. As in FP8
(``run``), nothing waits for the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.errors import UsageError
from narrowgauge.kernels.experts import wide
from narrowgauge.kernels.experts.rows import sum_slots
from narrowgauge.kernels.experts.slots import Slots, assign_slots
from narrowgauge.nn.experts.arguments import ignore_others
from narrowgauge.nn.experts.find import ExpertsSpec
from narrowgauge.nn.experts.run import Needs, describe_tensors, multiply_wide
from narrowgauge.nn.fused.rehearse import rehearse_function
from narrowgauge.nn.products.gemm import BF16, DOUBLE_BACKWARD


def run_wide(
    path: str,
    spec: ExpertsSpec,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    dtype: torch.dtype = BF16,
) -> Tensor:
    """Return the weighted sum of each token's experts, in the shape and dtype of ``x``.

    Args:
        path: The module's path, for listeners.
        spec: The description of the module.
        x: [..., D], the tokens.
        index: [N, k], the experts of each token; other numbers are ignored.
        weights: [N, k], the router's weights.
        gate_up: [E, 2 F, D].
        down: [E, D, F].
        dtype: The format of the products: BF16, or FP32 to compare with a model's own code.
    """
    needs = Needs.of(x, weights, gate_up, down)
    index, weights = ignore_others(index, weights, spec.count)
    args = x, weights, gate_up, down, index, path, spec, dtype, needs
    with torch.autocast(x.device.type, enabled=False):
        if any(needs):
            key = spec, dtype, needs, describe_tensors(weights, gate_up, down, index)
            rehearse_function(_WideExperts, None, x, key, *args)
        made: Tensor = _WideExperts.apply(*args)  # type: ignore[no-untyped-call]
    return made


class _WideExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        index: Tensor,
        path: str,
        spec: ExpertsSpec,
        dtype: torch.dtype,
        needs: Needs,
    ) -> Tensor:
        rows = x.detach().reshape(-1, spec.width).to(dtype)
        factors = weights.detach().reshape(len(rows), -1).float()
        slots = assign_slots(index.reshape(len(rows), -1), spec.count)
        first, last = gate_up.detach().to(dtype), down.detach().to(dtype)
        names = f"{path}.{spec.gate_up}", f"{path}.{spec.down}"
        u = multiply_wide("output", names[0], wide.gather(rows, slots), first, slots, True)
        a = wide.activate_wide(spec.activation, u, factors, slots)
        y = multiply_wide("output", names[1], a, last, slots, True)
        if any(needs):
            ctx.save_for_backward(rows, factors, u, first, last, *slots)
            ctx.spec, ctx.needs, ctx.names, ctx.shape, ctx.weights_shape = spec, needs, names, x.shape, weights.shape
            ctx.dtypes = x.dtype, weights.dtype, gate_up.dtype, down.dtype
        return sum_slots(y, slots, x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        spec: ExpertsSpec = ctx.spec
        needs: Needs = ctx.needs
        rows, factors, u, first, last, *rest = ctx.saved_tensors
        slots = Slots(*rest)
        grad_x = grad_weights = grad_gate_up = grad_down = None
        g = wide.gather(grad.reshape(-1, spec.width).to(rows.dtype), slots)
        v = multiply_wide("grad_input", ctx.names[1], g, last, slots, False)
        of_u, a, of_weights = wide.activate_wide_backward(spec.activation, v, u, factors, slots)
        del u, v
        if needs.down:
            grad_down = _multiply_slots(ctx.names[1], g, a, slots).to(ctx.dtypes[3])
        del g, a
        if needs.tokens:
            made = multiply_wide("grad_input", ctx.names[0], of_u, first, slots, False)
            grad_x = sum_slots(made, slots, ctx.dtypes[0]).view(ctx.shape)
            del made
        if needs.gate_up:
            grad_gate_up = _multiply_slots(ctx.names[0], of_u, wide.gather(rows, slots), slots).to(ctx.dtypes[2])
        if needs.weights:
            grad_weights = of_weights.to(ctx.dtypes[1]).view(ctx.weights_shape)
        return grad_x, grad_weights, grad_gate_up, grad_down, None, None, None, None, None


def _multiply_slots(path: str, a: Tensor, b: Tensor, slots: Slots) -> Tensor:
    if events.is_listening():
        return events.run_product("grad_weight", path, wide.multiply_slots_wide, a, b, slots)
    return wide.multiply_slots_wide(a, b, slots)
