"""A transformer block as one function with a hand-written backward, so that kernels pass FP8 tensors to each other.

Forward and backward of a block are in ``passes``. This file makes them an autograd function, run as they are or as CUDA
graphs, and connects blocks: the backward kernels of a block's first norm write the gradient that the last projection of
the block before reads (``GradientHandoff``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import norm
from narrowgauge.nn.blocks.spec import NormSpec
from narrowgauge.nn.fused.attention import BlockCall
from narrowgauge.nn.fused.casts import (
    Normalized,
    NormGrads,
    NormWeights,
    Projection,
    WantedGradient,
    get_inner_dtype,
    norm_backward,
    norm_backward_kept,
)
from narrowgauge.nn.fused.graphs import BlockGraphs
from narrowgauge.nn.fused.offload import begin_block, offload
from narrowgauge.nn.fused.passes import BlockInput, repeat_forward, run_backward, run_forward
from narrowgauge.nn.fused.plan import NO_DROPOUT, BlockPlan, BlockTensors, Dropout
from narrowgauge.nn.fused.rehearse import rehearse, rehearse_block
from narrowgauge.nn.fused.sublayers import is_added_directly
from narrowgauge.nn.products.gemm import DOUBLE_BACKWARD, get_address, is_graph_retained
from narrowgauge.scaling.operand import Operand


class GradientHandoff:
    """Passes a gradient from a block to the backward of the previous block, in the format of its products.

    In a chain, where nothing else can see it, the gradient itself can have another dtype than the stream. autograd does
    not pass such a gradient on, and gets zeros in its place, which take no memory.
    """

    def __init__(self, reader: Projection, dtype: torch.dtype | None = None) -> None:
        self.wanted = WantedGradient(reader, dtype)
        self._made: tuple[Tensor, int, Operand, Tensor] | None = None

    def put(self, gradient: Tensor, operand: Operand, dtype: torch.dtype) -> Tensor:
        """Keep a gradient and the operand made from it; return what autograd is given for a stream of ``dtype``."""
        passed = gradient if gradient.dtype is dtype else gradient.new_zeros((), dtype=dtype).expand(gradient.shape)
        self._made = passed, passed._version, operand, gradient
        return passed

    def take(self, passed: Tensor) -> tuple[Tensor, Operand | None]:
        """Return the gradient and its operand; no operand if autograd passes something else (a hook, a sum)."""
        made, self._made = self._made, None
        if made is None:
            return passed, None
        source, version, operand, gradient = made
        same = (
            get_address(source) == get_address(passed) and source.shape == passed.shape and passed._version == version
        )
        if same:
            return gradient, operand
        return passed if gradient is source else passed + gradient, None


HANDOFF = "narrowgauge_handoff"
"""Attribute of a block's output: the handoff to this block's backward, for whichever block reads the output."""


def run_block(
    plan: BlockPlan, x: Tensor, tensors: BlockTensors, call: BlockCall, dropout: Dropout, graphs: BlockGraphs
) -> Tensor:
    """Run a block on the residual stream x [B, T, D]."""
    before: GradientHandoff | None = getattr(x, HANDOFF, None)
    whole, plan = plan, plan.for_first_step().without_frozen(tensors)
    spec = plan.spec
    direct = spec.order != "post" and is_added_directly(spec.branch2, dropout.branch2, dropout.depth2)
    after = GradientHandoff(plan.down) if direct else None
    flat = tensors.flatten()
    others = call.differentiable
    with torch.autocast(x.device.type, enabled=False):  # the plan decides every format
        needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *flat, *others))
        given = BlockInput(plan, call, tensors, x, None, needed, dropout, True)
        rehearse_block(whole, given, _get_wanted(before))
        output: Tensor = _Block.apply(x, None, given, (before, after), graphs, *flat, *others)  # type: ignore[no-untyped-call]
    if needed and after is not None:
        setattr(output, HANDOFF, after)
    return output


def run_half(
    plan: BlockPlan, x: Tensor, tensors: BlockTensors, call: BlockCall, dropout: Dropout, graphs: BlockGraphs
) -> tuple[Tensor, Tensor]:
    """Run a block up to its MLP, which is a module: return the residual stream, and what the module reads."""
    before: GradientHandoff | None = getattr(x, HANDOFF, None)
    whole, plan = plan, plan.for_first_step().without_frozen(tensors)
    flat, others = tensors.flatten(), call.differentiable
    with torch.autocast(x.device.type, enabled=False):
        needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *flat, *others))
        given = BlockInput(plan, call, tensors, x, None, needed, dropout, False)
        rehearse_block(whole, given, _get_wanted(before))
        stream, hidden = _Block.apply(x, None, given, (before, None), graphs, *flat, *others)  # type: ignore[no-untyped-call]
    return stream, hidden


def run_chain(
    plans: list[BlockPlan], x: Tensor, weights: list[BlockTensors], calls: list[BlockCall], graphs: BlockGraphs
) -> tuple[Tensor, Tensor, GradientHandoff]:
    """Run blocks in sequence; return the last one's residual stream and branch, not yet added, and its handoff."""
    branch: Tensor | None = None
    link: GradientHandoff | None = None
    with torch.autocast(x.device.type, enabled=False):
        for whole, own, call in zip(plans, weights, calls, strict=True):
            plan, flat = whole.for_first_step().without_frozen(own), own.flatten()
            needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *flat))
            following = GradientHandoff(plan.down, get_inner_dtype(plan.caster(False)))
            given = BlockInput(plan, call, own, x, branch, needed, NO_DROPOUT, False)
            rehearse_block(whole, given, _get_wanted(link), following.wanted.dtype)
            x, branch = _Block.apply(x, branch, given, (link, following), graphs, *flat)  # type: ignore[no-untyped-call]
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


