"""A transformer block as one function with a hand-written backward, so that kernels pass FP8 tensors to each other.

    h1 = norm1(x + b)             the norm adds the previous block's branch b, and writes the FP8 operand
    qkv = h1 Wqkv'                BF16 out
    o = attend(qkv)               torch's fused attention on views
    x1 = x + b + o Wout'          added by norm2's kernel, in the residual stream's FP32
    h2 = norm2(x1)                written in FP8
    u = h2 Wup';  a = act(u)      the activation writes FP8 in both layouts
    x1, a Wdown'                  the next block's x and b; their sum for a single block

Backward works the same way: the backward kernels of activation and norms write the FP8 gradients that the next products
read, also across blocks (``GradientHandoff``). Only attention's output and its three gradients are cast in a separate
pass. With ``checkpoint="full"`` only x + b is saved, and backward runs forward again. With ``selective`` the results of
products and attention are saved, and the outputs of norms and activations are recomputed.
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
    apply_activation,
    apply_activation_backward,
    apply_norm,
    cast_grad_output,
    cast_heads_grad,
    cast_heads_input,
    is_remade_in_backward,
    make_operand,
    norm_backward,
)
from narrowgauge.nn.products.gemm import (
    DOUBLE_BACKWARD,
    Fp8Caster,
    Operand,
    backward_input,
    backward_weight,
    forward_output,
    get_address,
    is_graph_retained,
)
from narrowgauge.nn.products.weight_casts import Weight
from narrowgauge.scaling.tensor import TensorScales


@dataclass(frozen=True)
class BlockPlan:
    """The parts and formats of a block, as found by conversion."""

    kind: str
    """Kind of the norms: layer or rms."""
    eps: tuple[float, float]
    activation: str
    """gelu (exact), gelu-tanh or swiglu."""
    heads: int
    packed: bool
    """Whether qkv is (3, heads, size) and attention is plain and causal, so that qkv is split without a copy."""
    qkv: Projection
    out: Projection
    up: Projection
    down: Projection
    scales: TensorScales | None
    checkpoint: str = "none"
    path: str = ""
    """Path of the block in the model, for event listeners."""

    def caster(self, record: bool, evaluating: bool = False) -> Fp8Caster | None:
        return Fp8Caster(self.scales, record, evaluating) if self.scales is not None else None


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


@dataclass
class _SavedActivations:
    """Tensors that forward saves for backward."""

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
"""A model's own attention, from packed qkv [B, T, O] to [B, T, D]."""


def run_block(
    plan: BlockPlan, x: Tensor, weights: tuple[Tensor, ...], attend: Attend, extra: tuple[Tensor, ...]
) -> Tensor:
    """Run a block on the residual stream x [B, T, D]; ``weights``: norm1, qkv, out, norm2, up (one or two), down."""
    with torch.autocast(x.device.type, enabled=False):  # the plan decides every format
        needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights))
        output: Tensor = _Block.apply(x, None, plan, needed, None, None, attend, extra, *weights)  # type: ignore[no-untyped-call]
    return output


def run_chain(
    plans: list[BlockPlan],
    x: Tensor,
    weights: list[tuple[Tensor, ...]],
    attends: list[Attend],
    extra: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, GradientHandoff]:
    """Run blocks in sequence; return the last one's residual stream and branch, not yet added, and its handoff."""
    branch: Tensor | None = None
    link: GradientHandoff | None = None
    with torch.autocast(x.device.type, enabled=False):
        for plan, own, attend in zip(plans, weights, attends, strict=True):
            needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *own))
            following = GradientHandoff(plan.down)
            x, branch = _Block.apply(x, branch, plan, needed, link, following, attend, extra, *own)  # type: ignore[no-untyped-call]
            link = following
    assert branch is not None and link is not None
    return x, branch, link


