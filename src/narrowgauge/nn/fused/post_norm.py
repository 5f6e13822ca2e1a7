"""A block whose norms come after the sums (BERT): forward, backward, and what is saved in between.

    qkv = x Wqkv' + bqkv;  o = attend(qkv)
    r1 = x + o Wout' + bout;  x1 = norm1(r1)
    u = x1 Wup' + bup;  a = act(u)
    r2 = x1 + a Wdown' + bdown;  y = norm2(r2)

In a decoder, cross-attention (``cross``) and its norm follow norm1, and the MLP reads that norm. Branches end as in
``pre_norm``. The stream keeps its dtype; projections read a cast of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from narrowgauge.kernels import norm as norm_kernel
from narrowgauge.nn.fused import cross, halves
from narrowgauge.nn.fused.attention import Attended
from narrowgauge.nn.fused.casts import NormWeights, Projection, Stats, cast_input, norm_backward
from narrowgauge.nn.fused.cross import CrossGrads, CrossHalf
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, bind_norms
from narrowgauge.nn.fused.reports import report_activations, report_cross_norm, report_gradients
from narrowgauge.nn.fused.sublayers import CROSS, Run
from narrowgauge.scaling.operand import Operand


@dataclass
class Saved:
    """What forward saves for backward."""

    attention: halves.AttentionHalf
    r1: Tensor
    stats1: Stats
    mlp: halves.MlpHalf
    r2: Tensor
    stats2: Stats
    cross: CrossHalf | None = None

    @property
    def attended(self) -> Attended:
        return self.attention.attended


def forward(run: Run, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Saved]:
    """Return the block's input, its output, no branch, and what is saved."""
    assert branch is None
    plan, (norm1, norm2) = run.plan, bind_norms(run.plan.spec, run.tensors)
    rows = x.reshape(-1, x.shape[-1])
    out, qkv, attention = halves.run_attention(run, _read(rows, plan.qkv, run), x.shape)
    x1, r1, stats1 = _add_and_norm(norm1, rows, out)
    stream, crossed = x1, None
    if plan.spec.cross is not None:
        made, half = cross.run_cross(run, _read(x1, plan.cross[0], run), x.shape)
        stream, total, stats = _add_and_norm(cross.bind_cross_norm(run), x1, made)
        report_cross_norm(run, stream)
        crossed = replace(half, read=total, stats=stats)
    down, mlp = halves.run_mlp(run, _read(stream, plan.up, run), len(x))
    y, r2, stats2 = _add_and_norm(norm2, stream, down)
    report_activations(run, (x1, y), qkv, attention.attended, out, down)
    return x, y, None, Saved(attention, r1, stats1, mlp, r2, stats2, crossed)


def backward(
    run: Run,
    saved: Saved,
    x0: Tensor,
    grad: Tensor,
    given: Operand | None,
    reader: Projection | None,
    needs: BlockTensors,
) -> tuple[Tensor, Operand, BlockTensors, list[Tensor | None]]:
    """Return the gradient of x, nothing for a reader, and the gradients of parameters and of other arguments."""
    plan, caster, (norm1, norm2) = run.plan, run.caster, bind_norms(run.plan.spec, run.tensors)
    direct = saved.mlp.branch.is_plain
    two = norm_backward(norm2, grad, saved.r2, saved.stats2, None, plan.down if direct else None, caster)
    end2 = halves.end_backward(run, 2, saved.mlp.branch, two.stream, two.operand if direct else None)
    mlp = halves.mlp_backward(run, saved.mlp, end2.grad, needs)
    halves.release_mlp(run, saved.mlp)
    direct = saved.attention.branch.is_plain
    grad_x1, crossed = two.stream.add_(mlp.grad_h), None
    if saved.cross is not None:
        grad_x1, crossed = _cross_backward(run, saved.cross, grad_x1, x0, needs)
    one = norm_backward(norm1, grad_x1, saved.r1, saved.stats1, None, plan.out if direct else None, caster)
    end1 = halves.end_backward(run, 1, saved.attention.branch, one.stream, one.operand if direct else None)
    attention = halves.attention_backward(run, saved.attention, end1.grad, x0.shape, needs)
    grad_x = one.stream.add_(attention.grad_h)
    report_gradients(run, end2.grad, end1.grad, attention.grad_first)
    grads = halves.collect_grads(run, one, attention, end1, two, mlp, end2)
    return grad_x, Operand(), *cross.merge(run, grads, list(attention.others), crossed)


def _cross_backward(
    run: Run, half: CrossHalf, grad: Tensor, x0: Tensor, needs: BlockTensors
) -> tuple[Tensor, CrossGrads]:
    """Return the gradient of what cross-attention and its sum read, from that of the norm after them."""
    direct = half.branch.is_plain
    assert half.read is not None
    norm = norm_backward(
        cross.bind_cross_norm(run), grad, half.read, half.stats, None, run.plan.cross[-1] if direct else None,
        run.caster,
    )  # fmt: skip
    end = halves.end_backward(run, CROSS, half.branch, norm.stream, norm.operand if direct else None)
    grads = cross.cross_backward(run, half, end.grad, x0.shape, needs)
    return norm.stream.add_(grads.grad_h), replace(grads, norm=norm)


def drop_unneeded(plan: BlockPlan, saved: Saved) -> Saved:
    """Drop what backward does not need, or computes again."""
    halves.drop_unneeded(plan, saved.attention, saved.mlp)
    return replace(saved, cross=cross.drop_unneeded(plan, saved.cross))


def recompute(run: Run, x0: Tensor, saved: Saved) -> Saved:
    """Recompute what selective checkpointing dropped."""
    if run.plan.checkpoint != "selective":
        return saved
    plan, (norm1, _) = run.plan, bind_norms(run.plan.spec, run.tensors)
    h1 = _read(x0.reshape(-1, x0.shape[-1]), plan.qkv, run)
    x1, crossed = _norm(norm1, saved.r1).out, None
    if saved.cross is not None:
        crossed = cross.restore(run, saved.cross, _read(x1, plan.cross[0], run))
        assert crossed.read is not None
        x1 = _norm(cross.bind_cross_norm(run), crossed.read).out
    attention, mlp = halves.restore(run, saved.attention, saved.mlp, h1, _read(x1, plan.up, run))
    return replace(saved, attention=attention, mlp=mlp, cross=crossed)


def _read(rows: Tensor, reader: Projection, run: Run) -> Operand:
    return cast_input(reader, rows, run.caster, run.needed)


def _add_and_norm(norms: NormWeights | None, rows: Tensor, branch: Tensor) -> tuple[Tensor, Tensor, Stats]:
    made = _norm(norms, rows, branch)
    assert made.residual is not None
    return made.out, made.residual, (made.mean, made.rstd)


def _norm(norms: NormWeights | None, rows: Tensor, branch: Tensor | None = None) -> norm_kernel.NormOutput:
    assert norms is not None
    spec = norms.spec
    return norm_kernel.norm(
        rows, norms.weight, norms.bias, eps=spec.eps, kind=spec.kind, branch=branch, dtype=rows.dtype
    )