def _get_wanted(before: GradientHandoff | None) -> WantedGradient:
    return WantedGradient() if before is None else before.wanted


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        given: BlockInput,
        links: tuple[GradientHandoff | None, GradientHandoff | None],
        graphs: BlockGraphs,
        *flat: Tensor | None,
    ) -> Any:
        """Return residual stream and branch, or their sum."""
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.links, ctx.graphs, ctx.measured = given.plan, links, graphs, False
        ctx.dtype, ctx.shape, ctx.offloaded = x.dtype, x.shape, None
        ctx.follows = begin_block(x.device) if given.needed else None
        ctx.given = [tensor is not None for tensor in flat]
        wanted = _get_wanted(links[0])
        ctx.graph = graphs.find(given, wanted)
        present = [tensor for tensor in flat if tensor is not None]
        if ctx.graph is not None:
            outputs, ctx.ticket = ctx.graph.run_forward(given)
            ctx.x = x  # so that the graph that wrote it does not run again before backward
            ctx.save_for_backward(*present)
        else:
            outputs, left = run_forward(given)
            if given.plan.offload and given.plan.checkpoint == "full" and given.needed:
                ctx.offloaded = offload(left.x0)
            ctx.save_for_backward(*([left.x0] if ctx.offloaded is None else []), *present)
            ctx.left = left.without_inputs()
            ctx.measured = graphs.is_measuring(given, wanted)
            if ctx.measured:
                graphs.measure_wait()
        return outputs[0] if len(outputs) == 1 else outputs

    @staticmethod
    def backward(ctx: Any, grad: Any, of_branch: Any = None) -> Any:
        """Stream and branch share one gradient, that of their sum; the next block passes it to the stream. Only what
        the MLP of a "half" reads has its own."""
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        plan: BlockPlan = ctx.plan
        before, after = ctx.links
        x0, tensors = _get_saved(ctx)
        needs = BlockTensors.unflatten(plan, ctx.needs_input_grad[5:])
        written: Operand | None = None
        if plan.spec.mlp:
            grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=of_branch.device) if grad is None else grad
            written = Operand(of_branch)
        elif after is not None:
            grad, written = after.take(grad)
        others: list[Tensor | None] = []
        if ctx.graph is not None:
            grad_input, operand, grads = ctx.graph.run_backward(tensors, needs, grad, written)
            if not is_graph_retained():
                ctx.ticket.done, ctx.x = True, None
        else:
            left = ctx.left.with_input(_fetch_input(ctx, x0))
            ctx.left.repeated = None
            last = not is_graph_retained()
            if last:
                ctx.left = None
            wanted = _get_wanted(before)
            grad_input, operand, found, others = run_backward(left, tensors, needs, grad, written, wanted, last)
            grads = found.flatten()
            if ctx.measured:
                ctx.graphs.measure_wait()
        if not all(ctx.given):  # gradients of the ones in place of a norm's weight
            grads = tuple(grad if given else None for grad, given in zip(grads, ctx.given, strict=False))
        if before is not None and plan.spec.order != "post":
            grad_input = before.put(grad_input, operand, ctx.dtype)
        return grad_input, *[None] * 4, *grads, *others


