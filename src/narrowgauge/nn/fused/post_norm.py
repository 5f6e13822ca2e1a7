"""A block whose norms come after the sums (BERT): forward, backward, and what is saved in between.

    qkv = x Wqkv' + bqkv;  o = attend(qkv)
    r1 = x + o Wout' + bout;  x1 = norm1(r1)
    u = x1 Wup' + bup;  a = act(u)
    r2 = x1 + a Wdown' + bdown;  y = norm2(r2)

Branches end as in ``pre_norm``. The stream keeps its dtype; projections read a cast of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from narrowgauge.kernels import norm as norm_kernel
from narrowgauge.nn.fused import halves
from narrowgauge.nn.fused.attention import Attended
from narrowgauge.nn.fused.casts import NormWeights, Projection, Stats, make_operand, norm_backward
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, bind_norms
from narrowgauge.nn.fused.reports import report_activations, report_gradients
from narrowgauge.nn.fused.sublayers import Run
from narrowgauge.nn.products.gemm import Operand


@dataclass
class Saved:
    """What forward saves for backward."""

    attention: halves.AttentionHalf
    r1: Tensor
    stats1: Stats
    mlp: halves.MlpHalf
    r2: Tensor
    stats2: Stats

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
    down, mlp = halves.run_mlp(run, _read(x1, plan.up, run), len(x))
    y, r2, stats2 = _add_and_norm(norm2, x1, down)
    report_activations(run, (x1, y), qkv, attention.attended, out, mlp.u, mlp.activated.a, down)
    return x, y, None, Saved(attention, r1, stats1, mlp, r2, stats2)


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
    direct = saved.attention.branch.is_plain
    grad_x1 = two.stream.add_(mlp.grad_h)
    one = norm_backward(norm1, grad_x1, saved.r1, saved.stats1, None, plan.out if direct else None, caster)
    end1 = halves.end_backward(run, 1, saved.attention.branch, one.stream, one.operand if direct else None)
    attention = halves.attention_backward(run, saved.attention, end1.grad, x0.shape, needs)
    grad_x = one.stream.add_(attention.grad_h)
    report_gradients(run, end2.grad, mlp.grad_first, end1.grad, attention.grad_first)
    return grad_x, Operand(), halves.collect_grads(one, attention, end1, two, mlp, end2), list(attention.others)


def drop_unneeded(plan: BlockPlan, saved: Saved) -> Saved:
    """Drop what backward does not need, or computes again."""
    halves.drop_unneeded(plan, saved.attention, saved.mlp)
    return saved


def recompute(run: Run, x0: Tensor, saved: Saved) -> Saved:
    """Recompute what selective checkpointing dropped."""
    if run.plan.checkpoint != "selective":
        return saved
    plan, (norm1, _) = run.plan, bind_norms(run.plan.spec, run.tensors)
    h1 = _read(x0.reshape(-1, x0.shape[-1]), plan.qkv, run)
    x1 = _norm(norm1, saved.r1).out
    attention, mlp = halves.restore(run, saved.attention, saved.mlp, h1, _read(x1, plan.up, run))
    return replace(saved, attention=attention, mlp=mlp)


def _read(rows: Tensor, reader: Projection, run: Run) -> Operand:
    return make_operand(rows, reader.input_formats, reader.input, run.caster, run.needed)


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
