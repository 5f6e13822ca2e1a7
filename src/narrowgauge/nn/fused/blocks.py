"""A transformer block as one function, backward written out too, so that FP8 tensors pass from kernel to kernel.

    h1 = norm1(x + b)             the norm adds the last block's branch b, and writes the FP8 operand itself
    qkv = h1 Wqkv'                BF16 out
    o = attend(qkv)               torch's fused attention, between two views
    x1 = x + b + o Wout'          added by norm2's kernel, in the residual stream's FP32
    h2 = norm2(x1)                written in FP8
    u = h2 Wup';  a = act(u)      the activation writes FP8 in both layouts
    x1, a Wdown'                  the next block's x and b; or their sum, where a block stands alone

Backward runs the same way up: the activation's and the norms' backward write the FP8 gradients that the next products
read, across blocks too (``Link``), and no tensor is cast in a pass of its own but attention's three gradients and its
output. With ``checkpoint="full"`` only x + b is kept and forward runs again in backward; with ``selective`` the results
of products and attention are kept, and what norms and activations write is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import events
from narrowgauge.errors import UsageError
from narrowgauge.kernels import norm
from narrowgauge.nn.fused.casts import (
    Projection,
    Stats,
    activated,
    activation_backward,
    as_operand,
    gradient,
    heads_as_gradient,
    heads_as_input,
    made_in_backward,
    norm_backward,
    normed,
)
from narrowgauge.nn.products.gemm import (
    DOUBLE_BACKWARD,
    Caster,
    Operand,
    address,
    backward_input,
    backward_weight,
    forward_output,
    graph_is_kept,
)
from narrowgauge.nn.products.weight_casts import Weight
from narrowgauge.scaling.tensor import TensorScales


@dataclass(frozen=True)
class BlockPlan:
    """What a block is made of, found by conversion."""

    kind: str
    """Of the norms: layer or rms."""
    eps: tuple[float, float]
    activation: str
    """gelu (exact), gelu-tanh or swiglu."""
    heads: int
    packed: bool
    """Whether qkv is (3, heads, size) and attention is plain and causal, so that it can be split without a copy."""
    qkv: Projection
    out: Projection
    up: Projection
    down: Projection
    scales: TensorScales | None
    checkpoint: str = "none"
    path: str = ""
    """Where in the model the block is, for who looks at what it computes."""

    def caster(self, record: bool, evaluating: bool = False) -> Caster | None:
        return Caster(self.scales, record, evaluating) if self.scales is not None else None


class Link:
    """Hands a gradient from one block's backward to that of the block before it, in the format its products read."""

    def __init__(self, reader: Projection) -> None:
        self.reader = reader
        self._made: tuple[Tensor, int, Operand] | None = None

    def put(self, gradient: Tensor, operand: Operand) -> None:
        self._made = gradient, gradient._version, operand

    def take(self, gradient: Tensor) -> Operand | None:
        """The operand that was made of this very gradient; None where autograd brings another (a hook, a sum)."""
        made, self._made = self._made, None
        if made is None:
            return None
        source, version, operand = made
        same = address(source) == address(gradient) and source.shape == gradient.shape and gradient._version == version
        return operand if same else None


@dataclass
class _Kept:
    """What forward leaves for backward."""

    h1: Operand
    stats1: Stats
    leaves: tuple[Tensor, ...]
    mixed: Tensor
    o: Operand
    x1: Tensor
    h2: Operand
    stats2: Stats
    u: Tensor
    a: Operand


Attend = Callable[..., Tensor]
"""A model's own attention from packed qkv [B, T, O] to [B, T, D]."""


def run_block(
    plan: BlockPlan, x: Tensor, weights: tuple[Tensor, ...], attend: Attend, extra: tuple[Tensor, ...]
) -> Tensor:
    """The block on the residual stream x [B, T, D]; ``weights`` are norm1, qkv, out, norm2, up (one or two), down."""
    with torch.autocast(x.device.type, enabled=False):  # every format is decided here
        needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights))
        output: Tensor = _Block.apply(x, None, plan, needed, None, None, attend, extra, *weights)  # type: ignore[no-untyped-call]
    return output


