"""Casts of weights to FP8, from the weight as it is now: at each forward, whoever has written it in the meantime.

    current   amax   = max |w|                                 a pass of its own
              scale  = largest number / amax / 2**margin
    delayed   scale  = that of the updates before              one pass casts, and raises amax
              where amax * scale is beyond the format or below an eighth of it, the weight was changed by other hands
              than an optimizer's: a second pass casts again by the scale that fits. Programs of the second pass
              decide on the device, and nearly always end there and then.

Several weights (a gate and its twin) are cast as one, stacked along the outputs, by one scale. Bytes moved per FP32
weight in both layouts: current 10, delayed 6; stacked ones a byte more, as the second layout is made of the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.kernels import FP8_MAX, HAVE_TRITON, direct, fitting_scale, jit_for_any, register, use_triton
from narrowgauge.kernels.cast import empty_words, launch, max_abs_of, max_abs_reference, transpose, transpose_reference
from narrowgauge.kernels.fp8_tile import SATURATED, emit, load_four, quantize_reference, unseen, whole, widen

if HAVE_TRITON:
    import triton.language as tl

FIT_TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
MOST_PROGRAMS = 1056
"""Of the second pass: eight for each of an H200's multiprocessors, each with several tiles, so that ending is cheap."""
SMALL = 1 / 8
"""Of the format's largest number: a largest weight below this wastes three bits of the exponent, and is cast again."""


