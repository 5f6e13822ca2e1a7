"""A block whose attention and MLP both read its input (GPT-NeoX, Phi, Cohere): forward, backward, what is saved.

    y = x + attend(norm1(x) Wqkv' + bqkv) Wout' + bout + act(norm2(x) Wup' + bup) Wdown' + bdown

Both norms may be one module. Branches end as in ``pre_norm``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from narrowgauge.nn.fused import halves
from narrowgauge.nn.fused.attention import Attended
from narrowgauge.nn.fused.casts import Projection, Stats, apply_norm, get_inner_dtype, norm_backward
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, bind_norms
from narrowgauge.nn.fused.reports import report_activations, report_gradients
from narrowgauge.nn.fused.sublayers import Run, needs_values
from narrowgauge.scaling.operand import Operand


@dataclass
class Saved:
    """What forward saves for backward."""

    stats1: Stats | None
    attention: halves.AttentionHalf
    stats2: Stats | None
    mlp: halves.MlpHalf

    @property
    def attended(self) -> Attended:
        return self.attention.attended


def forward(run: Run, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Return the block's input, the input with attention's branch, the MLP's branch, and what is saved."""
    assert branch is None
    plan, caster, (norm1, norm2) = run.plan, run.caster, bind_norms(run.plan.spec, run.tensors)
    rows = x.reshape(-1, x.shape[-1])
    h1, stats1, _ = apply_norm(norm1, rows, None, plan.qkv, caster)
    out, qkv, attention = halves.run_attention(run, h1, x.shape)
    h2, stats2, _ = apply_norm(norm2, rows, None, plan.up, caster)
    down, mlp = halves.run_mlp(run, h2, len(x), not run.again or needs_values(plan.spec.branch2))
    report_activations(run, (h1, h2), qkv, attention.attended, out, down)
    return x, rows + out, down, Saved(stats1, attention, stats2, mlp)


def backward(
    run: Run,
    saved: Saved,
    x0: Tensor,
    grad: Tensor,
    given: Operand | None,
    reader: Projection | None,
    needs: BlockTensors,
) -> tuple[Tensor, Operand, BlockTensors, list[Tensor | None]]:
    """Return the gradient of x, the same as ``reader`` reads it, those of parameters and of other arguments."""
    caster, (norm1, norm2) = run.caster, bind_norms(run.plan.spec, run.tensors)
    end2 = halves.end_backward(run, 2, saved.mlp.branch, grad, given)
    mlp = halves.mlp_backward(run, saved.mlp, end2.grad, needs)
    halves.release_mlp(run, saved.mlp)
    end1 = halves.end_backward(run, 1, saved.attention.branch, grad, None)
    attention = halves.attention_backward(run, saved.attention, end1.grad, x0.shape, needs)
    rows = x0.reshape(-1, x0.shape[-1])
    two = norm_backward(norm2, mlp.grad_h, rows, saved.stats2, grad, None, caster, get_inner_dtype(caster))
    one = norm_backward(norm1, attention.grad_h, rows, saved.stats1, two.stream, reader, caster)
    report_gradients(run, end2.grad, end1.grad, attention.grad_first)
    grads = halves.collect_grads(run, one, attention, end1, two, mlp, end2)
    return one.stream, one.operand, grads, list(attention.others)


def drop_unneeded(plan: BlockPlan, saved: Saved) -> Saved:
    """Drop what backward does not need, or computes again."""
    halves.drop_unneeded(plan, saved.attention, saved.mlp)
    return saved


def recompute(run: Run, x0: Tensor, saved: Saved) -> Saved:
    """Recompute what selective checkpointing dropped."""
    if run.plan.checkpoint != "selective":
        return saved
    plan, (norm1, norm2) = run.plan, bind_norms(run.plan.spec, run.tensors)
    rows = x0.reshape(-1, x0.shape[-1])
    h1, _, _ = apply_norm(norm1, rows, None, plan.qkv, run.caster)
    h2, _, _ = apply_norm(norm2, rows, None, plan.up, run.caster)
    attention, mlp = halves.restore(run, saved.attention, saved.mlp, h1, h2)
    return replace(saved, attention=attention, mlp=mlp)
