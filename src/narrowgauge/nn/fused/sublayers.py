"""What the orders of a block share: a run's settings, projections with biases, activations, and ends of branches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.kernels import norm as norm_kernel
from narrowgauge.kernels.activation import Kept, decode
from narrowgauge.nn.blocks.spec import BranchSpec
from narrowgauge.nn.fused.adapters import NO_STATE, AdapterGrads, Adapters, AdapterState
from narrowgauge.nn.fused.attention import BlockCall
from narrowgauge.nn.fused.casts import (
    NormGrads,
    NormWeights,
    Projection,
    Stats,
    apply_activation,
    apply_activation_and_keep,
    apply_activation_backward,
    cast_grad_output,
    cast_input,
    compute_wide_activation,
    is_remade_in_backward,
    norm_backward,
)
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
    Fp8Caster,
    compute_grad_bias,
    compute_grad_input,
    compute_grad_weight,
    compute_output,
)
from narrowgauge.scaling.operand import WIDE, Operand
from narrowgauge.weight_copies.casts import BoundWeight

CROSS = 3
"""The number of cross-attention's branch, which has dropout only; attention's is 1 and the MLP's 2."""


class Branch(NamedTuple):
    """What happened to a projection's output before it was added: saved for backward."""

    raw: Tensor | None = None
    """The projection's output, if a norm follows."""
    stats: Stats | None = None
    mask: Tensor | None = None
    """What dropout kept."""
    unscaled: Tensor | None = None
    """The branch before it was multiplied by a parameter."""
    kept: Tensor | None = None
    """Factors [N, 1] of stochastic depth."""
    factor: float | None = None
    """The number that multiplied it, if any."""

    @property
    def is_plain(self) -> bool:
        """Whether the projection's output was added as it is."""
        return all(saved is None for saved in self)


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
    frees: bool = False
    """Whether backward frees what forward saved, or what was recomputed, as soon as it has been read."""
    is_tile: bool = False
    """Only some of the rows: gradients of parameters are summed over tiles, and so computed in FP32."""
    input_grad_dtype: torch.dtype | None = None
    """The dtype of the gradient of the block's input; None for that of the stream."""

    def bind_adapters(self, part: Projection) -> Adapters:
        """Return the adapters of a projection."""
        return Adapters(part, self.tensors, self.dropout.adapters, torch.float32 if self.is_tile else None)


def project(run: Run, x: Operand, use: BoundWeight, part: Projection, biases: Some) -> tuple[Tensor, AdapterState]:
    """Return a projection's output with its bias and adapters, and what these save."""
    dtype = WIDE.get(part.choice.output, torch.bfloat16)
    bias = join_biases(biases, use.weights, dtype, use.plan.transposed_weight)
    y = compute_output(x, use, part.choice, bias)
    return y, run.bind_adapters(part).add(x, y) if part.adapters else NO_STATE


def input_backward(
    run: Run, grad: Operand, use: BoundWeight, part: Projection, state: AdapterState
) -> tuple[Tensor, AdapterState]:
    """Return the gradient of a projection's input, and what its adapters hold now."""
    grad_input = compute_grad_input(grad, use, part.choice)
    if part.adapters:
        state = run.bind_adapters(part).add_grad_input(grad, state, grad_input)
    return grad_input, state


def adapters_backward(
    run: Run, grad: Operand, x: Operand, part: Projection, state: AdapterState, needs: BlockTensors
) -> AdapterGrads:
    """Return the gradients of a projection's adapters."""
    return run.bind_adapters(part).compute_grads(grad, x, state, needs) if part.adapters else {}


def get_outputs(use: BoundWeight, number: int) -> int:
    """Return the outputs of one of the weights that a projection stacks."""
    return use.weights[number].shape[1 if use.plan.transposed_weight else 0]


def get_inputs(use: BoundWeight) -> int:
    """Return the inputs of a projection."""
    return use.weights[0].shape[0 if use.plan.transposed_weight else 1]


def project_backward(
    grad: Operand,
    x: Operand,
    use: BoundWeight,
    part: Projection,
    needs: Some,
    bias_needs: Some,
    dtype: torch.dtype | None = None,
) -> tuple[Some, Some]:
    """Return the gradients of a projection's weights and biases; None for those that are frozen or do not exist.

    ``dtype`` is that of the weights' gradients; default: as the optimizer reads them.
    """
    weights: Some = (None,) * len(needs)
    biases: Some = (None,) * len(bias_needs)
    sizes = [get_outputs(use, number) for number in range(len(use.weights))]
    if any(needs):
        whole = compute_grad_weight(grad, x, part.choice, dtype or use.gradient_dtype, use)
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


class Activated(NamedTuple):
    """The activation's output with its dropout, as the last projection reads it: saved for backward."""

    a: Operand = Operand()
    kept: Tensor | None = None
    """What dropout kept."""
    codes: Kept | None = None
    """The activation's input in 8 bits."""


def is_activation_remade(run: Run) -> bool:
    """Whether ``activate_backward`` computes the activation again, so that forward need not save it."""
    plan = run.plan
    return not run.dropout.mlp and (plan.down.is_frozen or is_remade_in_backward(plan.spec, plan.down, run.caster))


def _is_input_kept_short(run: Run) -> bool:
    """Whether the activation's input is kept in 8 bits: only where kernels write and read it directly."""
    plan = run.plan
    short = plan.activations == "8bit" and plan.checkpoint != "full" and run.needed and not run.again
    return short and is_remade_in_backward(plan.spec, plan.down, run.caster)


