"""A block whose norms read the residual stream: forward, backward, and what is saved in between.

    h1 = norm1(x + b)                    the norm adds the previous block's branch b, and writes the FP8 operand
    qkv = h1 Wqkv' + bqkv                BF16 out
    o = attend(qkv)                      see attention.py
    x1 = x + b + end1(o Wout' + bout)    added by norm2's kernel, in the residual stream's dtype
    h2 = norm2(x1)                       written in FP8
    u = h2 Wup' + bup;  a = act(u)       the activation writes FP8 in both layouts
    x1, end2(a Wdown' + bdown)           the next block's x and b; their sum for a single block

In a decoder, cross-attention (``cross``) stands between attention and norm2, and x1 is the stream with its branch.
Branches end with a norm, dropout, a scale or stochastic depth, where the block has them. Without norm1 and norm2,
projections read the stream itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from narrowgauge.nn.fused import cross, halves
from narrowgauge.nn.fused.attention import Attended, make_operand_of
from narrowgauge.nn.fused.casts import (
    Normalized,
    NormWeights,
    Projection,
    Stats,
    apply_norm,
    apply_norm_and_keep,
    can_keep_normalized,
    get_inner_dtype,
    norm_backward,
    norm_backward_kept,
)
from narrowgauge.nn.fused.cross import CrossHalf
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, bind_norms
from narrowgauge.nn.fused.reports import report_activations, report_gradients
from narrowgauge.nn.fused.sublayers import Branch, Run, needs_values
from narrowgauge.scaling.operand import Operand


@dataclass
class Saved:
    """What forward saves for backward."""

    stats1: Stats | None
    attention: halves.AttentionHalf
    x1: Tensor
    stats2: Stats | None
    mlp: halves.MlpHalf
    cross: CrossHalf | None = None
    kept: tuple[Normalized, Normalized] | None = None
    """What both norms keep in place of the stream and their outputs."""

    @property
    def attended(self) -> Attended:
        return self.attention.attended


class KeptAttention(NamedTuple):
    """What is kept of attention if backward runs only the rest of forward again."""

    stats1: Stats | None
    attended: Attended
    x1: Tensor

    @property
    def size(self) -> int:
        """Bytes of memory that stay allocated, beyond the block's input."""
        storages = [t.untyped_storage() for t in (*self.attended.leaves, self.attended.mixed, self.x1)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def keep_attention(run: Run, saved: Saved) -> KeptAttention | None:
    """Return what to keep of attention; None for blocks whose attention cannot be kept."""
    spec = run.plan.spec
    if spec.cross is not None:
        return None
    if spec.attention.kind == "own" or any(run.dropout) or needs_values(spec.branch1) or needs_values(spec.branch2):
        return None
    return KeptAttention(saved.stats1, saved.attended, saved.x1)


def run_rest(run: Run, x0: Tensor, kept: KeptAttention) -> Saved:
    """Run again what follows attention, and the norm before it."""
    plan, caster, (norm1, norm2) = run.plan, run.caster, bind_norms(run.plan.spec, run.tensors)
    h1, _, _ = apply_norm(norm1, x0.reshape(-1, x0.shape[-1]), None, plan.qkv, caster)
    o = make_operand_of(plan, kept.attended, caster, True)
    h2, stats2, _ = apply_norm(norm2, kept.x1, None, plan.up, caster)
    _, mlp = halves.run_mlp(run, h2, len(x0), False)
    attention = halves.AttentionHalf(h1, kept.attended, o, Branch())
    return Saved(kept.stats1, attention, kept.x1, stats2, mlp)


def forward(run: Run, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Return the residual stream before the block and within it, the block's last branch, and what is saved."""
    plan, caster, (norm1, norm2) = run.plan, run.caster, bind_norms(run.plan.spec, run.tensors)
    width = x.shape[-1]
    rows, flat = x.reshape(-1, width), None if branch is None else branch.reshape(-1, width)
    if _keeps_normalized(run, norm1, norm2):
        return _forward_and_keep(run, x, flat)
    h1, stats1, x0 = apply_norm(norm1, rows, flat, plan.qkv, caster)
    out, qkv, attention = halves.run_attention(run, h1, x.shape)
    stream, last, crossed = x0, out, None
    if plan.spec.cross is not None:
        stream, last, crossed = cross.run_pre(run, x0, out, x.shape)
    h2, stats2, x1 = apply_norm(norm2, stream, last, plan.up, caster)
    y, mlp = halves.run_mlp(run, h2, len(x), not run.again or needs_values(plan.spec.branch2))
    report_activations(run, (h1, h2), qkv, attention.attended, out, y)
    return x0.view_as(x), x1, y, Saved(stats1, attention, x1, stats2, mlp, crossed)


def _keeps_normalized(run: Run, norm1: NormWeights | None, norm2: NormWeights | None) -> bool:
    """Whether the norms' inputs are kept as normalized rows in BF16, instead of the stream in FP32."""
    plan, caster = run.plan, run.caster
    if not plan.keeps_normalized or plan.checkpoint != "none" or plan.spec.cross is not None:
        return False
    both = can_keep_normalized(norm1, plan.qkv, caster) and can_keep_normalized(norm2, plan.up, caster)
    return both and run.needed and not run.again


def _forward_and_keep(run: Run, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Run ``forward`` with norms that keep their normalized rows."""
    plan, caster, (norm1, norm2) = run.plan, run.caster, bind_norms(run.plan.spec, run.tensors)
    assert norm1 is not None and norm2 is not None and caster is not None
    h1, kept1, x0 = apply_norm_and_keep(norm1, x.reshape(-1, x.shape[-1]), branch, plan.qkv, caster)
    out, qkv, attention = halves.run_attention(run, h1, x.shape)
    h2, kept2, x1 = apply_norm_and_keep(norm2, x0, out, plan.up, caster)
    y, mlp = halves.run_mlp(run, h2, len(x))
    attention.is_h_remade = mlp.is_h_remade = True
    report_activations(run, (h1, h2), qkv, attention.attended, out, y)
    nothing = x.new_empty(()).expand(x.shape)  # backward reads only its shape
    return nothing, x1, y, Saved(None, attention, x.new_empty(0), None, mlp, None, (kept1, kept2))


def _backward_kept(
    run: Run,
    saved: Saved,
    x0: Tensor,
    grad: Tensor,
    given: Operand | None,
    reader: Projection | None,
    needs: BlockTensors,
) -> tuple[Tensor, Operand, BlockTensors, list[Tensor | None]]:
    """Run ``backward`` after ``_forward_and_keep``: norms compute again what the products of weights read."""
    plan, caster, (norm1, norm2) = run.plan, run.caster, bind_norms(run.plan.spec, run.tensors)
    assert norm1 is not None and norm2 is not None and saved.kept is not None
    end2 = halves.end_backward(run, 2, saved.mlp.branch, grad, given)
    mlp = halves.mlp_backward(run, saved.mlp, end2.grad, needs)
    writer = plan.out if saved.attention.branch.is_plain else None
    kept1, kept2 = saved.kept
    if run.frees:
        saved.kept = None
    inner = get_inner_dtype(caster) if writer is not None else None
    two = norm_backward_kept(norm2, mlp.grad_h, kept2, grad, writer, plan.up, caster, inner)
    del kept2
    mlp = halves.finish_mlp(run, mlp._replace(grad_h=mlp.grad_h.new_empty(0)), two.output, needs)
    two = two._replace(output=Operand())
    end1 = halves.end_backward(run, 1, saved.attention.branch, two.stream, None if writer is None else two.operand)
    attention = halves.attention_backward(run, saved.attention, end1.grad, x0.shape, needs)
    one = norm_backward_kept(norm1, attention.grad_h, kept1, two.stream, reader, plan.qkv, caster, run.input_grad_dtype)
    del kept1
    attention = halves.finish_attention(
        run, attention._replace(grad_h=attention.grad_h.new_empty(0)), one.output, needs
    )
    report_gradients(run, end2.grad, end1.grad, attention.grad_first)
    grads = halves.collect_grads(run, one, attention, end1, two, mlp, end2)
    return one.stream, one.operand, grads, list(attention.others)


def backward(
    run: Run,
    saved: Saved,
    x0: Tensor,
    grad: Tensor,
    given: Operand | None,
    reader: Projection | None,
    needs: BlockTensors,
) -> tuple[Tensor, Operand, BlockTensors, list[Tensor | None]]:
    """Return the gradient of x + b, the same as ``reader`` reads it, those of parameters and of other arguments.

    Args:
        run: The forward that is differentiated.
        saved: What it saved.
        x0: The residual stream before the block.
        grad: The gradient of the block's output, as rows.
        given: The same in the formats of the last projection, if the next block wrote it.
        reader: The last projection of the block before, which reads the gradient of x + b.
        needs: Which parameters need gradients: True or False in place of tensors.
    """
    if saved.kept is not None:
        return _backward_kept(run, saved, x0, grad, given, reader, needs)
    plan, caster, (norm1, norm2) = run.plan, run.caster, bind_norms(run.plan.spec, run.tensors)
    end2 = halves.end_backward(run, 2, saved.mlp.branch, grad, given)
    mlp = halves.mlp_backward(run, saved.mlp, end2.grad, needs)
    halves.release_mlp(run, saved.mlp)
    before = saved.attention if saved.cross is None else saved.cross
    writer = (plan.out if saved.cross is None else plan.cross[-1]) if before.branch.is_plain else None
    inner = get_inner_dtype(caster) if writer is not None and saved.cross is None else None
    two = norm_backward(norm2, mlp.grad_h, saved.x1, saved.stats2, grad, writer, caster, inner)
    if run.frees:
        saved.x1 = saved.x1.new_empty(0)
    mlp = mlp._replace(grad_h=mlp.grad_h.new_empty(0))
    after, crossed, direct = two, None, saved.attention.branch.is_plain
    if saved.cross is not None:
        after, crossed = cross.backward_pre(run, saved.cross, two, saved.attention.branch, x0.shape, needs)
    end1 = halves.end_backward(run, 1, saved.attention.branch, after.stream, after.operand if direct else None)
    attention = halves.attention_backward(run, saved.attention, end1.grad, x0.shape, needs)
    rows = x0.reshape(-1, x0.shape[-1])
    one = norm_backward(norm1, attention.grad_h, rows, saved.stats1, after.stream, reader, caster, run.input_grad_dtype)
    report_gradients(run, end2.grad, end1.grad, attention.grad_first)
    grads = halves.collect_grads(run, one, attention, end1, two, mlp, end2)
    return one.stream, one.operand, *cross.merge(run, grads, list(attention.others), crossed)


def drop_unneeded(plan: BlockPlan, saved: Saved) -> Saved:
    """Drop what backward does not need, or computes again."""
    halves.drop_unneeded(plan, saved.attention, saved.mlp)
    return replace(saved, cross=cross.drop_unneeded(plan, saved.cross))


def recompute(run: Run, x0: Tensor, saved: Saved) -> Saved:
    """Recompute what selective checkpointing dropped."""
    if run.plan.checkpoint != "selective":
        return saved
    plan, (norm1, norm2) = run.plan, bind_norms(run.plan.spec, run.tensors)
    h1, _, _ = apply_norm(norm1, x0.reshape(-1, x0.shape[-1]), None, plan.qkv, run.caster)
    h2, _, _ = apply_norm(norm2, saved.x1, None, plan.up, run.caster)
    attention, mlp = halves.restore(run, saved.attention, saved.mlp, h1, h2)
    crossed = None if saved.cross is None else cross.restore(run, saved.cross)
    return replace(saved, attention=attention, mlp=mlp, cross=crossed)