def run_chain(
    plans: list[BlockPlan],
    x: Tensor,
    weights: list[tuple[Tensor, ...]],
    attends: list[Attend],
    extra: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Link]:
    """Blocks one after the other: the last one's residual stream and branch, still apart, and the link to it."""
    branch: Tensor | None = None
    link: Link | None = None
    with torch.autocast(x.device.type, enabled=False):
        for plan, own, attend in zip(plans, weights, attends, strict=True):
            needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *own))
            following = Link(plan.down)
            x, branch = _Block.apply(x, branch, plan, needed, link, following, attend, extra, *own)  # type: ignore[no-untyped-call]
            link = following
    assert branch is not None and link is not None
    return x, branch, link


def run_last_norm(x: Tensor, branch: Tensor, link: Link, weight: Tensor, eps: float, plan: BlockPlan) -> Tensor:
    """norm(x + branch) * weight behind a chain, as rows [N, D] in BF16."""
    with torch.autocast(x.device.type, enabled=False):
        output: Tensor = _LastNorm.apply(x, branch, link, weight, eps, plan)  # type: ignore[no-untyped-call]
    return output


class Uses(NamedTuple):
    """The weights of a block's projections, as one forward and its backward read them."""

    qkv: Weight
    out: Weight
    up: Weight
    down: Weight


def _uses(plan: BlockPlan, weights: tuple[Tensor, ...], needed: bool, again: bool = False) -> Uses:
    """From the order of ``run_block``; without ``needed`` no site sees them."""
    _, qkv, out, _, *ups, down = weights
    options = {"record": needed, "seen": again, "backward": needed and (again or plan.checkpoint != "full")}
    return Uses(
        plan.qkv.weight.use(qkv, **options),
        plan.out.weight.use(out, **options),
        plan.up.weight.use(*ups, **options),
        plan.down.weight.use(down, **options),
    )


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        plan: BlockPlan,
        needed: bool,
        before: Link | None,
        after: Link | None,
        attend: Attend,
        extra: tuple[Tensor, ...],
        *weights: Tensor,
    ) -> Any:
        """Residual stream and branch where a block comes after this one, else their sum."""
        caster, uses = plan.caster(needed, not needed), _uses(plan, weights, needed)
        x0, x1, out, kept = events.run_in_scope(
            plan.path, _forward, plan, x, branch, weights, uses, attend, extra, caster, needed
        )
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.attend, ctx.extra, ctx.caster, ctx.before, ctx.after = plan, attend, extra, caster, before, after
        ctx.save_for_backward(x0, *weights)
        if needed and plan.checkpoint != "full":
            ctx.kept, ctx.copies = _lighten(plan, kept), [use.for_backward() for use in uses]
        x1, out = x1.view_as(x), out.view_as(x)
        return x1 + out if after is None else (x1, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_branch: Tensor | None = None) -> Any:
        """Stream and branch have one gradient, that of their sum; the block after this one gives it to the first."""
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        plan: BlockPlan = ctx.plan
        x0, *weights = ctx.saved_tensors
        quiet = plan.caster(False)
        uses = _uses(plan, tuple(weights), True, again=True)
        if plan.checkpoint == "full":
            run = (plan, x0, None, tuple(weights), uses, ctx.attend, ctx.extra, quiet, True, True)
            *_, kept = events.run_in_scope(plan.path, _forward, *run)
        else:
            kept = _restore(plan, x0, weights, ctx.kept, quiet)
            uses = Uses(*(use.in_backward(copies) for use, copies in zip(uses, ctx.copies, strict=True)))
            if not graph_is_kept():
                ctx.kept = ctx.copies = None
        rows = grad.reshape(-1, grad.shape[-1])
        handed = ctx.after.take(grad) if ctx.after is not None else None
        g = handed or gradient(plan.down, rows, ctx.caster)
        dx, operand, grads = events.run_in_scope(
            plan.path, _backward, plan, x0, weights, uses, kept, rows, g, ctx.caster, ctx.before
        )
        dx = dx.view_as(x0)
        if ctx.before is not None:
            ctx.before.put(dx, operand)
        return dx, *[None] * 7, *grads


