"""A transformer block as one function with a hand-written backward, so that kernels pass FP8 tensors to each other.

Forward and backward of a block are in the file of its order. This file makes them an autograd function, and connects
blocks: the backward kernels of a block's first norm write the gradient that the last projection of the block before
reads (``GradientHandoff``). With ``checkpoint="full"`` only the block's input is saved, and backward runs forward
again. With ``selective`` the results of products and attention are saved, and norms and activations are recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.errors import UsageError
from narrowgauge.kernels import norm
from narrowgauge.nn.blocks.spec import NormSpec
from narrowgauge.nn.fused import parallel, post_norm, pre_norm
from narrowgauge.nn.fused.attention import BlockCall
from narrowgauge.nn.fused.casts import NormWeights, Projection, norm_backward
from narrowgauge.nn.fused.plan import NO_DROPOUT, BlockPlan, BlockTensors, BlockWeights, Dropout, bind_weights
from narrowgauge.nn.fused.sublayers import Run, is_added_directly
from narrowgauge.nn.products.gemm import DOUBLE_BACKWARD, Operand, get_address, is_graph_retained
from narrowgauge.random_state import get_random_state, set_random_state


class GradientHandoff:
    """Passes a gradient from a block to the backward of the previous block, in the format of its products."""

    def __init__(self, reader: Projection) -> None:
        self.reader = reader
        self._made: tuple[Tensor, int, Operand] | None = None

    def put(self, gradient: Tensor, operand: Operand) -> None:
        self._made = gradient, gradient._version, operand

    def take(self, gradient: Tensor) -> Operand | None:
        """Return the operand made from this gradient; None if autograd passes a different one (a hook, a sum)."""
        made, self._made = self._made, None
        if made is None:
            return None
        source, version, operand = made
        same = (
            get_address(source) == get_address(gradient)
            and source.shape == gradient.shape
            and gradient._version == version
        )
        return operand if same else None


ORDERS: dict[str, Any] = {"pre": pre_norm, "post": post_norm, "parallel": parallel}
"""The functions of each order: forward, backward, drop_unneeded, recompute."""
HANDOFF = "narrowgauge_handoff"
"""Attribute of a block's output: the handoff to this block's backward, for whichever block reads the output."""


def run_block(
    plan: BlockPlan, x: Tensor, tensors: BlockTensors, call: BlockCall, dropout: Dropout = NO_DROPOUT
) -> Tensor:
    """Run a block on the residual stream x [B, T, D]."""
    before: GradientHandoff | None = getattr(x, HANDOFF, None)
    spec = plan.spec
    direct = spec.order != "post" and is_added_directly(spec.branch2, dropout.branch2, dropout.depth2)
    after = GradientHandoff(plan.down) if direct else None
    flat = tensors.flatten()
    others = call.differentiable
    with torch.autocast(x.device.type, enabled=False):  # the plan decides every format
        needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *flat, *others))
        output: Tensor = _Block.apply(x, None, plan, needed, (before, after), True, call, dropout, *flat, *others)  # type: ignore[no-untyped-call]
    if needed and after is not None:
        setattr(output, HANDOFF, after)
    return output


def run_chain(
    plans: list[BlockPlan], x: Tensor, weights: list[BlockTensors], calls: list[BlockCall]
) -> tuple[Tensor, Tensor, GradientHandoff]:
    """Run blocks in sequence; return the last one's residual stream and branch, not yet added, and its handoff."""
    branch: Tensor | None = None
    link: GradientHandoff | None = None
    with torch.autocast(x.device.type, enabled=False):
        for plan, own, call in zip(plans, weights, calls, strict=True):
            flat = own.flatten()
            needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *flat))
            following = GradientHandoff(plan.down)
            x, branch = _Block.apply(x, branch, plan, needed, (link, following), False, call, NO_DROPOUT, *flat)  # type: ignore[no-untyped-call]
            link = following
    assert branch is not None and link is not None
    return x, branch, link


