"""Low-rank adapters of a fused block's projections, in BF16 beside products in any format.

    forward    xa = x a'                       one product for the adapters of projections that read one input
               y_i += scale_i xa_i b_i'        added to the adapter's columns of the projections' output
    backward   grad_xa_i = scale_i grad_i b_i
               grad_x += grad_xa a
               grad_a = grad_xa' x;  grad_b_i = scale_i grad_i' xa_i

Dropout gives each adapter its own x, and so its own products. It draws one mask after the other, as modules that are
called one after the other do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.nn.fused.casts import Projection
from narrowgauge.nn.fused.plan import BlockTensors
from narrowgauge.nn.products.gemm import add_product, multiply_wide
from narrowgauge.scaling.operand import WIDE, Operand

AdapterGrads = dict[int, tuple[Tensor | None, Tensor | None]]
"""Gradients of the weights a and b, by the number of the adapter in its block."""


class AdapterState(NamedTuple):
    """What the adapters of a projection save for backward."""

    xa: Tensor | None = None
    """[N, ranks]; None if backward has to compute it."""
    masks: tuple[Tensor | None, ...] = ()
    """What dropout kept; empty without dropout."""
    grad_xa: Tensor | None = None
    """Made in backward."""


NO_STATE = AdapterState()


class Adapters:
    """The adapters of one projection in one call."""

    def __init__(
        self, part: Projection, tensors: BlockTensors, dropout: tuple[float, ...], dtype: torch.dtype | None = None
    ) -> None:
        """``dropout`` has the probability of each adapter of the block; it is empty if none drops anything.

        ``dtype`` is that of the weights' gradients; default: as the optimizer reads them.
        """
        self.part, self._dtype = part, dtype
        self._probabilities = [dropout[plan.number] if dropout else 0.0 for plan in part.adapters]
        self._a, self._b = (
            [weights[plan.number] for plan in part.adapters] for weights in (tensors.adapters_a, tensors.adapters_b)
        )

    def add(self, x: Operand, y: Tensor) -> AdapterState:
        """Add to a projection's output y [N, O] what the adapters compute from its input."""
        assert x.hp is not None
        masks = self.draw_masks(x.hp)
        xa = self._compute_xa(x.hp, masks)
        for plan, b, low in zip(self.part.adapters, self._widen(self._b), self._split(xa), strict=True):
            add_product(y[:, slice(*plan.columns)], low, b.t(), plan.scale)
        return AdapterState(xa, masks)

    def draw_masks(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """Return what dropout keeps of x, for each adapter; its values do not matter."""
        if not any(self._probabilities):
            return ()
        return tuple(torch.native_dropout(x, p, True)[1] if p else None for p in self._probabilities)

    def add_grad_input(self, grad: Operand, state: AdapterState, grad_input: Tensor | None) -> AdapterState:
        """Add to the gradient of x what comes through the adapters; ``grad`` is that of y."""
        assert grad.hp is not None
        ranks = self._ranks
        grad_xa = grad.hp.new_empty(len(grad.hp), sum(ranks))
        parts = grad_xa.split(ranks, 1)
        for plan, b, low in zip(self.part.adapters, self._widen(self._b), parts, strict=True):
            add_product(low, grad.hp[:, slice(*plan.columns)], b, plan.scale, replace=True)
        if grad_input is not None and not state.masks:
            add_product(grad_input, grad_xa, self._stack())
        elif grad_input is not None:
            for number, (low, a) in enumerate(zip(parts, self._widen(self._a), strict=True)):
                grad_input.add_(self._drop(multiply_wide(low, a, self.part.wide), state.masks, number))
        return state._replace(grad_xa=grad_xa)

    def compute_grads(self, grad: Operand, x: Operand, state: AdapterState, needs: BlockTensors) -> AdapterGrads:
        """Return the gradients of the adapters' weights; None for those that are frozen."""
        plans = self.part.adapters
        of_a, of_b = ([bool(group[plan.number]) for plan in plans] for group in (needs.adapters_a, needs.adapters_b))
        if not any((*of_a, *of_b)):
            return {}
        if state.grad_xa is None:
            state = self.add_grad_input(grad, state, None)
        assert grad.hp is not None and x.hp is not None and state.grad_xa is not None
        grads_a: list[Tensor | None] = [None] * len(plans)
        if any(of_a) and not state.masks:
            whole = multiply_wide(state.grad_xa.t(), x.hp, self.part.wide, self._get_dtype(0, 0))
            grads_a = list(whole.split(self._ranks)) if len(plans) > 1 else [whole]
        elif any(of_a):
            for number, low in enumerate(self._split(state.grad_xa)):
                read = self._drop(x.hp, state.masks, number)
                grads_a[number] = multiply_wide(low.t(), read, self.part.wide, self._get_dtype(number, 0))
        xa = self._compute_xa(x.hp, state.masks) if state.xa is None else state.xa
        found: AdapterGrads = {}
        for number, (plan, low) in enumerate(zip(plans, self._split(xa), strict=True)):
            one, other = grads_a[number] if of_a[number] else None, None
            if of_b[number]:
                source = grad.hp[:, slice(*plan.columns)].t()
                other = multiply_wide(source, low, self.part.wide, self._get_dtype(number, 1)).mul_(plan.scale)
            found[plan.number] = None if one is None else one.to(self._get_dtype(number, 0)), other
        return found

    def cast_grads(self, grads: AdapterGrads) -> AdapterGrads:
        """Return those of these adapters, in the dtypes in which the optimizer reads them."""
        found: AdapterGrads = {}
        for number, plan in enumerate(self.part.adapters):
            if plan.number in grads:
                a, b = grads[plan.number]
                found[plan.number] = (
                    None if a is None else a.to(self._get_dtype(number, 0)),
                    None if b is None else b.to(self._get_dtype(number, 1)),
                )
        return found

    @property
    def _ranks(self) -> list[int]:
        return [a.shape[0] for a in self._a if a is not None]

    def _split(self, xa: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = xa.split(self._ranks, 1)
        return parts

    def _widen(self, weights: list[Tensor | None]) -> list[Tensor]:
        return [weight.detach().to(WIDE[self.part.wide]) for weight in weights if weight is not None]

    def _stack(self) -> Tensor:
        """Return the weights a as one [ranks, I]."""
        weights = [weight.detach() for weight in self._a if weight is not None]
        return (torch.cat(weights) if len(weights) > 1 else weights[0]).to(WIDE[self.part.wide])

    def _compute_xa(self, x: Tensor, masks: tuple[Tensor | None, ...]) -> Tensor:
        if not masks:
            return multiply_wide(x, self._stack().t(), self.part.wide)
        pairs = enumerate(self._widen(self._a))
        return torch.cat([multiply_wide(self._drop(x, masks, n), a.t(), self.part.wide) for n, a in pairs], 1)

    def _drop(self, x: Tensor, masks: tuple[Tensor | None, ...], number: int) -> Tensor:
        """Return x as an adapter reads it; also the gradient of x from that."""
        mask = masks[number]
        if mask is None:
            return x
        dropped: Tensor = torch.ops.aten.native_dropout_backward(x, mask, 1.0 / (1.0 - self._probabilities[number]))
        return dropped

    def _get_dtype(self, number: int, side: int) -> torch.dtype:
        weight = (self._a, self._b)[side][number]
        assert weight is not None
        return self._dtype or self.part.adapters[number].gradient_dtypes[side] or weight.dtype