class _LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, link: Link, weight: Tensor, eps: float, plan: BlockPlan) -> Tensor:
        flat, flat_branch = (t.reshape(-1, x.shape[-1]) for t in (x, branch))
        made = norm.norm(flat, weight, eps=eps, kind=plan.kind, branch=flat_branch)
        ctx.save_for_backward(made.residual, weight, made.rstd, *([] if made.mean is None else [made.mean]))
        ctx.link, ctx.plan, ctx.shape = link, plan, x.shape
        return made.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        residual, weight, rstd, *mean = ctx.saved_tensors
        stats = (mean[0] if mean else None, rstd)
        caster = ctx.plan.caster(True)
        dx, operand, dweight = norm_backward(
            ctx.plan.kind, grad, residual, weight, stats, None, ctx.link.reader, caster
        )
        dx = dx.view(ctx.shape)
        ctx.link.put(dx, operand)
        return dx, None, None, dweight, None, None


def _forward(
    plan: BlockPlan,
    x: Tensor,
    branch: Tensor | None,
    weights: tuple[Tensor, ...],
    uses: Uses,
    attend: Attend,
    extra: tuple[Tensor, ...],
    caster: Caster | None,
    needed: bool,
    again: bool = False,
) -> tuple[Tensor, Tensor, Tensor, _Kept]:
    """The residual stream before the block and within it, the block's last branch, and what backward will read.

    ``again``: for backward alone, which needs no last branch.
    """
    batch, length, width = x.shape
    rows, flat = x.reshape(-1, width), None if branch is None else branch.reshape(-1, width)
    h1, stats1, x0 = normed(plan.kind, plan.eps[0], rows, flat, weights[0], plan.qkv, caster)
    qkv = forward_output(h1, uses.qkv, plan.qkv.choice)
    leaves, mixed = _attend(plan, qkv.view(batch, length, -1), attend, extra, needed)
    o = _attention_operand(plan, mixed.detach(), caster, needed)
    out = forward_output(o, uses.out, plan.out.choice)
    h2, stats2, x1 = normed(plan.kind, plan.eps[1], x0, out, weights[3], plan.up, caster)
    u = forward_output(h2, uses.up, plan.up.choice)
    a = Operand()
    if not again or not made_in_backward(plan.down, caster):
        a = activated(plan.activation, u, plan.down, caster, needed)
    y = x1 if again else forward_output(a, uses.down, plan.down.choice)
    if events.wants_tensors() and needed and not again:
        names = ("gate", "up") if len(uses.up.weights) == 2 else ("up",)
        halves = zip(names, u.chunk(len(names), -1), strict=True)
        inner: list[tuple[str, Tensor | Operand]] = [("norm1", h1), ("qkv", qkv), ("attention", mixed), ("out", out)]
        for name, shown in (*inner, ("norm2", h2), *halves, ("act", a), ("down", y)):
            operand = shown if isinstance(shown, Operand) else Operand(shown)
            operand.report("activation", f"{plan.path}.{name}")
    return x0.view_as(x), x1, y, _Kept(h1, stats1, leaves, mixed, o, x1, h2, stats2, u, a)


def _backward(
    plan: BlockPlan,
    x0: Tensor,
    weights: list[Tensor],
    uses: Uses,
    kept: _Kept,
    g_rows: Tensor,
    g: Operand,
    caster: Caster | None,
    before: Link | None,
) -> tuple[Tensor, Operand, list[Tensor]]:
    """The gradients of x + b and of the weights, from that of the output: ``g_rows``, and ``g`` for the products."""
    da = backward_input(g, uses.down, plan.down.choice)
    du, a = activation_backward(plan.activation, da, kept.u, kept.a, plan.down, plan.up, caster)
    d_down = backward_weight(g, a, plan.down.choice, uses.down.gradient_dtype, uses.down)
    dh2 = backward_input(du, uses.up, plan.up.choice)
    d_up = backward_weight(du, kept.h2, plan.up.choice, uses.up.gradient_dtype, uses.up)
    dx1, g1, d_norm2 = norm_backward(plan.kind, dh2, kept.x1, weights[3], kept.stats2, g_rows, plan.out, caster)
    do = backward_input(g1, uses.out, plan.out.choice)
    d_out = backward_weight(g1, kept.o, plan.out.choice, uses.out.gradient_dtype, uses.out)
    dqkv = _attend_backward(plan, kept, do.view(*x0.shape[:2], -1), caster)
    dh1 = backward_input(dqkv, uses.qkv, plan.qkv.choice)
    d_qkv = backward_weight(dqkv, kept.h1, plan.qkv.choice, uses.qkv.gradient_dtype, uses.qkv)
    reader = before.reader if before is not None else None
    rows = x0.reshape(-1, x0.shape[-1])
    dx, operand, d_norm1 = norm_backward(plan.kind, dh1, rows, weights[0], kept.stats1, dx1, reader, caster)
    if events.wants_tensors():
        for name, shown in (("down", g), ("up", du), ("out", g1), ("qkv", dqkv)):
            shown.report("gradient", f"{plan.path}.{name}")
    ups = d_up.split([weight.shape[0] for weight in uses.up.weights])
    return dx, operand, [d_norm1, d_qkv, d_out, d_norm2, *ups, d_down]