def run_last_norm(
    x: Tensor, branch: Tensor, link: GradientHandoff, weight: Tensor, spec: NormSpec, plan: BlockPlan
) -> Tensor:
    """Return norm(x + branch) * weight after a chain of blocks, as rows [N, D] in BF16."""
    with torch.autocast(x.device.type, enabled=False):
        output: Tensor = _LastNorm.apply(x, branch, link, weight, spec, plan)  # type: ignore[no-untyped-call]
    return output


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        plan: BlockPlan,
        needed: bool,
        links: tuple[GradientHandoff | None, GradientHandoff | None],
        summed: bool,
        call: BlockCall,
        dropout: Dropout,
        *flat: Tensor | None,
    ) -> Any:
        """Return residual stream and branch, or their sum."""
        tensors = BlockTensors.unflatten(plan, flat)
        is_random = any(dropout) or plan.spec.attention.kind == "own"
        ctx.random = get_random_state(x.device) if is_random and needed and plan.checkpoint == "full" else None
        caster, uses = plan.caster(needed, not needed), bind_weights(plan, tensors, needed)
        run = Run(plan, call, tensors, uses, caster, needed, dropout)
        x0, x1, out, saved = events.run_in_scope(plan.path, ORDERS[plan.spec.order].forward, run, x, branch)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.call, ctx.caster, ctx.links, ctx.dropout = plan, call.without_cache(), caster, links, dropout
        ctx.given = [tensor is not None for tensor in flat]
        ctx.save_for_backward(x0, *(tensor for tensor in flat if tensor is not None))
        if needed and plan.checkpoint != "full":
            ctx.kept, ctx.copies = ORDERS[plan.spec.order].drop_unneeded(plan, saved), [use.get_saved() for use in uses]
        x1, out = x1.view_as(x), None if out is None else out.view_as(x)
        if out is None:
            return x1
        return x1 + out if summed else (x1, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_branch: Tensor | None = None) -> Any:
        """Stream and branch share one gradient, that of their sum; the next block passes it to the stream."""
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        plan: BlockPlan = ctx.plan
        order = ORDERS[plan.spec.order]
        x0, *present = ctx.saved_tensors
        rest = iter(present)
        tensors = BlockTensors.unflatten(plan, [next(rest) if given else None for given in ctx.given])
        needs = BlockTensors.unflatten(plan, ctx.needs_input_grad[8:])
        uses = bind_weights(plan, tensors, True, again=True)
        run = Run(plan, ctx.call, tensors, uses, plan.caster(False), True, ctx.dropout, again=True)
        if plan.checkpoint == "full":
            with _repeat_random_numbers(ctx.random, x0.device):
                *_, kept = events.run_in_scope(plan.path, order.forward, run, x0, None)
        else:
            kept = order.recompute(run, x0, ctx.kept)
            uses = BlockWeights(*(use.restore_saved(copies) for use, copies in zip(uses, ctx.copies, strict=True)))
            if not is_graph_retained():
                ctx.kept = ctx.copies = None
        rows = grad.reshape(-1, grad.shape[-1])
        before, after = ctx.links
        given = after.take(grad) if after is not None else None
        run = run._replace(uses=uses, caster=ctx.caster)
        reader = before.reader if before is not None else None
        back: tuple[Any, ...] = (run, kept, x0, rows, given, reader, needs)
        grad_input, operand, grads, others = events.run_in_scope(plan.path, order.backward, *back)
        grad_input = grad_input.view_as(x0)
        if before is not None and plan.spec.order != "post":
            before.put(grad_input, operand)
        return grad_input, *[None] * 7, *grads.flatten(), *others


@contextlib.contextmanager
def _repeat_random_numbers(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw the random numbers of a forward again, so that its recomputation drops the same values."""
    if state is None:
        yield
        return
    before = get_random_state(device)
    set_random_state(state, device)
    try:
        yield
    finally:
        set_random_state(before, device)


class _LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, link: GradientHandoff, weight: Tensor, spec: NormSpec, plan: BlockPlan
    ) -> Tensor:
        flat, flat_branch = (t.reshape(-1, x.shape[-1]) for t in (x, branch))
        made = norm.norm(flat, weight, eps=spec.eps, kind=spec.kind, branch=flat_branch)
        ctx.save_for_backward(made.residual, weight, made.rstd, *([] if made.mean is None else [made.mean]))
        ctx.link, ctx.plan, ctx.shape, ctx.spec = link, plan, x.shape, spec
        return made.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        residual, weight, rstd, *mean = ctx.saved_tensors
        stats = (mean[0] if mean else None, rstd)
        made = norm_backward(
            NormWeights(ctx.spec, weight, None), grad, residual, stats, None, ctx.link.reader, ctx.plan.caster(True)
        )
        grad_input = made.stream.view(ctx.shape)
        ctx.link.put(grad_input, made.operand)
        return grad_input, None, None, made.weight, None, None
