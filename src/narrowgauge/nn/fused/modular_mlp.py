"""A block whose MLP runs as a module, such as a mixture of experts: the fused first half, and the module after it.

    checkpoint     kept for backward
    none           what the half keeps, and what the module's own code keeps
    selective      the same without the output of the first norm
    full           the block's input

With ``full`` the module runs inside ``torch.utils.checkpoint``, which discards what autograd saves and runs the module
again as soon as backward asks for one of these tensors. Its input is not kept either: the half runs again first, and
its backward, which follows that of the module, finds what this forward made. What is recomputed records no statistics
of FP8 tensors. It draws the same random numbers, and leaves the attributes of modules as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from narrowgauge import events
from narrowgauge.nn.fused import blocks
from narrowgauge.nn.fused.attention import BlockCall
from narrowgauge.nn.fused.graphs import BlockGraphs
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, Dropout
from narrowgauge.nn.recordable import repeatable
from narrowgauge.nn.side_effects import StateBefore

Context = contextlib.AbstractContextManager[Any]
MakeContext = Callable[[], Context]
"""Makes the context of a recomputation."""
NO_GRAPHS = BlockGraphs(False)


def run_with_mlp(
    plan: BlockPlan,
    mlp: nn.Module,
    x: Tensor,
    tensors: BlockTensors,
    call: BlockCall,
    dropout: Dropout,
    recomputation: MakeContext | None = None,
) -> Tensor:
    """Run a block on the residual stream x [B, T, D].

    Args:
        plan: The block's plan.
        mlp: The module after the second norm.
        x: The block's input.
        tensors: The parameters of the half.
        call: The call of the block.
        dropout: Its probabilities.
        recomputation: Makes the context of a recomputation.
    """
    stream, hidden = blocks.run_half(plan, x, tensors, call, dropout, NO_GRAPHS)
    if plan.checkpoint == "full" and torch.is_grad_enabled():
        return add_branch(plan, stream, _run_and_discard(plan, mlp, hidden, recomputation))
    output = add_branch(plan, stream, call_mlp(mlp, hidden))
    if events.is_listening() and output.requires_grad:
        output.register_hook(partial(_announce, plan.path))
    return output


def add_branch(plan: BlockPlan, stream: Tensor, branch: Tensor) -> Tensor:
    factor = plan.spec.branch2.factor
    return stream + (branch if factor == 1.0 else branch * factor)


def call_mlp(mlp: nn.Module, hidden: Tensor) -> Tensor:
    """Return what the module adds to the stream; the scores of a router that it also returns are for hooks."""
    made = mlp(hidden)
    first: Tensor = made[0] if isinstance(made, tuple) else made
    return first.reshape(hidden.shape)  # some return rows of tokens


def _announce(path: str, grad: Tensor) -> None:
    """Tell listeners that the block's backward begins, as a recomputation does: that of the module tells nothing."""
    events.run_in_scope(path, lambda: None)


def _run_and_discard(plan: BlockPlan, mlp: nn.Module, hidden: Tensor, recomputation: MakeContext | None) -> Tensor:
    """Run the module, and keep nothing that it saves for backward."""
    source = _Source(hidden)

    def compute(anchor: Tensor) -> Any:
        return events.run_in_scope(plan.path, lambda: call_mlp(mlp, source.get()))

    state = StateBefore(mlp)
    with repeatable(mlp, hidden.device) as repetition:
        contexts = partial(_make_contexts, plan, state, source, [*repetition.contexts, recomputation])
        # torch restores the random numbers of its arguments' devices.
        made: Tensor = checkpoint(
            compute, hidden.new_empty(0), use_reentrant=False, context_fn=contexts, **repetition.options
        )
    state.forget_unchanged()
    source.release()
    return made


class _Source:
    """What the module reads: in forward as it is, and made again by the half's node in a recomputation."""

    def __init__(self, hidden: Tensor) -> None:
        self._node, self._hidden, self.is_repeated = hidden.grad_fn, hidden, False

    def get(self) -> Tensor:
        if not self.is_repeated or self._node is None:
            return self._hidden
        # The checkpoint's hooks must not see what attention saves: it has a backward of its own.
        with saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
            made: Tensor = _Repeated.apply(torch.empty(0, requires_grad=True), self._node)  # type: ignore[no-untyped-call]
        return made

    def release(self) -> None:
        """Forward is done: keep the module's input only if nothing can make it again, as the half needs no gradient."""
        if self._node is not None:
            self._hidden = self._hidden.new_empty(0)


class _Repeated(torch.autograd.Function):
    """Makes a half's output a tensor with a history, which the module may change in place as it may the first one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, node: Any) -> Tensor:
        return blocks.repeat_half(node)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("autograd differentiates the first forward")


def _make_contexts(
    plan: BlockPlan, state: StateBefore, source: _Source, makers: list[MakeContext | None]
) -> tuple[Context, Context]:
    return contextlib.nullcontext(), _Repetition(lambda: _repeat(plan, state, source, makers))


class _Repetition(contextlib.AbstractContextManager[None]):
    """The context of a recomputation, entered anew each time (twice with ``retain_graph``)."""

    def __init__(self, make: MakeContext) -> None:
        self._make = make
        self._open: list[Context] = []

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


@contextlib.contextmanager
def _repeat(plan: BlockPlan, state: StateBefore, source: _Source, makers: list[MakeContext | None]) -> Iterator[None]:
    source.is_repeated = True
    try:
        with state.again(), repeating(plan, *makers):
            yield
    finally:
        source.is_repeated = False


@contextlib.contextmanager
def repeating(plan: BlockPlan, *makers: MakeContext | None) -> Iterator[None]:
    """Context manager for a module that runs again: it records no statistics."""
    scales = plan.scales
    with contextlib.ExitStack() as stack:
        if scales is not None:
            stack.enter_context(scales.unrecorded(scales.delayed))
        for make in makers:
            if make is not None:
                stack.enter_context(make())
        yield