def _attend(
    plan: BlockPlan, qkv: Tensor, attend: Attend, extra: tuple[Tensor, ...], needed: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Attention with a graph of its own, from leaves that are views of qkv: only its backward is asked of autograd."""
    with torch.set_grad_enabled(needed):
        if not plan.packed:
            leaf = qkv.detach().requires_grad_(needed)
            return (leaf,), attend(leaf, *extra)
        batch, length, triple = qkv.shape
        views = qkv.view(batch, length, 3, plan.heads, triple // 3 // plan.heads).permute(2, 0, 3, 1, 4)
        leaves = tuple(view.detach().requires_grad_(needed) for view in views)
        q, k, v = leaves
        return leaves, F.scaled_dot_product_attention(q, k, v, is_causal=True)  # B, H, T, S


def _attend_backward(plan: BlockPlan, kept: _Kept, do: Tensor, caster: Caster | None) -> Operand:
    again = graph_is_kept()
    if not plan.packed:
        (dqkv,) = torch.autograd.grad(kept.mixed, kept.leaves, do, retain_graph=again)
        return gradient(plan.qkv, dqkv.reshape(-1, dqkv.shape[-1]), caster)
    batch, length, width = do.shape
    do = do.view(batch, length, plan.heads, width // plan.heads).transpose(1, 2)
    return heads_as_gradient(torch.autograd.grad(kept.mixed, kept.leaves, do, retain_graph=again), plan.qkv, caster)


def _attention_operand(plan: BlockPlan, mixed: Tensor, caster: Caster | None, needed: bool) -> Operand:
    reader = plan.out
    if plan.packed:
        return heads_as_input(mixed, reader, caster, needed)
    return as_operand(mixed.reshape(-1, mixed.shape[-1]), reader.input_formats, reader.input, caster, needed)


def _lighten(plan: BlockPlan, kept: _Kept) -> _Kept:
    """Let go of what only forward's products read, and of what selective recomputation makes again."""
    kept.o = kept.o._replace(lp=None) if kept.o.lp_t is not None else kept.o
    kept.a = kept.a._replace(lp=None)
    if plan.checkpoint == "selective":
        kept.h1 = kept.h2 = kept.a = Operand()
    return kept


def _restore(plan: BlockPlan, x0: Tensor, weights: list[Tensor], kept: _Kept, quiet: Caster | None) -> _Kept:
    if plan.checkpoint == "selective":
        kept = replace(kept)
        rows = x0.reshape(-1, x0.shape[-1])
        kept.h1, _, _ = normed(plan.kind, plan.eps[0], rows, None, weights[0], plan.qkv, quiet)
        kept.h2, _, _ = normed(plan.kind, plan.eps[1], kept.x1, None, weights[3], plan.up, quiet)
        if not made_in_backward(plan.down, quiet):
            kept.a = activated(plan.activation, kept.u, plan.down, quiet, True)
    return kept


def weights_of(module: nn.Module) -> tuple[Tensor, ...]:
    """The parameters of a block, in the order ``run_block`` takes them."""
    block: Any = module
    ups = [block.gate.weight, block.up.weight] if hasattr(block, "gate") else [block.up.weight]
    return (block.norm1.weight, block.qkv.weight, block.out.weight, block.norm2.weight, *ups, block.down.weight)