def run_last_norm(
    x: Tensor, branch: Tensor, link: GradientHandoff, weight: Tensor, eps: float, plan: BlockPlan
) -> Tensor:
    """Return norm(x + branch) * weight after a chain of blocks, as rows [N, D] in BF16."""
    with torch.autocast(x.device.type, enabled=False):
        output: Tensor = _LastNorm.apply(x, branch, link, weight, eps, plan)  # type: ignore[no-untyped-call]
    return output


class BlockWeights(NamedTuple):
    """The weights of a block's projections for one forward and its backward."""

    qkv: Weight
    out: Weight
    up: Weight
    down: Weight


def _bind_weights(plan: BlockPlan, weights: tuple[Tensor, ...], needed: bool, again: bool = False) -> BlockWeights:
    """Take weights in the order of ``run_block``; without ``needed`` no site records them."""
    _, qkv, out, _, *ups, down = weights
    options = {"record": needed, "seen": again, "backward": needed and (again or plan.checkpoint != "full")}
    return BlockWeights(
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
        before: GradientHandoff | None,
        after: GradientHandoff | None,
        attend: Attend,
        extra: tuple[Tensor, ...],
        *weights: Tensor,
    ) -> Any:
        """Return residual stream and branch if a block follows, else their sum."""
        caster, uses = plan.caster(needed, not needed), _bind_weights(plan, weights, needed)
        x0, x1, out, kept = events.run_in_scope(
            plan.path, _forward, plan, x, branch, weights, uses, attend, extra, caster, needed
        )
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.attend, ctx.extra, ctx.caster, ctx.before, ctx.after = plan, attend, extra, caster, before, after
        ctx.save_for_backward(x0, *weights)
        if needed and plan.checkpoint != "full":
            ctx.kept, ctx.copies = _drop_unneeded(plan, kept), [use.get_saved() for use in uses]
        x1, out = x1.view_as(x), out.view_as(x)
        return x1 + out if after is None else (x1, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_branch: Tensor | None = None) -> Any:
        """Stream and branch share one gradient, that of their sum; the next block passes it to the stream."""
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        plan: BlockPlan = ctx.plan
        x0, *weights = ctx.saved_tensors
        quiet = plan.caster(False)
        uses = _bind_weights(plan, tuple(weights), True, again=True)
        if plan.checkpoint == "full":
            run = (plan, x0, None, tuple(weights), uses, ctx.attend, ctx.extra, quiet, True, True)
            *_, kept = events.run_in_scope(plan.path, _forward, *run)
        else:
            kept = _recompute_saved(plan, x0, weights, ctx.kept, quiet)
            uses = BlockWeights(*(use.restore_saved(copies) for use, copies in zip(uses, ctx.copies, strict=True)))
            if not is_graph_retained():
                ctx.kept = ctx.copies = None
        rows = grad.reshape(-1, grad.shape[-1])
        handed_over = ctx.after.take(grad) if ctx.after is not None else None
        g = handed_over or cast_grad_output(plan.down, rows, ctx.caster)
        grad_input, operand, grads = events.run_in_scope(
            plan.path, _backward, plan, x0, weights, uses, kept, rows, g, ctx.caster, ctx.before
        )
        grad_input = grad_input.view_as(x0)
        if ctx.before is not None:
            ctx.before.put(grad_input, operand)
        return grad_input, *[None] * 7, *grads


class _LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, link: GradientHandoff, weight: Tensor, eps: float, plan: BlockPlan
    ) -> Tensor:
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
        grad_input, operand, grad_weight = norm_backward(
            ctx.plan.kind, grad, residual, weight, stats, None, ctx.link.reader, caster
        )
        grad_input = grad_input.view(ctx.shape)
        ctx.link.put(grad_input, operand)
        return grad_input, None, None, grad_weight, None, None


