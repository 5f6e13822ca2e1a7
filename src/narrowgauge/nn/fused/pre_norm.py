"""A block whose norms read the residual stream: forward, backward, and what is saved in between.

    h1 = norm1(x + b)                    the norm adds the previous block's branch b, and writes the FP8 operand
    qkv = h1 Wqkv' + bqkv                BF16 out
    o = attend(qkv)                      see attention.py
    x1 = x + b + end1(o Wout' + bout)    added by norm2's kernel, in the residual stream's dtype
    h2 = norm2(x1)                       written in FP8
    u = h2 Wup' + bup;  a = act(u)       the activation writes FP8 in both layouts
    x1, end2(a Wdown' + bdown)           the next block's x and b; their sum for a single block

Branches end with a norm, dropout, a scale or stochastic depth, where the block has them. Without norm1 and norm2,
projections read the stream itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.nn.fused.attention import Attended, attend, attend_backward, make_operand_of
from narrowgauge.nn.fused.casts import (
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
    is_activation_remade,
    needs_values,
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
    x1: Tensor
    h2: Operand
    stats2: Stats | None
    u: Tensor
    activated: Activated
    branch2: Branch


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
    if spec.attention.kind == "own" or any(run.dropout) or needs_values(spec.branch1) or needs_values(spec.branch2):
        return None
    return KeptAttention(saved.stats1, saved.attended, saved.x1)


def run_rest(run: Run, x0: Tensor, kept: KeptAttention) -> Saved:
    """Run again what follows attention, and the norm before it."""
    plan, spec, tensors, caster = run.plan, run.plan.spec, run.tensors, run.caster
    norm1 = bind_norm(spec.norm1, tensors.norm1, tensors.norm1_bias)
    norm2 = bind_norm(spec.norm2, tensors.norm2, tensors.norm2_bias)
    h1, _, _ = apply_norm(norm1, x0.reshape(-1, x0.shape[-1]), None, plan.qkv, caster)
    o = make_operand_of(plan, kept.attended, caster, True)
    h2, stats2, _ = apply_norm(norm2, kept.x1, None, plan.up, caster)
    u = project(h2, run.uses.up, plan.up, tensors.up_biases)
    activated = Activated() if is_activation_remade(run) else activate(run, u)
    return Saved(h1, kept.stats1, kept.attended, o, Branch(), kept.x1, h2, stats2, u, activated, Branch())


def forward(run: Run, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Return the residual stream before the block and within it, the block's last branch, and what is saved."""
    plan, tensors, uses, caster, spec = run.plan, run.tensors, run.uses, run.caster, run.plan.spec
    batch, length, width = x.shape
    rows, flat = x.reshape(-1, width), None if branch is None else branch.reshape(-1, width)
    norm1 = bind_norm(spec.norm1, tensors.norm1, tensors.norm1_bias)
    norm2 = bind_norm(spec.norm2, tensors.norm2, tensors.norm2_bias)
    h1, stats1, x0 = apply_norm(norm1, rows, flat, plan.qkv, caster)
    qkv = project(h1, uses.qkv, plan.qkv, tensors.input_biases)
    attended = attend(plan, qkv.view(batch, length, -1), run.call, tensors, run.needed, run.dropout.attention)
    o = make_operand_of(plan, attended, caster, run.needed)
    out, branch1 = finish_branch(run, 1, project(o, uses.out, plan.out, tensors.out_bias), batch)
    h2, stats2, x1 = apply_norm(norm2, x0, out, plan.up, caster)
    u = project(h2, uses.up, plan.up, tensors.up_biases)
    whole = not run.again or needs_values(spec.branch2)
    activated = activate(run, u) if whole or not is_activation_remade(run) else Activated()
    down = torch.empty_like(out)  # of a recomputation, which needs only what was dropped: that depends on no values
    if whole:
        down = project(activated.a, uses.down, plan.down, tensors.down_bias)
    y, branch2 = finish_branch(run, 2, down, batch)
    report_activations(run, (h1, h2), qkv, attended, out, u, activated.a, y)
    saved = Saved(h1, stats1, attended, o, branch1, x1, h2, stats2, u, activated, branch2)
    return x0.view_as(x), x1, y, saved


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
    plan, tensors, uses, caster, spec = run.plan, run.tensors, run.uses, run.caster, run.plan.spec
    norm1 = bind_norm(spec.norm1, tensors.norm1, tensors.norm1_bias)
    norm2 = bind_norm(spec.norm2, tensors.norm2, tensors.norm2_bias)
    g, of_post2, of_scale2 = given, None, None
    if g is None:
        g, of_post2, of_scale2 = branch_backward(run, 2, plan.down, grad, saved.branch2)
    grad_a = compute_grad_input(g, uses.down, plan.down.choice)
    grad_u, a = activate_backward(run, grad_a, saved.u, saved.activated)
    of_down, of_down_bias = project_backward(g, a, uses.down, plan.down, needs.down, needs.down_bias)
    grad_h2 = compute_grad_input(grad_u, uses.up, plan.up.choice)
    of_ups, of_up_biases = project_backward(grad_u, saved.h2, uses.up, plan.up, needs.ups, needs.up_biases)
    direct = saved.branch1.is_plain
    two = norm_backward(norm2, grad_h2, saved.x1, saved.stats2, grad, plan.out if direct else None, caster)
    g1, of_post1, of_scale1 = two.operand, None, None
    if not direct:
        g1, of_post1, of_scale1 = branch_backward(run, 1, plan.out, two.stream, saved.branch1)
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
    one = norm_backward(norm1, grad_h1, rows, saved.stats1, two.stream, reader, caster)
    report_gradients(run, g, grad_u, g1, grad_qkv)
    grads = BlockTensors(
        (one.weight,), (one.bias,), of_inputs, of_input_biases, of_out, of_out_bias, (two.weight,), (two.bias,),
        of_ups, of_up_biases, of_down, of_down_bias, (of_post1,), (of_post2,), (of_scale1,), (of_scale2,),
        tuple(of_own),
    )  # fmt: skip
    return one.stream, one.operand, grads, of_others


def drop_unneeded(plan: BlockPlan, saved: Saved) -> Saved:
    """Drop what only forward's products read, and what selective checkpointing recomputes."""
    saved.o = saved.o._replace(lp=None) if saved.o.lp_t is not None else saved.o
    selective = plan.checkpoint == "selective"
    saved.activated = saved.activated.without(operand=selective, forward=True)
    if selective:
        saved.h1 = saved.h2 = Operand()
    return saved


def recompute(run: Run, x0: Tensor, saved: Saved) -> Saved:
    """Recompute what selective checkpointing dropped."""
    plan, spec, tensors = run.plan, run.plan.spec, run.tensors
    if plan.checkpoint == "selective":
        saved = replace(saved)
        rows = x0.reshape(-1, x0.shape[-1])
        norm1 = bind_norm(spec.norm1, tensors.norm1, tensors.norm1_bias)
        norm2 = bind_norm(spec.norm2, tensors.norm2, tensors.norm2_bias)
        saved.h1, _, _ = apply_norm(norm1, rows, None, plan.qkv, run.caster)
        saved.h2, _, _ = apply_norm(norm2, saved.x1, None, plan.up, run.caster)
        if not is_activation_remade(run):
            saved.activated = activate(run, saved.u, saved.activated.kept)
    return saved