def repeat_half(node: Any) -> Tensor:
    """Run the forward of ``run_half`` again, and keep it for the backward of the same node; return what the MLP reads.

    Args:
        node: The node in autograd's graph that made it.
    """
    x0, tensors = _get_saved(node)
    left = node.left.with_input(_fetch_input(node, x0))
    with torch.no_grad(), torch.autocast(left.x0.device.type, enabled=False):
        made = repeat_forward(left, tensors)
    node.left.repeated = made._replace(out=None)
    assert made.out is not None
    return made.out.view(node.shape)


def _get_saved(ctx: Any) -> tuple[Tensor | None, BlockTensors]:
    """Return what autograd has saved: the block's input, unless it is elsewhere, and its parameters."""
    saved = list(ctx.saved_tensors)
    x0 = saved.pop(0) if ctx.offloaded is None and ctx.graph is None else None
    rest = iter(saved)
    return x0, BlockTensors.unflatten(ctx.plan, [next(rest) if given else None for given in ctx.given])


def _fetch_input(ctx: Any, x0: Tensor | None) -> Tensor:
    """Return the block's input, from the host if it waits there."""
    if ctx.left.repeated is not None:
        return ctx.left.repeated.x0  # type: ignore[no-any-return]
    if ctx.follows is not None and ctx.offloaded is None:
        ctx.follows.fetch()
    if ctx.offloaded is not None:
        x0 = ctx.offloaded.take(not is_graph_retained())
    assert x0 is not None
    return x0


class _LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, link: GradientHandoff, weight: Tensor, spec: NormSpec, plan: BlockPlan
    ) -> Tensor:
        flat, flat_branch = (t.reshape(-1, x.shape[-1]) for t in (x, branch))
        ctx.keep, ctx.link, ctx.plan, ctx.shape, ctx.spec = plan.keeps_normalized, link, plan, x.shape, spec
        ctx.dtype = x.dtype
        key = "last norm", spec.kind, weight.shape, weight.dtype, ctx.keep, plan.down.choice
        rehearse(plan.scales, x, key, lambda: _run_last_norm(ctx, flat, flat_branch, weight))
        out, saved = _apply_last_norm(ctx, flat, flat_branch, weight)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made = _last_norm_backward(ctx, grad, *ctx.saved_tensors)
        passed = ctx.link.put(made.stream.view(ctx.shape), made.operand, ctx.dtype)
        return passed, None, None, made.weight, None, None


def _apply_last_norm(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the norm of x + branch, and what backward needs."""
    made = norm.norm(x, weight, eps=ctx.spec.eps, kind=ctx.spec.kind, branch=branch, keep=ctx.keep)
    rows, mean = (made.normalized, None) if ctx.keep else (made.residual, made.mean)
    assert rows is not None
    return made.out, (rows, weight, made.rstd) if mean is None else (rows, weight, made.rstd, mean)


def _last_norm_backward(ctx: Any, grad: Tensor, rows: Tensor, weight: Tensor, rstd: Tensor, *mean: Tensor) -> NormGrads:
    norms, caster, (reader, dtype) = NormWeights(ctx.spec, weight, None), ctx.plan.caster(True), ctx.link.wanted
    if ctx.keep:
        return norm_backward_kept(norms, grad, Normalized(rows, rstd, ctx.dtype), None, reader, None, caster, dtype)
    return norm_backward(norms, grad, rows, (mean[0] if mean else None, rstd), None, reader, caster, dtype)


def _run_last_norm(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor) -> None:
    out, saved = _apply_last_norm(ctx, x, branch, weight)
    _last_norm_backward(ctx, torch.empty_like(out), *saved)
