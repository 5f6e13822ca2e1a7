"""What the orders of a block share: one run's settings, projections with biases, and branches with norm and dropout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.kernels import norm as norm_kernel
from narrowgauge.nn.blocks.spec import NormSpec
from narrowgauge.nn.fused.attention import BlockCall
from narrowgauge.nn.fused.casts import NormGrads, Projection, Stats, cast_grad_output, norm_backward
from narrowgauge.nn.fused.plan import (
    NO_DROPOUT,
    BlockPlan,
    BlockTensors,
    BlockWeights,
    Dropout,
    Some,
    bind_norm,
    join_biases,
)
from narrowgauge.nn.products.gemm import (
    WIDE,
    Fp8Caster,
    Operand,
    compute_grad_bias,
    compute_grad_weight,
    compute_output,
)
from narrowgauge.nn.products.weight_casts import BoundWeight


class Branch(NamedTuple):
    """What happened to a projection's output before it was added: saved for backward."""

    raw: Tensor | None = None
    """The projection's output, if a norm follows."""
    stats: Stats | None = None
    mask: Tensor | None = None
    """What dropout kept."""


class Run(NamedTuple):
    """One forward, or its repetition in backward."""

    plan: BlockPlan
    call: BlockCall
    tensors: BlockTensors
    uses: BlockWeights
    caster: Fp8Caster | None
    needed: bool
    dropout: Dropout = NO_DROPOUT
    again: bool = False
    """Recomputation in backward, which does not need the last branch."""


def project(x: Operand, use: BoundWeight, part: Projection, biases: Some) -> Tensor:
    """Return a projection's output with its bias."""
    dtype = WIDE.get(part.choice.output, torch.bfloat16)
    bias = join_biases(biases, use.weights, dtype, use.plan.transposed_weight)
    return compute_output(x, use, part.choice, bias)


def get_outputs(use: BoundWeight, number: int) -> int:
    """Return the outputs of one of the weights that a projection stacks."""
    return use.weights[number].shape[1 if use.plan.transposed_weight else 0]


def project_backward(
    grad: Operand, x: Operand, use: BoundWeight, part: Projection, needs: Some, bias_needs: Some
) -> tuple[Some, Some]:
    """Return the gradients of a projection's weights and biases; None for those that are frozen or do not exist."""
    weights: Some = (None,) * len(needs)
    biases: Some = (None,) * len(bias_needs)
    sizes = [get_outputs(use, number) for number in range(len(use.weights))]
    if any(needs):
        whole = compute_grad_weight(grad, x, part.choice, use.gradient_dtype, use)
        pieces = whole.split(sizes) if len(sizes) > 1 else (whole,)
        weights = tuple(
            (piece.t() if use.plan.transposed_weight else piece) if needed else None
            for piece, needed in zip(pieces, needs, strict=True)
        )
    if any(bias_needs):
        total = compute_grad_bias(grad)
        parts = total.split(sizes) if len(sizes) > 1 else (total,)
        biases = tuple(piece if needed else None for piece, needed in zip(parts, bias_needs, strict=True))
    return weights, biases


def finish_branch(
    out: Tensor, spec: NormSpec | None, weight: Some, dropout: float, needed: bool
) -> tuple[Tensor, Branch]:
    """Apply the norm and the dropout of a branch."""
    branch = Branch()
    if spec is not None:
        norms = bind_norm(spec, weight)
        made = norm_kernel.norm(out, norms.weight, eps=spec.eps, kind=spec.kind, dtype=out.dtype)
        branch, out = Branch(out, (made.mean, made.rstd)), made.out
    if dropout:
        out, mask = torch.native_dropout(out, dropout, True)
        branch = branch._replace(mask=mask)
    return out, branch


def branch_backward(
    part: Projection,
    grad: Tensor,
    branch: Branch,
    spec: NormSpec | None,
    weight: Some,
    dropout: float,
    caster: Fp8Caster | None,
) -> tuple[Operand, Tensor | None]:
    """Return the gradient of a branch's projection as its products read it, and that of the branch's norm."""
    if branch.mask is not None:
        grad = torch.ops.aten.native_dropout_backward(grad, branch.mask, 1.0 / (1.0 - dropout))
    if spec is None:
        return cast_grad_output(part, grad, caster), None
    assert branch.raw is not None and branch.stats is not None
    made: NormGrads = norm_backward(bind_norm(spec, weight), grad, branch.raw, branch.stats, None, part, caster)
    return made.operand, made.weight
