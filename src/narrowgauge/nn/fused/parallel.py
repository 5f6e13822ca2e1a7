"""A block whose attention and MLP both read its input (GPT-NeoX, Phi, Cohere): forward, backward, what is saved.

    y = x + attend(norm1(x) Wqkv' + bqkv) Wout' + bout + act(norm2(x) Wup' + bup) Wdown' + bdown

Both norms may be one module. Branches end as in ``pre_norm``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from narrowgauge.nn.fused.attention import Attended, attend, attend_backward, make_operand_of
from narrowgauge.nn.fused.casts import (
    NormWeights,
    Projection,
    Stats,
    apply_norm,
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
    stats1: Stats | None
    attended: Attended
    o: Operand
    branch1: Branch
    h2: Operand
    stats2: Stats | None
    u: Tensor
    activated: Activated
    branch2: Branch


def forward(run: Run, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Return the block's input, the input with attention's branch, the MLP's branch, and what is saved."""
    assert branch is None
    plan, tensors, uses, caster = run.plan, run.tensors, run.uses, run.caster
    batch, length, width = x.shape
    rows = x.reshape(-1, width)
    norm1, norm2 = _bind_norms(run)
    h1, stats1, _ = apply_norm(norm1, rows, None, plan.qkv, caster)
    qkv = project(h1, uses.qkv, plan.qkv, tensors.input_biases)
    attended = attend(plan, qkv.view(batch, length, -1), run.call, tensors, run.needed, run.dropout.attention)
    o = make_operand_of(plan, attended, caster, run.needed)
    out, branch1 = finish_branch(run, 1, project(o, uses.out, plan.out, tensors.out_bias), batch)
    h2, stats2, _ = apply_norm(norm2, rows, None, plan.up, caster)
    u = project(h2, uses.up, plan.up, tensors.up_biases)
    activated = activate(run, u)
    down, branch2 = finish_branch(run, 2, project(activated.a, uses.down, plan.down, tensors.down_bias), batch)
    report_activations(run, (h1, h2), qkv, attended, out, u, activated.a, down)
    return x, rows + out, down, Saved(h1, stats1, attended, o, branch1, h2, stats2, u, activated, branch2)


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
    plan, tensors, uses, caster = run.plan, run.tensors, run.uses, run.caster
    norm1, norm2 = _bind_norms(run)
    g, of_post2, of_scale2 = given, None, None
    if g is None:
        g, of_post2, of_scale2 = branch_backward(run, 2, plan.down, grad, saved.branch2)
    grad_a = compute_grad_input(g, uses.down, plan.down.choice)
    grad_u, a = activate_backward(run, grad_a, saved.u, saved.activated)
    of_down, of_down_bias = project_backward(g, a, uses.down, plan.down, needs.down, needs.down_bias)
    grad_h2 = compute_grad_input(grad_u, uses.up, plan.up.choice)
    of_ups, of_up_biases = project_backward(grad_u, saved.h2, uses.up, plan.up, needs.ups, needs.up_biases)
    g1, of_post1, of_scale1 = branch_backward(run, 1, plan.out, grad, saved.branch1)
    grad_o = compute_grad_input(g1, uses.out, plan.out.choice)
    of_out, of_out_bias = project_backward(g1, saved.o, uses.out, plan.out, needs.out, needs.out_bias)
    grad_qkv, of_own, of_others = attend_backward(
        plan, saved.attended, grad_o, x0.shape, tensors, caster, tuple(bool(need) for need in needs.own)
    )
    grad_h1 = compute_grad_input(grad_qkv, uses.qkv, plan.qkv.choice)
    of_inputs, of_input_biases = project_backward(
        grad_qkv, saved.h1, uses.qkv, plan.qkv, needs.inputs, needs.input_biases
    )
    rows = x0.reshape(-1, x0.shape[-1])
    two = norm_backward(norm2, grad_h2, rows, saved.stats2, grad, None, caster)
    one = norm_backward(norm1, grad_h1, rows, saved.stats1, two.stream, reader, caster)
    report_gradients(run, g, grad_u, g1, grad_qkv)
    grads = BlockTensors(
        (one.weight,), (one.bias,), of_inputs, of_input_biases, of_out, of_out_bias, (two.weight,), (two.bias,),
        of_ups, of_up_biases, of_down, of_down_bias, (of_post1,), (of_post2,), (of_scale1,), (of_scale2,),
        tuple(of_own),
    )  # fmt: skip
    return one.stream, one.operand, grads, of_others


def drop_unneeded(plan: BlockPlan, saved: Saved) -> Saved:
    """Drop what only forward's products read."""
    for name in ("o",):
        operand: Operand = getattr(saved, name)
        setattr(saved, name, operand._replace(lp=None) if operand.lp_t is not None else operand)
    saved.activated = saved.activated.without(forward=saved.activated.a.lp_t is not None)
    return saved


def recompute(run: Run, x0: Tensor, saved: Saved) -> Saved:
    """Return what was saved: this order drops nothing that selective checkpointing could recompute."""
    return saved


def _bind_norms(run: Run) -> tuple[NormWeights | None, NormWeights | None]:
    spec, tensors = run.plan.spec, run.tensors
    return (
        bind_norm(spec.norm1, tensors.norm1, tensors.norm1_bias),
        bind_norm(spec.norm2, tensors.norm2, tensors.norm2_bias),
    )
