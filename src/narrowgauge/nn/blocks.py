"""A transformer block as one function, backward written out too, so that FP8 tensors pass from kernel to kernel.

    h1 = norm1(x)                 the norm writes the FP8 operand itself
    qkv = h1 Wqkv'                BF16 out
    o = attend(qkv)               torch's fused attention, between two views
    x1 = x + o Wout'              added by norm2's kernel, in the residual stream's FP32
    h2 = norm2(x1)                written in FP8
    u = h2 Wup';  a = act(u)      the activation writes FP8 in both layouts
    y = x1 + a Wdown'

Backward runs the same way up: the activation's and the norm's backward write the FP8 gradients that the next products
read, and no tensor is cast in a pass of its own but attention's three gradients, its output, and the block's incoming
gradient. With ``checkpoint="full"`` only x is kept and forward runs again in backward; with ``selective`` the results
of products and attention are kept, and what norms and activations write is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.kernels import activation, cast, norm
from narrowgauge.nn.gemm import (
    BF16,
    CachedWeight,
    Caster,
    GemmChoice,
    Operand,
    backward_input,
    backward_weight,
    forward_output,
)
from narrowgauge.scaling.tensor import Site, TensorScales


@dataclass(frozen=True)
class Projection:
    """A linear layer of the block: its weights, the formats of its products, and the sites of what they read."""

    weight: CachedWeight
    choice: GemmChoice
    input: Site | None
    grad: Site | None

    @property
    def input_lp(self) -> bool:
        return "fp8" in (self.choice.output, self.choice.grad_weight)

    @property
    def input_hp(self) -> bool:
        return "bf16" in (self.choice.output, self.choice.grad_weight)

    @property
    def grad_lp(self) -> bool:
        return "fp8" in (self.choice.grad_input, self.choice.grad_weight)

    @property
    def grad_hp(self) -> bool:
        return "bf16" in (self.choice.grad_input, self.choice.grad_weight)


@dataclass(frozen=True)
class BlockPlan:
    """What a block is made of, found by conversion."""

    kind: str
    """Of the norms: layer or rms."""
    eps: tuple[float, float]
    activation: str
    """gelu (exact), gelu-tanh or swiglu."""
    heads: int
    attend: Callable[..., Tensor]
    """The model's own attention from packed qkv [B, T, O] to [B, T, D]."""
    packed: bool
    """Whether qkv is (3, heads, size) and attention is plain and causal, so that it can be split without a copy."""
    qkv: Projection
    out: Projection
    up: Projection
    down: Projection
    scales: TensorScales | None
    checkpoint: str = "none"


@dataclass
class _Kept:
    """What forward leaves for backward."""

    h1: Operand
    stats1: tuple[Tensor | None, Tensor]
    leaves: tuple[Tensor, ...]
    mixed: Tensor
    o: Operand
    x1: Tensor
    h2: Operand
    stats2: tuple[Tensor | None, Tensor]
    u: Tensor
    a: Operand