def is_input_recomputed(run: Run) -> bool:
    """Whether backward computes the activation's input again, by its product, so that forward saves only what the
    product reads. Dropout inside the MLP would have to be repeated: then everything is saved."""
    plan = run.plan
    wanted = plan.activations == "recompute" and plan.checkpoint == "none" and run.needed and not run.again
    return wanted and not run.dropout.mlp and not run.dropout.adapters


def activate(run: Run, u: Tensor, before: Tensor | None = None) -> Activated:
    """Return act(u) with dropout; ``before`` is what dropout kept the first time, if this is a recomputation."""
    plan, probability = run.plan, run.dropout.mlp
    if not probability:
        if _is_input_kept_short(run):
            a, codes = apply_activation_and_keep(plan.spec, u, plan.down, run.caster)
            return Activated(a, codes=codes)
        return Activated(apply_activation(plan.spec, u, plan.down, run.caster, run.needed))
    value = compute_wide_activation(plan.spec, u, plan.down)
    if before is None:
        _, before = torch.native_dropout(value, probability, True)
    value = torch.ops.aten.native_dropout_backward(value, before, 1.0 / (1.0 - probability))  # the same bits both times
    return Activated(cast_input(plan.down, value, run.caster, run.needed), before)


def activate_backward(run: Run, grad: Tensor, u: Tensor, made: Activated) -> tuple[Operand, Operand]:
    """Return the gradient of u as the first projection's products read it, and the last projection's input."""
    plan = run.plan
    if made.kept is not None:
        grad = torch.ops.aten.native_dropout_backward(grad, made.kept, 1.0 / (1.0 - run.dropout.mlp))
    read = u if made.codes is None else made.codes
    grad_u, a = apply_activation_backward(plan.spec, grad, read, made.a, plan.down, plan.up, run.caster)
    if plan.down.adapters and a.hp is None:
        wide = u if made.codes is None else decode(made.codes, plan.spec.gate_last)
        a = a._replace(hp=compute_wide_activation(plan.spec, wide, plan.down))
    return grad_u, a


class _BranchParts(NamedTuple):
    norm: NormWeights | None
    scale: Tensor | None
    dropout: float
    depth: nn.Module | None
    factor: float = 1.0


def _get_branch(run: Run, number: int) -> _BranchParts:
    spec, tensors, dropout = run.plan.spec, run.tensors, run.dropout
    if number == CROSS:
        return _BranchParts(None, None, dropout.cross, None)
    if number == 1:
        parts = spec.branch1, tensors.post1, tensors.scale1, dropout.branch1, dropout.depth1
    else:
        parts = spec.branch2, tensors.post2, tensors.scale2, dropout.branch2, dropout.depth2
    branch, weight, (scale,), probability, depth = parts
    scale = None if scale is None else scale.detach()
    return _BranchParts(bind_norm(branch.norm, weight), scale, probability, depth, branch.factor)


def is_added_directly(spec: BranchSpec, probability: float, depth: nn.Module | None) -> bool:
    """Whether a branch's projection is added as it is, so that its gradient is that of the sum."""
    return spec.norm is None and spec.scale is None and spec.factor == 1.0 and not probability and depth is None


def needs_values(spec: BranchSpec) -> bool:
    """Whether a branch's backward needs values of the branch, or its factor, and not only what was dropped."""
    return spec.norm is not None or spec.scale is not None or spec.factor != 1.0


def finish_branch(run: Run, number: int, out: Tensor, samples: int) -> tuple[Tensor, Branch]:
    """Apply what branch 1 or 2 goes through before it is added, to rows of tokens of so many samples."""
    parts, branch = _get_branch(run, number), Branch()
    if parts.norm is not None:
        spec = parts.norm.spec
        made = norm_kernel.norm(out, parts.norm.weight, eps=spec.eps, kind=spec.kind, dtype=out.dtype)
        branch, out = Branch(out, (made.mean, made.rstd)), made.out
    if parts.dropout:
        out, mask = torch.native_dropout(out, parts.dropout, True)
        branch = branch._replace(mask=mask)
    if parts.scale is not None:
        branch, out = branch._replace(unscaled=out), (out * parts.scale).to(out.dtype)
    if parts.factor != 1.0:
        branch, out = branch._replace(factor=parts.factor), out * parts.factor
    if parts.depth is not None:
        kept = _draw_depth(parts.depth, out, samples)
        branch, out = branch._replace(kept=kept), (out * kept).to(out.dtype)
    return out, branch


def _draw_depth(module: nn.Module, rows: Tensor, samples: int) -> Tensor:
    """Return the factor of each row, by the model's own module: it draws one number for each sample."""
    factors: Tensor = module(rows.new_ones(samples, 1, 1, dtype=torch.float32))
    return factors.expand(-1, len(rows) // samples, 1).reshape(-1, 1)


def branch_backward(
    run: Run, number: int, part: Projection, grad: Tensor, branch: Branch
) -> tuple[Operand, Tensor | None, Tensor | None]:
    """Return the gradient of a branch's projection as its products read it, those of its norm and of its scale."""
    parts, of_scale = _get_branch(run, number), None
    if branch.kept is not None:
        grad = (grad * branch.kept).to(grad.dtype)
    if branch.factor is not None:
        grad = grad * branch.factor
    if branch.unscaled is not None and parts.scale is not None:
        of_scale = (grad.float() * branch.unscaled).sum(0).to(parts.scale.dtype)
        grad = (grad * parts.scale).to(grad.dtype)
    if branch.mask is not None:
        grad = torch.ops.aten.native_dropout_backward(grad, branch.mask, 1.0 / (1.0 - parts.dropout))
    if parts.norm is None:
        return cast_grad_output(part, grad, run.caster), None, of_scale
    assert branch.raw is not None
    made: NormGrads = norm_backward(parts.norm, grad, branch.raw, branch.stats, None, part, run.caster)
    return made.operand, made.weight, of_scale
