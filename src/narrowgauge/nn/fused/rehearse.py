"""Runs a block, experts, or the head once without launching kernels, before the first call: see ``kernels.rehearsal``.

A first step computes scales from each tensor, later ones have them: a rehearsal runs both ways. It changes nothing:
the statistics of scales and the random state are restored, and results are thrown away. Blocks that run code of the
model's own are not rehearsed. The comparison of a fused block with the original, in FP32, is rehearsed as well.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from narrowgauge import events, kernels
from narrowgauge.errors import one_line
from narrowgauge.kernels.dry_run import is_dry_run
from narrowgauge.kernels.rehearsal import rehearsing
from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.fused.casts import WantedGradient
from narrowgauge.nn.fused.passes import BlockInput, run_backward, run_forward
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors
from narrowgauge.random_state import get_random_state, set_random_state
from narrowgauge.scaling.operand import Operand
from narrowgauge.scaling.tensor import ScalingRule, TensorScales

MOST_REHEARSALS = 256
"""After so many different blocks and heads, kernels are compiled as they come."""
TRANSPARENT = "is_transparent"
"""Attribute of a dispatch mode that passes every operation on."""
_done: set[Any] = set()
"""What was rehearsed."""
_places: dict[Any, BlockSpec] = {}
"""Blocks that need not be looked at again. Their descriptions are kept, as they are recognized by address."""
_suspended = False


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Rehearse nothing inside the context, for steps whose memory is measured."""
    global _suspended
    before, _suspended = _suspended, True
    try:
        yield
    finally:
        _suspended = before


def rehearse_block(
    plan: BlockPlan, given: BlockInput, wanted: WantedGradient, dtype: torch.dtype | None = None
) -> None:
    """Compile the kernels of a block's forward and backward, if no block like it was rehearsed before.

    Args:
        plan: The block's plan for steps after the first.
        given: What its forward is given now.
        wanted: How the block before wants the gradient of the input.
        dtype: That of the gradient of the output; None for that of the stream.
    """
    x = given.x
    if not x.is_cuda or not given.needed:
        return
    formats = tuple(part.choice for part in plan.projections)
    ends = wanted.reader is None, wanted.dtype, dtype
    place = id(plan.spec), formats, plan.checkpoint, plan.activations, given.branch is None, *ends
    if place in _places or not _can_rehearse(x):
        return
    _places[place] = plan.spec
    flat = given.tensors.flatten()
    forms = tuple(None if one is None else (one.shape, one.dtype, one.requires_grad) for one in flat)
    if not _runs_other_code(given) and _is_new((repr(plan.spec), forms, *place[1:], given.summed, x.dtype)):
        trained: list[Any] = [one is not None and one.requires_grad for one in flat]
        needs = BlockTensors.unflatten(plan, trained)
        later = given._replace(plan=plan.without_frozen(given.tensors))
        _run_both_ways(plan.scales, x, lambda delayed: _run_block(later if delayed else given, needs, wanted, dtype))


def rehearse(scales: TensorScales | ScalingRule | None, x: Tensor, key: Any, run: Callable[[], Any]) -> None:
    """Compile the kernels of a function of x, if none with this key was rehearsed before."""
    if x.is_cuda and _can_rehearse(x) and _is_new((x.dtype, key)):
        _run_both_ways(scales, x, lambda delayed: run())


class _Context:
    """What autograd gives to a function, as far as a rehearsal needs it."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def rehearse_function(
    function: Any, scales: TensorScales | ScalingRule | None, x: Tensor, key: Any, *args: Any
) -> None:
    """Compile the kernels of an autograd function with one output, forward and backward, as ``rehearse`` does.

    Args:
        function: The class of the function.
        scales: The FP8 scales it uses.
        x: A tensor that it computes with.
        key: What decides which kernels it launches, besides the dtype of ``x``.
        args: The arguments of its forward.
    """

    def run() -> None:
        context = _Context()
        output = function.forward(context, *args)
        function.backward(context, torch.empty_like(output))

    rehearse(scales, x, (function, key), run)


def _run_block(given: BlockInput, needs: BlockTensors, wanted: WantedGradient, dtype: torch.dtype | None) -> None:
    outputs, left = run_forward(given)
    operand: Operand | None = None
    for _ in range(2):  # the gradient comes as it is, and as the next block's kernel has written it
        written = operand if operand is not None and any(part is not None for part in operand) else None
        grad = torch.empty_like(outputs[0], dtype=dtype)
        operand = run_backward(left, given.tensors, needs, grad, written, wanted)[1]


def _can_rehearse(x: Tensor) -> bool:
    return (
        kernels.HAVE_TRITON
        and len(_done) < MOST_REHEARSALS
        and not _suspended
        and not is_dry_run()
        and not events.is_listening()
        and _has_data(x)
        and not torch.cuda.is_current_stream_capturing()
    )


def _has_data(x: Tensor) -> bool:
    """Whether a block computes now, and is not traced. The comparison with the original block has a mode of its own."""
    modes = _get_current_dispatch_mode_stack()
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and all(getattr(mode, TRANSPARENT, False) for mode in modes)
    )


def _runs_other_code(given: BlockInput) -> bool:
    dropout, spec = given.dropout, given.plan.spec
    own = spec.attention.kind == "own" or spec.cross is not None or bool(given.call.differentiable)
    return own or dropout.depth1 is not None or dropout.depth2 is not None or given.call.has_cache()


def _is_new(key: Any) -> bool:
    is_new = key not in _done
    _done.add(key)
    return is_new


@torch.no_grad()
def _run_both_ways(scales: TensorScales | ScalingRule | None, x: Tensor, run: Callable[[bool], Any]) -> None:
    """Rehearse a first and a later step. Training continues without a rehearsal that fails."""
    random = get_random_state(x.device)
    try:
        with rehearsing():
            if not isinstance(scales, TensorScales):
                run(True)
                return
            for delayed in (False, True) if not scales.delayed and scales.mode == "delayed" else (scales.delayed,):
                with scales.unrecorded(delayed):
                    run(delayed)
    except torch.OutOfMemoryError:
        pass  # the step itself may need less, as its blocks may be recomputed
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        warnings.warn(f"kernels are compiled one after the other: a rehearsal failed ({reason})", stacklevel=2)
    finally:
        set_random_state(random, x.device)