def _forward(
    plan: BlockPlan,
    x: Tensor,
    branch: Tensor | None,
    weights: tuple[Tensor, ...],
    uses: BlockWeights,
    attend: Attend,
    extra: tuple[Tensor, ...],
    caster: Fp8Caster | None,
    needed: bool,
    again: bool = False,
) -> tuple[Tensor, Tensor, Tensor, _SavedActivations]:
    """Return the residual stream before the block and within it, the block's last branch, and the saved activations.

    ``again``: recomputation in backward, which does not need the last branch.
    """
    batch, length, width = x.shape
    rows, flat = x.reshape(-1, width), None if branch is None else branch.reshape(-1, width)
    h1, stats1, x0 = apply_norm(plan.kind, plan.eps[0], rows, flat, weights[0], plan.qkv, caster)
    qkv = forward_output(h1, uses.qkv, plan.qkv.choice)
    leaves, mixed = _run_attention(plan, qkv.view(batch, length, -1), attend, extra, needed)
    o = _make_attention_operand(plan, mixed.detach(), caster, needed)
    out = forward_output(o, uses.out, plan.out.choice)
    h2, stats2, x1 = apply_norm(plan.kind, plan.eps[1], x0, out, weights[3], plan.up, caster)
    u = forward_output(h2, uses.up, plan.up.choice)
    a = Operand()
    if not again or not is_remade_in_backward(plan.down, caster):
        a = apply_activation(plan.activation, u, plan.down, caster, needed)
    y = x1 if again else forward_output(a, uses.down, plan.down.choice)
    if events.wants_tensors() and needed and not again:
        names = ("gate", "up") if len(uses.up.weights) == 2 else ("up",)
        halves = zip(names, u.chunk(len(names), -1), strict=True)
        inner: list[tuple[str, Tensor | Operand]] = [("norm1", h1), ("qkv", qkv), ("attention", mixed), ("out", out)]
        for name, shown in (*inner, ("norm2", h2), *halves, ("act", a), ("down", y)):
            operand = shown if isinstance(shown, Operand) else Operand(shown)
            operand.report("activation", f"{plan.path}.{name}")
    return x0.view_as(x), x1, y, _SavedActivations(h1, stats1, leaves, mixed, o, x1, h2, stats2, u, a)


def _backward(
    plan: BlockPlan,
    x0: Tensor,
    weights: list[Tensor],
    uses: BlockWeights,
    kept: _SavedActivations,
    g_rows: Tensor,
    g: Operand,
    caster: Fp8Caster | None,
    before: GradientHandoff | None,
) -> tuple[Tensor, Operand, list[Tensor]]:
    """Compute the gradients of x + b and of the weights; ``g_rows`` and ``g`` (for products) are grad_output."""
    grad_output = backward_input(g, uses.down, plan.down.choice)
    grad_u, a = apply_activation_backward(plan.activation, grad_output, kept.u, kept.a, plan.down, plan.up, caster)
    grad_w_down = backward_weight(g, a, plan.down.choice, uses.down.gradient_dtype, uses.down)
    grad_h2 = backward_input(grad_u, uses.up, plan.up.choice)
    grad_w_up = backward_weight(grad_u, kept.h2, plan.up.choice, uses.up.gradient_dtype, uses.up)
    grad_x1, g1, grad_norm2 = norm_backward(
        plan.kind, grad_h2, kept.x1, weights[3], kept.stats2, g_rows, plan.out, caster
    )
    grad_o = backward_input(g1, uses.out, plan.out.choice)
    grad_w_out = backward_weight(g1, kept.o, plan.out.choice, uses.out.gradient_dtype, uses.out)
    grad_qkv = _run_attention_backward(plan, kept, grad_o.view(*x0.shape[:2], -1), caster)
    grad_h1 = backward_input(grad_qkv, uses.qkv, plan.qkv.choice)
    grad_w_qkv = backward_weight(grad_qkv, kept.h1, plan.qkv.choice, uses.qkv.gradient_dtype, uses.qkv)
    reader = before.reader if before is not None else None
    rows = x0.reshape(-1, x0.shape[-1])
    grad_input, operand, grad_norm1 = norm_backward(
        plan.kind, grad_h1, rows, weights[0], kept.stats1, grad_x1, reader, caster
    )
    if events.wants_tensors():
        for name, shown in (("down", g), ("up", grad_u), ("out", g1), ("qkv", grad_qkv)):
            shown.report("gradient", f"{plan.path}.{name}")
    ups = grad_w_up.split([weight.shape[0] for weight in uses.up.weights])
    return grad_input, operand, [grad_norm1, grad_w_qkv, grad_w_out, grad_norm2, *ups, grad_w_down]


