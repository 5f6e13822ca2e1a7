"""A block whose norms come after the sums (BERT): forward, backward, and what is saved in between.

    qkv = x Wqkv' + bqkv;  o = attend(qkv)
    r1 = x + o Wout' + bout;  x1 = norm1(r1)
    u = x1 Wup' + bup;  a = act(u)
    r2 = x1 + a Wdown' + bdown;  y = norm2(r2)

Branches end as in ``pre_norm``. The stream keeps its dtype; projections read a cast of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from narrowgauge.kernels import norm as norm_kernel
from narrowgauge.nn.fused.attention import Attended, attend, attend_backward, make_operand_of
from narrowgauge.nn.fused.casts import (
    NormWeights,
    Projection,
    Stats,
    make_operand,
    norm_backward,
)
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, bind_norm
from narrowgauge.nn.fused.reports import report_activations, report_gradients
from narrowgauge.nn.fused.sublayers import (
    Activated,
    Branch,
    Run,
    activate,
    activate_backward,
    branch_backward,
    finish_branch,
    project,
    project_backward,
)
from narrowgauge.nn.products.gemm import Operand, compute_grad_input


@dataclass
class Saved:
    """Tensors that forward saves for backward."""

    h1: Operand
    attended: Attended
    o: Operand
    branch1: Branch
    r1: Tensor
    stats1: Stats
    h2: Operand
    u: Tensor
    activated: Activated
    branch2: Branch
    r2: Tensor
    stats2: Stats


def forward(run: Run, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Saved]:
    """Return the block's input, its output, no branch, and what is saved."""
    assert branch is None
    plan, tensors, uses, caster = run.plan, run.tensors, run.uses, run.caster
    batch, length, width = x.shape
    rows = x.reshape(-1, width)
    h1 = _read(rows, plan.qkv, run)
    qkv = project(h1, uses.qkv, plan.qkv, tensors.input_biases)
    attended = attend(plan, qkv.view(batch, length, -1), run.call, tensors, run.needed, run.dropout.attention)
    o = make_operand_of(plan, attended, caster, run.needed)
    out, branch1 = finish_branch(run, 1, project(o, uses.out, plan.out, tensors.out_bias), batch)
    norm1, norm2 = _bind_norms(run)
    x1, r1, stats1 = _add_and_norm(norm1, rows, out)
    h2 = _read(x1, plan.up, run)
    u = project(h2, uses.up, plan.up, tensors.up_biases)
    activated = activate(run, u)
    down, branch2 = finish_branch(run, 2, project(activated.a, uses.down, plan.down, tensors.down_bias), batch)
    y, r2, stats2 = _add_and_norm(norm2, x1, down)
    report_activations(run, (x1, y), qkv, attended, out, u, activated.a, down)
    return x, y, None, Saved(h1, attended, o, branch1, r1, stats1, h2, u, activated, branch2, r2, stats2)


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
    plan, tensors, uses, caster = run.plan, run.tensors, run.uses, run.caster
    norm1, norm2 = _bind_norms(run)
    direct = saved.branch2.is_plain
    two = norm_backward(norm2, grad, saved.r2, saved.stats2, None, plan.down if direct else None, caster)
    g, of_post2, of_scale2 = two.operand, None, None
    if not direct:
        g, of_post2, of_scale2 = branch_backward(run, 2, plan.down, two.stream, saved.branch2)
    grad_a = compute_grad_input(g, uses.down, plan.down.choice)
    grad_u, a = activate_backward(run, grad_a, saved.u, saved.activated)
    of_down, of_down_bias = project_backward(g, a, uses.down, plan.down, needs.down, needs.down_bias)
    grad_x1 = two.stream.add_(compute_grad_input(grad_u, uses.up, plan.up.choice))
    of_ups, of_up_biases = project_backward(grad_u, saved.h2, uses.up, plan.up, needs.ups, needs.up_biases)
    direct = saved.branch1.is_plain
    one = norm_backward(norm1, grad_x1, saved.r1, saved.stats1, None, plan.out if direct else None, caster)
    g1, of_post1, of_scale1 = one.operand, None, None
    if not direct:
        g1, of_post1, of_scale1 = branch_backward(run, 1, plan.out, one.stream, saved.branch1)
    grad_o = compute_grad_input(g1, uses.out, plan.out.choice)
    of_out, of_out_bias = project_backward(g1, saved.o, uses.out, plan.out, needs.out, needs.out_bias)
    grad_qkv, of_own, of_others = attend_backward(
        plan, saved.attended, grad_o, x0.shape, tensors, caster, tuple(bool(need) for need in needs.own)
    )
    grad_x = one.stream.add_(compute_grad_input(grad_qkv, uses.qkv, plan.qkv.choice))
    of_inputs, of_input_biases = project_backward(
        grad_qkv, saved.h1, uses.qkv, plan.qkv, needs.inputs, needs.input_biases
    )
    report_gradients(run, g, grad_u, g1, grad_qkv)
    grads = BlockTensors(
        (one.weight,), (one.bias,), of_inputs, of_input_biases, of_out, of_out_bias, (two.weight,), (two.bias,),
        of_ups, of_up_biases, of_down, of_down_bias, (of_post1,), (of_post2,), (of_scale1,), (of_scale2,),
        tuple(of_own),
    )  # fmt: skip
    return grad_x, Operand(), grads, of_others


def drop_unneeded(plan: BlockPlan, saved: Saved) -> Saved:
    """Drop what only forward's products read."""
    for name in ("h1", "h2", "o"):
        operand: Operand = getattr(saved, name)
        setattr(saved, name, operand._replace(lp=None) if operand.lp_t is not None else operand)
    saved.activated = saved.activated.without(forward=saved.activated.a.lp_t is not None)
    return saved


def recompute(run: Run, x0: Tensor, saved: Saved) -> Saved:
    """Return what was saved: this order drops nothing that selective checkpointing could recompute."""
    return saved


def _read(rows: Tensor, reader: Projection, run: Run) -> Operand:
    return make_operand(rows, reader.input_formats, reader.input, run.caster, run.needed)


def _bind_norms(run: Run) -> tuple[NormWeights, NormWeights]:
    spec, tensors = run.plan.spec, run.tensors
    norm1 = bind_norm(spec.norm1, tensors.norm1, tensors.norm1_bias)
    norm2 = bind_norm(spec.norm2, tensors.norm2, tensors.norm2_bias)
    assert norm1 is not None and norm2 is not None
    return norm1, norm2


def _add_and_norm(norms: NormWeights, rows: Tensor, branch: Tensor) -> tuple[Tensor, Tensor, Stats]:
    made = norm_kernel.norm(
        rows, norms.weight, norms.bias, eps=norms.spec.eps, kind=norms.spec.kind, branch=branch, dtype=rows.dtype
    )
    assert made.residual is not None
    return made.out, made.residual, (made.mean, made.rstd)
