"""Forward and backward of one block as plain functions, which an autograd function runs or a CUDA graph records.

With ``checkpoint="full"`` only the block's input is saved, and backward runs forward again. Attention is kept if that
takes less memory than the gradients of the block's parameters, which do not exist yet: backward frees the one as it
makes the other, so that the peak does not change. With ``selective`` the results of products and attention are saved,
and norms and activations are recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.nn.fused import attention_half, parallel, post_norm, pre_norm
from narrowgauge.nn.fused.attention import BlockCall
from narrowgauge.nn.fused.casts import WantedGradient
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, BlockWeights, Dropout, bind_weights
from narrowgauge.nn.fused.sublayers import Run
from narrowgauge.nn.products.gemm import Fp8Caster
from narrowgauge.nn.side_effects import StateBefore
from narrowgauge.random_state import get_random_state, set_random_state
from narrowgauge.scaling.operand import Operand

SHARE_OF_GRADIENTS = 0.75
"""How much of the memory of a block's future gradients its kept attention may take."""
ORDERS: dict[str, Any] = {"pre": pre_norm, "post": post_norm, "parallel": parallel, "half": attention_half}
"""The functions of each order: forward, backward, drop_unneeded, recompute."""


class BlockInput(NamedTuple):
    """What a block's forward is given."""

    plan: BlockPlan
    call: BlockCall
    tensors: BlockTensors
    x: Tensor
    branch: Tensor | None
    """What is still to be added to x, in a chain of blocks."""
    needed: bool
    """Whether backward will follow."""
    dropout: Dropout
    summed: bool
    """Whether to return the sum of residual stream and branch, or both."""

    def list_stream(self) -> list[Tensor]:
        """Return the residual stream, and the branch if there is one."""
        return [self.x] if self.branch is None else [self.x, self.branch]


class Repeated(NamedTuple):
    """A forward that backward has run again, before it computes gradients."""

    x0: Tensor
    out: Tensor | None
    """The last branch, or what the MLP of a "half" reads."""
    kept: Any
    uses: BlockWeights


@dataclass
class Forwarded:
    """What forward leaves for backward."""

    given: BlockInput
    caster: Fp8Caster | None
    x0: Tensor
    """The residual stream before the block."""
    random: Tensor | None
    """The state of the random numbers before a forward that backward repeats."""
    kept: Any
    """Saved by the block's order; None if backward runs all of forward again."""
    copies: list[tuple[Tensor | None, ...]] | None
    """Saved of the weights' casts."""
    repeated: Repeated | None = None
    """The same forward once more, if the backward of what reads its output needed it (``modular_mlp``)."""

    def without_inputs(self) -> Forwarded:
        """Return the same without tensors that autograd saves."""
        return replace(self, given=self.given._replace(x=None, branch=None, tensors=None), x0=None)  # type: ignore[arg-type]

    def with_input(self, x0: Tensor) -> Forwarded:
        return replace(self, x0=x0)

    def make_run(self, tensors: BlockTensors) -> Run:
        """Return the run of a repeated forward, which records no statistics."""
        given, plan = self.given, self.given.plan
        uses = bind_weights(plan, tensors, True, again=True)
        return Run(plan, given.call, tensors, uses, plan.caster(False), True, given.dropout, again=True)


def repeats_own_code(plan: BlockPlan) -> bool:
    """Whether backward runs the model's own code again."""
    return plan.checkpoint == "full" and (plan.spec.attention.kind == "own" or plan.spec.cross is not None)


def is_repeated_at_random(plan: BlockPlan, dropout: Dropout) -> bool:
    """Whether backward runs a forward again that draws random numbers."""
    return repeats_own_code(plan) or (plan.checkpoint == "full" and any(dropout))