def cast_weight(
    weights: Sequence[Tensor], dtype: torch.dtype, transposed: bool = True, margin: int = 0, amax: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weights [O, I] in FP8 by their current amax: as [sum of O, I], as [I, sum of O], and the inverse of the scale.

    ``amax`` is raised to what was seen.
    """
    lp, lp_t, inv_scale, seen = (_current if direct(*weights) else _current_op)(
        list(weights), dtype, transposed, margin
    )
    if amax is not None:  # not by the op: inductor (torch 2.11) fails on one that would change a tensor that is None
        amax.copy_(torch.maximum(amax, seen))
    return lp, lp_t if transposed else None, inv_scale


def cast_weight_delayed(
    weights: Sequence[Tensor],
    scale: Tensor,
    amax: Tensor,
    counts: Tensor | None,
    pending: Tensor | None,
    dtype: torch.dtype,
    transposed: bool = True,
    margin: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The same by a scale that is known beforehand, or by one that fits where that does not.

    ``amax`` is raised, and holds what this update has seen of the weights. ``counts`` are raised where the scale known
    beforehand was used; ``pending`` is memory of the same shape for it, all zeros before and after.
    """
    lp, lp_t, inv_scale = (_delayed if direct(*weights) else _delayed_op)(
        list(weights), scale, amax, counts, pending, dtype, transposed, margin
    )
    return lp, lp_t if transposed else None, inv_scale


def cast_weight_again(
    weights: Sequence[Tensor],
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    transposed: bool = True,
    margin: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """What ``cast_weight_delayed`` has given for these weights, which have raised ``amax`` then; nothing is raised."""
    lp, lp_t, inv_scale = (_again if direct(*weights) else _again_op)(
        list(weights), scale, amax, dtype, transposed, margin
    )
    return lp, lp_t if transposed else None, inv_scale


def scale_in_use(scale: Tensor, amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The scale that a weight of this amax is cast by: the one given where it fits."""
    fitting = fitting_scale(amax, FP8_MAX[dtype], margin)
    return torch.where(_misfits(scale, amax, dtype, margin), fitting, scale)


def _misfits(scale: Tensor, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
    top, smallest = amax * scale, SMALL * FP8_MAX[dtype] / 2.0**margin
    return torch.isfinite(amax) & (amax > 0) & ((top > SATURATED[dtype]) | (top < smallest))


def cast_weight_reference(
    weights: list[Tensor], dtype: torch.dtype, transposed: bool = True, margin: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seen = torch.stack([max_abs_reference(weight) for weight in weights]).amax()
    scale = fitting_scale(seen, FP8_MAX[dtype], margin)
    lp = quantize_reference(torch.cat(weights), scale, dtype)
    return lp, _turned(lp, transposed), scale.reciprocal(), seen


def cast_weight_delayed_reference(
    weights: list[Tensor],
    scale: Tensor,
    amax: Tensor,
    counts: Tensor | None,
    pending: Tensor | None,
    dtype: torch.dtype,
    transposed: bool = True,
    margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.cat(weights)
    counted = None if counts is None else torch.zeros_like(counts)
    quantize_reference(weight, scale, dtype, amax, counted)
    if counts is not None and counted is not None:
        counts += torch.where(_misfits(scale, amax, dtype, margin), 0, counted)
    used = scale_in_use(scale, amax, dtype, margin)
    lp = quantize_reference(weight, used, dtype)
    return lp, _turned(lp, transposed), used.reciprocal()


def _turned(lp: Tensor, transposed: bool) -> Tensor:
    return transpose_reference(lp) if transposed else lp.new_empty(0)


@jit_for_any("length", "n16", "across", "count")
def _fit_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, out_t_ptr, scale_ptr, amax_ptr, inv_scale_ptr, counts_ptr, pending_ptr,
    length, width, stride, out_stride, n16, across, count, shrink, smallest,
    LIMIT: tl.constexpr, MOST: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Cast again where the scale does not fit the amax; ``scale_ptr`` None: cast in any case, by the one that fits.

    ``shrink`` is 2**-margin, ``smallest`` the size that the scaled amax must have.
    """
    amax = tl.load(amax_ptr)
    good = (amax > 0.0) & (amax.to(tl.int32, bitcast=True) < 0x7F800000)
    scale = tl.div_rn(tl.full((), LIMIT, tl.float32), tl.where(good, amax, 1.0)) * shrink
    scale = tl.where(good, tl.minimum(tl.maximum(scale, 2.0**-100), 2.0**100), 1.0)
    needed = True
    if scale_ptr is not None:
        given = tl.load(scale_ptr)
        top = amax * given
        needed = good & ((top > MOST) | (top < smallest))
        scale = tl.where(needed, scale, given)
    if tl.program_id(0) == 0:
        tl.store(inv_scale_ptr, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        if counts_ptr is not None:
            both = tl.arange(0, 2)
            counted = tl.load(pending_ptr + both)
            tl.store(pending_ptr + both, tl.zeros_like(counted))
            tl.store(counts_ptr + both, tl.load(counts_ptr + both) + tl.where(needed, 0, counted))
    if needed:
        for index in range(tl.program_id(0), count, tl.num_programs(0)):
            n0, d0 = (index // across) * BLOCK_N, (index % across) * BLOCK_D
            x0, x1, x2, x3 = load_four(x_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
            highest, lowest, nonzero = unseen(BLOCK_N, BLOCK_D)
            emit(
                widen(x0), widen(x1), widen(x2), widen(x3), highest, lowest, nonzero, out_ptr, out_t_ptr, scale, None,
                None, n0, d0, length, width, out_stride, n16, LIMIT, WHOLE, BLOCK_N, BLOCK_D,
            )  # fmt: skip


def _launch_fit(
    x: Tensor,
    out: Tensor,
    out_t: Tensor | None,
    scale: Tensor | None,
    amax: Tensor,
    inv_scale: Tensor,
    margin: int,
    counts: Tensor | None = None,
    pending: Tensor | None = None,
) -> None:
    length, width = out.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    across = -(-width // FIT_TILE["BLOCK_D"])
    count = across * -(-length // FIT_TILE["BLOCK_N"])
    programs = count if scale is None else min(count, MOST_PROGRAMS)
    largest = FP8_MAX[out.dtype]
    _fit_kernel[(programs,)](
        x, out, out_t, scale, amax, inv_scale, counts, pending,
        length, width, x.stride(0), out.stride(0), length // 16, across, count,
        2.0**-margin, SMALL * largest / 2.0**margin, LIMIT=largest, MOST=SATURATED[out.dtype],
        WHOLE=whole(length, width, FIT_TILE), **FIT_TILE,
    )  # fmt: skip


def _layouts(weights: list[Tensor], dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Memory for the stacked copy, for its second layout where one weight's kernel can write that, and its parts."""
    sizes = [len(weight) for weight in weights]
    out = torch.empty((sum(sizes), weights[0].shape[1]), dtype=dtype, device=weights[0].device)
    words = empty_words(out) if transposed and len(weights) == 1 else None
    return out, words, list(out.split(sizes))


def _finish(out: Tensor, words: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return out.new_empty(0)
    return transpose(out) if words is None else words.view(out.dtype)


def _current(
    weights: list[Tensor], dtype: torch.dtype, transposed: bool, margin: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not use_triton(weights[0]) or not all(weight.numel() for weight in weights):
        return cast_weight_reference(weights, dtype, transposed, margin)
    out, words, parts = _layouts(weights, dtype, transposed)
    seen, inv_scale = torch.zeros((), device=out.device), torch.empty((), device=out.device)
    for weight in weights:
        max_abs_of(weight, seen)
    for weight, part in zip(weights, parts, strict=True):
        _launch_fit(weight, part, words, None, seen, inv_scale, margin)
    return out, _finish(out, words, transposed), inv_scale, seen


def _delayed(
    weights: list[Tensor],
    scale: Tensor,
    amax: Tensor,
    counts: Tensor | None,
    pending: Tensor | None,
    dtype: torch.dtype,
    transposed: bool,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if not use_triton(weights[0]) or not all(weight.numel() for weight in weights):
        return cast_weight_delayed_reference(weights, scale, amax, counts, pending, dtype, transposed, margin)
    out, words, parts = _layouts(weights, dtype, transposed)
    inv_scale = torch.empty((), device=out.device)
    for weight, part in zip(weights, parts, strict=True):
        launch(weight, part, words, scale, amax, None if counts is None else pending)
    for weight, part in zip(weights, parts, strict=True):
        _launch_fit(weight, part, words, scale, amax, inv_scale, margin, counts, pending)
    return out, _finish(out, words, transposed), inv_scale


def _again(
    weights: list[Tensor], scale: Tensor, amax: Tensor, dtype: torch.dtype, transposed: bool, margin: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not use_triton(weights[0]) or not all(weight.numel() for weight in weights):
        used = scale_in_use(scale, amax, dtype, margin)
        lp = quantize_reference(torch.cat(weights), used, dtype)
        return lp, _turned(lp, transposed), used.reciprocal()
    out, words, parts = _layouts(weights, dtype, transposed)
    inv_scale = torch.empty((), device=out.device)
    for weight, part in zip(weights, parts, strict=True):
        launch(weight, part, words, scale)
        _launch_fit(weight, part, words, scale, amax, inv_scale, margin)
    return out, _finish(out, words, transposed), inv_scale


def _fake(weights: list[Tensor], dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    first, outputs = weights[0], sum(weight.shape[0] for weight in weights)
    second = (first.shape[1], outputs) if transposed else (0,)
    return (
        first.new_empty((outputs, first.shape[1]), dtype=dtype),
        first.new_empty(second, dtype=dtype),
        first.new_empty((), dtype=torch.float32),
    )


_current_op = register(
    "cast_weight",
    _current,
    lambda weights, dtype, transposed, margin: (
        *_fake(weights, dtype, transposed),
        weights[0].new_empty((), dtype=torch.float32),
    ),
)
_delayed_op = register(
    "cast_weight_delayed",
    _delayed,
    lambda weights, scale, amax, counts, pending, dtype, transposed, margin: _fake(weights, dtype, transposed),
    ("amax", "counts", "pending"),
)
_again_op = register(
    "cast_weight_again",
    _again,
    lambda weights, scale, amax, dtype, transposed, margin: _fake(weights, dtype, transposed),
)