def _run_attention(
    plan: BlockPlan, qkv: Tensor, attend: Attend, extra: tuple[Tensor, ...], needed: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Run attention in its own autograd graph, with views of qkv as leaves; autograd does only its backward."""
    with torch.set_grad_enabled(needed):
        if not plan.packed:
            leaf = qkv.detach().requires_grad_(needed)
            return (leaf,), attend(leaf, *extra)
        batch, length, triple = qkv.shape
        views = qkv.view(batch, length, 3, plan.heads, triple // 3 // plan.heads).permute(2, 0, 3, 1, 4)
        leaves = tuple(view.detach().requires_grad_(needed) for view in views)
        q, k, v = leaves
        return leaves, F.scaled_dot_product_attention(q, k, v, is_causal=True)  # B, H, T, S


def _run_attention_backward(
    plan: BlockPlan, kept: _SavedActivations, grad_o: Tensor, caster: Fp8Caster | None
) -> Operand:
    again = is_graph_retained()
    if not plan.packed:
        (grad_qkv,) = torch.autograd.grad(kept.mixed, kept.leaves, grad_o, retain_graph=again)
        return cast_grad_output(plan.qkv, grad_qkv.reshape(-1, grad_qkv.shape[-1]), caster)
    batch, length, width = grad_o.shape
    grad_o = grad_o.view(batch, length, plan.heads, width // plan.heads).transpose(1, 2)
    return cast_heads_grad(torch.autograd.grad(kept.mixed, kept.leaves, grad_o, retain_graph=again), plan.qkv, caster)


def _make_attention_operand(plan: BlockPlan, mixed: Tensor, caster: Fp8Caster | None, needed: bool) -> Operand:
    reader = plan.out
    if plan.packed:
        return cast_heads_input(mixed, reader, caster, needed)
    return make_operand(mixed.reshape(-1, mixed.shape[-1]), reader.input_formats, reader.input, caster, needed)


def _drop_unneeded(plan: BlockPlan, kept: _SavedActivations) -> _SavedActivations:
    """Drop what only forward's products read, and what selective checkpointing recomputes."""
    kept.o = kept.o._replace(lp=None) if kept.o.lp_t is not None else kept.o
    kept.a = kept.a._replace(lp=None)
    if plan.checkpoint == "selective":
        kept.h1 = kept.h2 = kept.a = Operand()
    return kept


def _recompute_saved(
    plan: BlockPlan, x0: Tensor, weights: list[Tensor], kept: _SavedActivations, quiet: Fp8Caster | None
) -> _SavedActivations:
    if plan.checkpoint == "selective":
        kept = replace(kept)
        rows = x0.reshape(-1, x0.shape[-1])
        kept.h1, _, _ = apply_norm(plan.kind, plan.eps[0], rows, None, weights[0], plan.qkv, quiet)
        kept.h2, _, _ = apply_norm(plan.kind, plan.eps[1], kept.x1, None, weights[3], plan.up, quiet)
        if not is_remade_in_backward(plan.down, quiet):
            kept.a = apply_activation(plan.activation, kept.u, plan.down, quiet, True)
    return kept


def get_block_weights(module: nn.Module) -> tuple[Tensor, ...]:
    """Return the parameters of a block in the order of ``run_block``."""
    block: Any = module
    ups = [block.gate.weight, block.up.weight] if hasattr(block, "gate") else [block.up.weight]
    return (block.norm1.weight, block.qkv.weight, block.out.weight, block.norm2.weight, *ups, block.down.weight)
