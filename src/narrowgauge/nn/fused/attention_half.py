"""The first half of a block whose MLP runs as a module, such as a mixture of experts: forward, backward, what is saved.

    h1 = norm1(x);  x1 = x + end1(attend(h1 Wqkv' + bqkv) Wout' + bout)      as in ``pre_norm``
    h2 = norm2(x1)                                                          in BF16: what the module reads

The function returns x1 and h2, and its backward gets the gradients of both: the kernel of norm2's backward adds them,
and writes what the output projection's products read. The block is x1 + mlp(h2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels import norm as norm_kernel
from narrowgauge.nn.fused import halves
from narrowgauge.nn.fused.attention import Attended
from narrowgauge.nn.fused.casts import Projection, Stats, apply_norm, get_inner_dtype, norm_backward
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, bind_norms
from narrowgauge.nn.fused.reports import report_half
from narrowgauge.nn.fused.sublayers import Run
from narrowgauge.scaling.operand import Operand


@dataclass
class Saved:
    """What forward saves for backward."""

    stats1: Stats | None
    attention: halves.AttentionHalf
    x1: Tensor
    stats2: Stats

    @property
    def attended(self) -> Attended:
        return self.attention.attended


def get_output_dtype(plan: BlockPlan) -> torch.dtype:
    """Return the format of h2: BF16, or FP32 where the block is compared with the original."""
    return torch.float32 if "fp32" in plan.out.choice else torch.bfloat16


def forward(run: Run, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Return the block's input, x1, h2, and what is saved."""
    assert branch is None
    plan, (norm1, norm2) = run.plan, bind_norms(run.plan.spec, run.tensors)
    assert norm2 is not None
    rows = x.reshape(-1, x.shape[-1])
    h1, stats1, x0 = apply_norm(norm1, rows, None, plan.qkv, run.caster)
    out, qkv, attention = halves.run_attention(run, h1, x.shape)
    made = norm_kernel.norm(
        x0, norm2.weight, norm2.bias, eps=norm2.spec.eps, kind=norm2.spec.kind, branch=out,
        dtype=get_output_dtype(plan),
    )  # fmt: skip
    assert made.residual is not None
    report_half(run, (h1, made.out), qkv, attention.attended, out)
    return x, made.residual, made.out, Saved(stats1, attention, made.residual, (made.mean, made.rstd))


def backward(
    run: Run,
    saved: Saved,
    x0: Tensor,
    grad: Tensor,
    given: Operand | None,
    reader: Projection | None,
    needs: BlockTensors,
) -> tuple[Tensor, Operand, BlockTensors, list[Tensor | None]]:
    """Return the gradient of x, the same as ``reader`` reads it, those of parameters and of other arguments.

    ``grad`` is the gradient of x1, ``given`` that of h2.
    """
    plan, caster, (norm1, norm2) = run.plan, run.caster, bind_norms(run.plan.spec, run.tensors)
    of_h2 = None if given is None else given.hp
    grad_h2 = torch.zeros_like(grad, dtype=get_output_dtype(plan)) if of_h2 is None else of_h2.reshape(grad.shape)
    writer = plan.out if saved.attention.branch.is_plain else None
    inner = get_inner_dtype(caster) if writer is not None else None
    two = norm_backward(norm2, grad_h2, saved.x1, saved.stats2, grad, writer, caster, inner)
    if run.frees:
        saved.x1 = saved.x1.new_empty(0)
    end1 = halves.end_backward(run, 1, saved.attention.branch, two.stream, None if writer is None else two.operand)
    attention = halves.attention_backward(run, saved.attention, end1.grad, x0.shape, needs)
    rows = x0.reshape(-1, x0.shape[-1])
    one = norm_backward(norm1, attention.grad_h, rows, saved.stats1, two.stream, reader, caster, run.input_grad_dtype)
    if events.wants_tensors():
        end1.grad.report("gradient", f"{plan.path}.{plan.spec.output}")
        attention.grad_first.report("gradient", f"{plan.path}.{plan.spec.inputs[0]}")
    grads = BlockTensors(
        (one.weight,), (one.bias,), attention.first, attention.first_biases, attention.last, attention.last_bias,
        (two.weight,), (two.bias,), (), (), (None,), (None,),
        (end1.norm,), (None,), (end1.scale,), (None,), attention.own,
    )  # fmt: skip
    return one.stream, one.operand, halves.place_adapters(run, grads, attention.adapters), list(attention.others)


def drop_unneeded(plan: BlockPlan, saved: Saved) -> Saved:
    """Drop what only forward's products read, and what is computed again."""
    attention = saved.attention
    attention.o = plan.out.keep_for_backward(attention.o)
    attention.h = Operand() if plan.checkpoint == "selective" else plan.qkv.keep_for_backward(attention.h)
    return saved


def recompute(run: Run, x0: Tensor, saved: Saved) -> Saved:
    """Recompute what selective checkpointing dropped: the output of the first norm. The second one's is the module's
    input, which that keeps."""
    if run.plan.checkpoint != "selective":
        return saved
    norm1, _ = bind_norms(run.plan.spec, run.tensors)
    h1, _, _ = apply_norm(norm1, x0.reshape(-1, x0.shape[-1]), None, run.plan.qkv, run.caster)
    return replace(saved, attention=replace(saved.attention, h=h1))