def run_block(plan: BlockPlan, x: Tensor, weights: tuple[Tensor, ...], extra: tuple[Tensor, ...]) -> Tensor:
    """The block on the residual stream x [B, T, D]; ``weights`` are norm1, qkv, out, norm2, up (one or two), down."""
    with torch.autocast(x.device.type, enabled=False):  # every format is decided here
        needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights))
        output: Tensor = _Block.apply(x, plan, needed, extra, *weights)  # type: ignore[no-untyped-call]
    return output


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: BlockPlan, needed: bool, extra: tuple[Tensor, ...], *weights: Tensor
    ) -> Tensor:
        caster = Caster(plan.scales, needed) if plan.scales is not None else None
        y, kept = _forward(plan, x, weights, extra, caster, needed)
        ctx.plan, ctx.extra, ctx.recording = plan, extra, caster
        ctx.save_for_backward(x, *weights)
        if needed and plan.checkpoint != "full":
            ctx.kept = _lighten(plan, kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        plan: BlockPlan = ctx.plan
        x, *weights = ctx.saved_tensors
        quiet = Caster(plan.scales, False) if plan.scales is not None else None
        if plan.checkpoint == "full":
            _, kept = _forward(plan, x, tuple(weights), ctx.extra, quiet, True)
        else:
            kept = _restore(plan, x, weights, ctx.kept, quiet)
            ctx.kept = None
        dx, grads = _backward(plan, x, weights, kept, grad, ctx.recording)
        return dx, None, None, None, *grads


def _forward(
    plan: BlockPlan,
    x: Tensor,
    weights: tuple[Tensor, ...],
    extra: tuple[Tensor, ...],
    caster: Caster | None,
    needed: bool,
) -> tuple[Tensor, _Kept]:
    batch, length, width = x.shape
    rows = x.reshape(-1, width)
    h1, stats1, _ = _normed(plan, 0, rows, None, weights[0], plan.qkv, caster)
    qkv = forward_output(h1, plan.qkv.weight, plan.qkv.choice)
    leaves, mixed = _attend(plan, qkv.view(batch, length, -1), extra, needed)
    o = _attention_operand(plan, mixed.detach(), caster, needed)
    branch = forward_output(o, plan.out.weight, plan.out.choice)
    h2, stats2, x1 = _normed(plan, 1, rows, branch, weights[3], plan.up, caster)
    assert x1 is not None
    u = forward_output(h2, plan.up.weight, plan.up.choice)
    a = _activated(plan, u, caster, needed)
    y = x1 + forward_output(a, plan.down.weight, plan.down.choice)
    return y.view_as(x), _Kept(h1, stats1, leaves, mixed, o, x1, h2, stats2, u, a)


def _backward(
    plan: BlockPlan, x: Tensor, weights: list[Tensor], kept: _Kept, grad: Tensor, caster: Caster | None
) -> tuple[Tensor, list[Tensor]]:
    width = x.shape[-1]
    rows, g_rows = x.reshape(-1, width), grad.reshape(-1, width)
    g = _gradient(plan.down, g_rows, caster)
    da = backward_input(g, plan.down.weight, plan.down.choice)
    d_down = backward_weight(g, kept.a, plan.down.choice)
    du = _activation_backward(plan, da, kept.u, caster)
    dh2 = backward_input(du, plan.up.weight, plan.up.choice)
    d_up = backward_weight(du, kept.h2, plan.up.choice)
    dx1, g1, d_norm2 = _norm_backward(plan, dh2, kept.x1, weights[3], kept.stats2, g_rows, plan.out, caster)
    do = backward_input(g1, plan.out.weight, plan.out.choice)
    d_out = backward_weight(g1, kept.o, plan.out.choice)
    d_leaves = _attend_backward(plan, kept, do.view(*x.shape[:2], -1))
    dqkv = _packed_gradient(plan, d_leaves, caster)
    dh1 = backward_input(dqkv, plan.qkv.weight, plan.qkv.choice)
    d_qkv = backward_weight(dqkv, kept.h1, plan.qkv.choice)
    dx, _, d_norm1 = _norm_backward(plan, dh1, rows, weights[0], kept.stats1, dx1, None, None)
    ups = d_up.split([weight.shape[0] for weight in plan.up.weight.weights])
    return dx.view_as(x), [d_norm1, d_qkv, d_out, d_norm2, *ups, d_down]


def _normed(
    plan: BlockPlan,
    which: int,
    rows: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    reader: Projection,
    caster: Caster | None,
) -> tuple[Operand, tuple[Tensor | None, Tensor], Tensor | None]:
    """norm(rows + branch) as the reader wants it, its statistics, and the sum."""
    options: dict[str, Any] = {"eps": plan.eps[which], "kind": plan.kind, "branch": branch}
    site = reader.input
    if reader.input_lp and not reader.input_hp and caster is not None and site is not None and caster.delayed:
        options |= {"scale": site.scale, "dtype": site.dtype, "amax": caster.amax(site), "counts": caster.counts(site)}
        made = norm.norm(rows, weight, **options)
        operand = Operand(None, made.out, None, site.inv_scale)
    else:
        made = norm.norm(rows, weight, **options)
        operand = _as_operand(made.out, reader.input_lp, reader.input_hp, site, caster, False)
    return operand, (made.mean, made.rstd), made.residual


def _as_operand(
    hp: Tensor, wants_lp: bool, wants_hp: bool, site: Site | None, caster: Caster | None, transposed: bool
) -> Operand:
    """A high-precision tensor as an operand, cast where FP8 is wanted."""
    operand = Operand()
    if wants_lp:
        assert caster is not None and site is not None
        operand = caster.cast(hp, site, transposed)
    return operand._replace(hp=hp.to(BF16)) if wants_hp else operand


def _attend(plan: BlockPlan, qkv: Tensor, extra: tuple[Tensor, ...], needed: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    """Attention with a graph of its own, from leaves that are views of qkv: only its backward is asked of autograd."""
    with torch.set_grad_enabled(needed):
        if not plan.packed:
            leaf = qkv.detach().requires_grad_(needed)
            return (leaf,), plan.attend(leaf, *extra)
        batch, length, triple = qkv.shape
        views = qkv.view(batch, length, 3, plan.heads, triple // 3 // plan.heads).permute(2, 0, 3, 1, 4)
        leaves = tuple(view.detach().requires_grad_(needed) for view in views)
        q, k, v = leaves
        return leaves, F.scaled_dot_product_attention(q, k, v, is_causal=True)  # B, H, T, S


def _attend_backward(plan: BlockPlan, kept: _Kept, do: Tensor) -> tuple[Tensor, ...]:
    if plan.packed:
        batch, length, width = do.shape
        do = do.view(batch, length, plan.heads, width // plan.heads).transpose(1, 2)
    return torch.autograd.grad(kept.mixed, kept.leaves, do)


def _attention_operand(plan: BlockPlan, mixed: Tensor, caster: Caster | None, needed: bool) -> Operand:
    """Attention's output [B, H, T, S] (or [B, T, D]) as the output projection reads it, rows of tokens."""
    reader = plan.out
    if plan.packed and reader.input_lp and not reader.input_hp and caster is not None and reader.input is not None:
        scale, inv_scale, amax = caster.scale_of(mixed, reader.input)
        lp, lp_t = cast.cast_transpose_packed((mixed,), scale, reader.input.dtype, amax, caster.counts(reader.input))
        return Operand(None, lp, lp_t, inv_scale)
    rows = (mixed.transpose(1, 2) if plan.packed else mixed).reshape(-1, plan.out.weight.weights[0].shape[1])
    return _as_operand(rows, reader.input_lp, reader.input_hp, reader.input, caster, needed)


def _activated(plan: BlockPlan, u: Tensor, caster: Caster | None, needed: bool) -> Operand:
    reader, site = plan.down, plan.down.input
    if reader.input_lp and not reader.input_hp and caster is not None and site is not None and caster.delayed:
        lp, lp_t = _activate(
            plan.activation, u, site.scale, site.dtype, caster.amax(site), caster.counts(site), transposed=needed
        )
        return Operand(None, lp, lp_t, site.inv_scale)
    hp, _ = _activate(plan.activation, u)
    return _as_operand(hp, reader.input_lp, reader.input_hp, site, caster, needed)


def _activation_backward(plan: BlockPlan, da: Tensor, u: Tensor, caster: Caster | None) -> Operand:
    writer, site = plan.up, plan.up.grad
    if writer.grad_lp and not writer.grad_hp and caster is not None and site is not None and caster.delayed:
        lp, lp_t = _activate_backward(
            plan.activation, da, u, site.scale, site.dtype, caster.amax(site), caster.counts(site)
        )
        return Operand(None, lp, lp_t, site.inv_scale)
    hp, _ = _activate_backward(plan.activation, da, u)
    return _as_operand(hp, writer.grad_lp, writer.grad_hp, site, caster, True)


def _activate(
    kind: str,
    u: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = BF16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor | None]:
    if kind == "swiglu":
        return activation.swiglu(u, scale, dtype, amax=amax, counts=counts, transposed=transposed)
    return activation.gelu(u, scale, dtype, _approximation(kind), amax=amax, counts=counts, transposed=transposed)


def _activate_backward(
    kind: str,
    da: Tensor,
    u: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = BF16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if kind == "swiglu":
        return activation.swiglu_backward(da, u, scale, dtype, amax=amax, counts=counts)
    return activation.gelu_backward(da, u, scale, dtype, _approximation(kind), amax=amax, counts=counts)


def _approximation(kind: str) -> str:
    return "tanh" if kind == "gelu-tanh" else "none"


def _gradient(writer: Projection, rows: Tensor, caster: Caster | None) -> Operand:
    return _as_operand(rows, writer.grad_lp, writer.grad_hp, writer.grad, caster, True)


def _packed_gradient(plan: BlockPlan, parts: tuple[Tensor, ...], caster: Caster | None) -> Operand:
    """The gradients of q, k and v as the qkv projection's output gradient."""
    writer, site = plan.qkv, plan.qkv.grad
    if plan.packed and writer.grad_lp and not writer.grad_hp and caster is not None and site is not None:
        if caster.delayed:
            scale, inv_scale, amax = site.scale, site.inv_scale, caster.amax(site)
        else:
            scale, inv_scale, amax = caster.scale_of(torch.stack([cast.max_abs(part) for part in parts]), site)
        lp, lp_t = cast.cast_transpose_packed(parts, scale, site.dtype, amax, caster.counts(site))
        return Operand(None, lp, lp_t, inv_scale)
    if plan.packed:
        stacked = torch.stack(parts).permute(1, 3, 0, 2, 4)  # B, T, 3, H, S
        return _gradient(writer, stacked.reshape(-1, stacked.shape[2] * stacked.shape[3] * stacked.shape[4]), caster)
    return _gradient(writer, parts[0].reshape(-1, parts[0].shape[-1]), caster)


def _norm_backward(
    plan: BlockPlan,
    dout: Tensor,
    residual: Tensor,
    weight: Tensor,
    stats: tuple[Tensor | None, Tensor],
    dresidual: Tensor,
    branch: Projection | None,
    caster: Caster | None,
) -> tuple[Tensor, Operand, Tensor]:
    """The gradient at the residual stream, the same as the branch that was added there reads it, and the weight's."""
    options: dict[str, Any] = {"kind": plan.kind, "dresidual": dresidual}
    site = branch.grad if branch is not None else None
    direct = branch is not None and branch.grad_lp and not branch.grad_hp and caster is not None and caster.delayed
    if direct and caster is not None and site is not None:
        options |= {"scale": site.scale, "dtype": site.dtype, "amax": caster.amax(site), "counts": caster.counts(site)}
        dx, dx_lp, dweight, _ = norm.norm_backward(dout, residual, weight, *stats, **options)
        return dx, Operand(None, dx_lp, None, site.inv_scale), dweight
    dx, _, dweight, _ = norm.norm_backward(dout, residual, weight, *stats, **options)
    operand = Operand() if branch is None else _gradient(branch, dx, caster)
    return dx, operand, dweight


def _lighten(plan: BlockPlan, kept: _Kept) -> _Kept:
    """Let go of what only forward's products read, and of what selective recomputation makes again."""
    kept.o, kept.a = (_for_grad_weight(operand) for operand in (kept.o, kept.a))
    if plan.checkpoint == "selective":
        kept.h1 = kept.h2 = kept.a = Operand()
    return kept


def _for_grad_weight(x: Operand) -> Operand:
    return x._replace(lp=None) if x.lp_t is not None else x


def _restore(plan: BlockPlan, x: Tensor, weights: list[Tensor], kept: _Kept, quiet: Caster | None) -> _Kept:
    if plan.checkpoint == "selective":
        rows = x.reshape(-1, x.shape[-1])
        kept.h1, _, _ = _normed(plan, 0, rows, None, weights[0], plan.qkv, quiet)
        kept.h2, _, _ = _normed(plan, 1, kept.x1, None, weights[3], plan.up, quiet)
        kept.a = _activated(plan, kept.u, quiet, True)
    return kept


def weights_of(module: nn.Module) -> tuple[Tensor, ...]:
    """The parameters of a block, in the order ``run_block`` takes them."""
    block: Any = module
    ups = [block.gate.weight, block.up.weight] if hasattr(block, "gate") else [block.up.weight]
    return (block.norm1.weight, block.qkv.weight, block.out.weight, block.norm2.weight, *ups, block.down.weight)