def run_forward(given: BlockInput) -> tuple[tuple[Tensor, ...], Forwarded]:
    """Return residual stream and branch, or their sum; and what backward needs."""
    plan, x, needed = given.plan, given.x, given.needed
    order = ORDERS[plan.spec.order]
    random = get_random_state(x.device) if needed and is_repeated_at_random(plan, given.dropout) else None
    caster, uses = plan.caster(needed, not needed), bind_weights(plan, given.tensors, needed)
    run = Run(plan, given.call, given.tensors, uses, caster, needed, given.dropout)
    before = StateBefore(given.call.module) if needed and repeats_own_code(plan) else None
    x0, x1, out, saved = events.run_in_scope(plan.path, order.forward, run, x, given.branch)
    if before is not None:
        before.forget_unchanged()
    left = Forwarded(given._replace(call=given.call.for_recomputation(before)), caster, x0, random, None, None)
    if needed and plan.checkpoint != "full":
        parts = zip(uses.flatten(), plan.projections, strict=True)
        left.kept = order.drop_unneeded(plan, saved)
        left.copies = [use.get_saved(wide=part.choice.grad_input != "fp8") for use, part in parts]
    elif needed and plan.spec.order == "pre":
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()  # a recording frees nothing it has kept
        room = 0.0 if capturing else SHARE_OF_GRADIENTS * get_future_gradients(given)
        kept = pre_norm.keep_attention(run, saved)
        left.kept = kept if kept is not None and kept.size <= room else None
    x1, out = x1.view_as(x), None if out is None else out.view_as(x)
    if out is None:
        return (x1,), left
    return (x1 + out,) if given.summed else (x1, out), left


def run_backward(
    left: Forwarded,
    tensors: BlockTensors,
    needs: BlockTensors,
    grad: Tensor,
    written: Operand | None,
    wanted: WantedGradient,
    last: bool = False,
) -> tuple[Tensor, Operand, BlockTensors, list[Tensor | None]]:
    """Return the gradient of the input, the same as an operand, and those of parameters and other arguments.

    Args:
        left: What forward left.
        tensors: The block's parameters.
        needs: Which of them need gradients: True or False in place of tensors.
        grad: The gradient of the block's output.
        written: The same in the formats of the last projection, if the next block wrote it.
        wanted: How the block before wants the gradient of the input.
        last: Whether no other backward needs what forward left, so that it can be freed on the way.
    """
    plan, x0 = left.given.plan, left.x0
    order = ORDERS[plan.spec.order]
    run = left.make_run(tensors)
    uses = run.uses
    if plan.checkpoint == "full" and left.kept is not None:
        kept = order.drop_unneeded(plan, events.run_in_scope(plan.path, pre_norm.run_rest, run, x0, left.kept))
    elif plan.checkpoint == "full":
        _, _, kept, uses = left.repeated or repeat_forward(left, tensors)
        left.repeated = None
    else:
        assert left.copies is not None
        kept = order.recompute(run, x0, left.kept)
        pairs = zip(uses.flatten(), left.copies, strict=True)
        uses = BlockWeights.unflatten([use.restore_saved(copies) for use, copies in pairs])  # type: ignore[arg-type]
    rows = grad.reshape(-1, grad.shape[-1])
    run = run._replace(
        uses=uses, caster=left.caster, frees=last or plan.checkpoint == "full", input_grad_dtype=wanted.dtype
    )
    if last:
        left.kept = None
    back: tuple[Any, ...] = (run, kept, x0, rows, written, wanted.reader, needs)
    grad_input, operand, grads, others = events.run_in_scope(plan.path, order.backward, *back)
    return grad_input.view_as(x0), operand, grads, others


def repeat_forward(left: Forwarded, tensors: BlockTensors) -> Repeated:
    """Run a forward again: with the same random numbers, and without statistics."""
    run, x0 = left.make_run(tensors), left.x0
    plan = run.plan
    order = ORDERS[plan.spec.order]
    with _repeat_random_numbers(left.random, x0.device):
        _, _, out, saved = events.run_in_scope(plan.path, order.forward, run, x0, None)
    return Repeated(x0, out, order.drop_unneeded(plan, saved), run.uses)


def get_future_gradients(given: BlockInput) -> int:
    """Return the bytes of gradients that backward will allocate."""
    parameters = [p for p in given.tensors.flatten() if p is not None and p.requires_grad]
    dtype = given.plan.qkv.weight.gradient_dtype
    if dtype is None or not given.plan.holds_gradients or any(p.grad is not None for p in parameters):
        return 0
    return dtype.itemsize * sum(p.numel() for p in parameters)


@contextlib.contextmanager
def _repeat_random_numbers(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw the random numbers of a forward again, so that its recomputation drops the same values."""
    if state is None:
        yield
        return
    before = get_random_state(device)
    set_random_state(state, device)
    try:
        yield
    finally:
        set_random_state(before, device)
