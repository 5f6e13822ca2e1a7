"""Tells inductor what ``cast_rows`` computes, so that it computes the cast in the kernel that produces the tensor.

A lowering is the last step before inductor's scheduler: up to there a cast is one node of the graph, which costs little
time to trace and partition. inductor's lowerings are not a public interface. If they are not as expected, the op stays
what it is, and a compiled graph runs it in plain torch, with the same result. inductor's cache of compiled graphs does
not know what a lowering does: if this one changes, so must the name of the op.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from narrowgauge.kernels.cast_rows import cast_rows
from narrowgauge.kernels.fp8_formats import FLUSH_THRESHOLD, FP8_MAX, SATURATION_THRESHOLD


def teach_inductor() -> bool:
    """Register the lowering once inductor has been imported; return whether inductor has it.

    Importing inductor takes seconds. Code that is traced calls this, and torch.compile has imported it by then.
    """
    return "torch._inductor.lowering" in sys.modules and _register()


@functools.cache
def _register() -> bool:
    aten, prims = torch.ops.aten, torch.ops.prims
    used = (
        *(prims.convert_element_type.default, aten.mul.Tensor, aten.abs.default, aten.amax.default),
        *(aten.clamp_min.default, aten.clamp_max.default, aten.gt.Scalar, aten.le.Scalar, aten.ne.Scalar),
        *(aten.bitwise_and.Tensor, aten.sum.dim_IntList),
    )
    try:
        from torch._inductor.lowering import lowerings, register_lowering

        convert, mul, abs_, amax, at_least, at_most, gt, le, ne, both, sum_ = (lowerings[op] for op in used)
    except (ImportError, KeyError):
        return False

    def lower(x: Any, scale: Any, dtype: torch.dtype) -> Any:
        """``cast_rows_reference`` in inductor's terms."""
        x = convert(x, torch.float32)
        scaled, limit = mul(x, scale), FP8_MAX[dtype]
        size = abs_(scaled)
        x_lp = convert(at_most(at_least(scaled, -limit), limit), dtype)
        x_lp.realize()  # two ops read it, and inductor would write a copy for each
        saturated = convert(gt(size, SATURATION_THRESHOLD[dtype]), torch.int32)
        flushed = convert(both(le(size, FLUSH_THRESHOLD[dtype]), ne(x, 0)), torch.int32)
        row_counts = (sum_(count, [1], False, dtype=torch.int32) for count in (saturated, flushed))
        return x_lp, amax(abs_(x), [1], False), *row_counts

    register_lowering(cast_rows, type_promotion_kind=None)(lower)
    return True
