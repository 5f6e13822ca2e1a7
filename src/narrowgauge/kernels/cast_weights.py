"""Casts of weights to FP8. The current weight is cast at each forward, no matter what wrote it.

    current   amax   = max |w|                                 a separate pass
              scale  = largest number / amax / 2**margin
    delayed   scale  = from the previous updates               one pass casts, and raises amax
              If amax * scale is beyond the format or below an eighth of it, something other than the optimizer
              changed the weight. A second pass then casts again with a scale that fits. Programs of the second pass
              decide this on the device and almost always exit at once.

Several weights (gate and up, for example) are cast as one, stacked along the outputs, with one scale. Bytes moved per
FP32 weight in both layouts: current 10, delayed 6. Stacked weights take one more, as the second layout is made from
the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.kernels import (
    HAVE_TRITON,
    can_bypass_op,
    compute_scale,
    jit_unspecialized,
    register,
    use_triton,
)
from narrowgauge.kernels.cast import (
    allocate_words,
    launch_cast,
    max_abs_reference,
    raise_amax_by,
    transpose,
    transpose_reference,
)
from narrowgauge.kernels.fp8_formats import (
    FP8_MAX,
    SATURATION_THRESHOLD,
    get_format_name,
    largest_of,
    saturation_threshold_of,
)
from narrowgauge.kernels.fp8_tile import (
    init_tile_stats,
    load_four,
    quantize_reference,
    store_tiles,
    tiles_evenly,
    to_fp32,
)
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON:
    import triton.language as tl

FIT_TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
MAX_PROGRAMS = 1056
"""Most programs of the second pass: eight per multiprocessor of an H200, several tiles each, so exiting is cheap."""
SMALLEST_SHARE = 1 / 8
"""Share of the format's largest number. Below it a cast wastes three binades and is repeated."""


def cast_weight(
    weights: Sequence[Tensor], dtype: torch.dtype, transposed: bool = True, margin: int = 0
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Cast weights [O, I] with their amax; return [sum of O, I], [I, sum of O], the inverse scale and the amax."""
    lp, lp_t, inv_scale, seen = (_cast_current if can_bypass_op(*weights) else _cast_current_op)(
        list(weights), dtype, transposed, margin
    )
    return lp, lp_t if transposed else None, inv_scale, seen


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
    """Cast weights with a known scale, or with a scale that fits if the known one does not.

    ``amax`` is raised to the largest magnitude of the weights. ``counts`` are raised only if the known scale was used.
    ``pending`` is scratch memory of the same shape, all zeros before and after.
    """
    lp, lp_t, inv_scale = (cast_delayed if can_bypass_op(*weights) else _cast_delayed_op)(
        list(weights), scale, amax, counts, pending, dtype, transposed, margin
    )
    return lp, lp_t if transposed else None, inv_scale


def recast_weight(
    weights: Sequence[Tensor],
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    transposed: bool = True,
    margin: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Repeat a ``cast_weight_delayed`` of the same weights, without changing ``amax`` or counts."""
    lp, lp_t, inv_scale = (recast if can_bypass_op(*weights) else _recast_op)(
        list(weights), scale, amax, dtype, transposed, margin
    )
    return lp, lp_t if transposed else None, inv_scale


def choose_weight_scale(scale: Tensor, amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Return the scale to cast a weight of this amax with: ``scale`` if it fits, else one computed from amax."""
    fitting = compute_scale(amax, FP8_MAX[dtype], margin)
    return torch.where(_is_misfit(scale, amax, dtype, margin), fitting, scale)


def _is_misfit(scale: Tensor, amax: Tensor, dtype: torch.dtype, margin: int) -> Tensor:
    top, smallest = amax * scale, SMALLEST_SHARE * FP8_MAX[dtype] / 2.0**margin
    return torch.isfinite(amax) & (amax > 0) & ((top > SATURATION_THRESHOLD[dtype]) | (top < smallest))


def cast_weight_reference(
    weights: list[Tensor], dtype: torch.dtype, transposed: bool = True, margin: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seen = torch.stack([max_abs_reference(weight) for weight in weights]).amax()
    scale = compute_scale(seen, FP8_MAX[dtype], margin)
    lp = quantize_reference(torch.cat(weights), scale, dtype)
    return lp, _transpose_or_empty(lp, transposed), scale.reciprocal(), seen


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
        counts += torch.where(_is_misfit(scale, amax, dtype, margin), 0, counted)
    used = choose_weight_scale(scale, amax, dtype, margin)
    lp = quantize_reference(weight, used, dtype)
    return lp, _transpose_or_empty(lp, transposed), used.reciprocal()


def _transpose_or_empty(lp: Tensor, transposed: bool) -> Tensor:
    return transpose_reference(lp) if transposed else lp.new_empty(0)


@jit_unspecialized("length", "n16", "across", "count")
def _fit_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, out_t_ptr, scale_ptr, amax_ptr, inv_scale_ptr, counts_ptr, pending_ptr,
    length, width, stride, out_stride, n16, across, count, shrink, smallest,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Cast again if the scale does not fit the amax. With ``scale_ptr`` None always cast, with the scale that fits.

    ``shrink`` is 2**-margin; ``smallest`` is the minimum of the scaled amax.
    """
    amax = tl.load(amax_ptr)
    good = (amax > 0.0) & (amax.to(tl.int32, bitcast=True) < 0x7F800000)
    scale = tl.div_rn(tl.full((), largest_of(FORMAT), tl.float32), tl.where(good, amax, 1.0)) * shrink
    scale = tl.where(good, tl.minimum(tl.maximum(scale, 2.0**-100), 2.0**100), 1.0)
    needed = True
    if scale_ptr is not None:
        given = tl.load(scale_ptr)
        top = amax * given
        needed = good & ((top > saturation_threshold_of(FORMAT)) | (top < smallest))
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
            highest, lowest, nonzero = init_tile_stats(BLOCK_N, BLOCK_D)
            store_tiles(
                to_fp32(x0), to_fp32(x1), to_fp32(x2), to_fp32(x3), highest, lowest, nonzero, out_ptr, out_t_ptr,
                scale, None,
                None, n0, d0, length, width, out_stride, n16, FORMAT, WHOLE, BLOCK_N, BLOCK_D,
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
    programs = count if scale is None else min(count, MAX_PROGRAMS)
    largest = FP8_MAX[out.dtype]
    launch_kernel(
        _fit_kernel, (programs,),
        x, out, out_t, scale, amax, inv_scale, counts, pending,
        length, width, x.stride(0), out.stride(0), length // 16, across, count,
        2.0**-margin, SMALLEST_SHARE * largest / 2.0**margin, FORMAT=get_format_name(out.dtype),
        WHOLE=tiles_evenly(length, width, FIT_TILE), **FIT_TILE,
    )  # fmt: skip


def _allocate_layouts(
    weights: list[Tensor], dtype: torch.dtype, transposed: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Allocate the stacked copy, its second layout if the kernel of a single weight can write it, and its parts."""
    sizes = [len(weight) for weight in weights]
    out = torch.empty((sum(sizes), weights[0].shape[1]), dtype=dtype, device=weights[0].device)
    words = allocate_words(out) if transposed and len(weights) == 1 else None
    return out, words, list(out.split(sizes))


def _finish_transposed(out: Tensor, words: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return out.new_empty(0)
    return transpose(out) if words is None else words.view(out.dtype)


def _cast_current(
    weights: list[Tensor], dtype: torch.dtype, transposed: bool, margin: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not use_triton(weights[0]) or not all(weight.numel() for weight in weights):
        return cast_weight_reference(weights, dtype, transposed, margin)
    out, words, parts = _allocate_layouts(weights, dtype, transposed)
    seen, inv_scale = torch.zeros((), device=out.device), torch.empty((), device=out.device)
    for weight in weights:
        raise_amax_by(weight, seen)
    for weight, part in zip(weights, parts, strict=True):
        _launch_fit(weight, part, words, None, seen, inv_scale, margin)
    return out, _finish_transposed(out, words, transposed), inv_scale, seen


def cast_delayed(
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
    out, words, parts = _allocate_layouts(weights, dtype, transposed)
    inv_scale = torch.empty((), device=out.device)
    for weight, part in zip(weights, parts, strict=True):
        launch_cast(weight, part, words, scale, amax, None if counts is None else pending)
    for weight, part in zip(weights, parts, strict=True):
        _launch_fit(weight, part, words, scale, amax, inv_scale, margin, counts, pending)
    return out, _finish_transposed(out, words, transposed), inv_scale


def recast(
    weights: list[Tensor], scale: Tensor, amax: Tensor, dtype: torch.dtype, transposed: bool, margin: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not use_triton(weights[0]) or not all(weight.numel() for weight in weights):
        used = choose_weight_scale(scale, amax, dtype, margin)
        lp = quantize_reference(torch.cat(weights), used, dtype)
        return lp, _transpose_or_empty(lp, transposed), used.reciprocal()
    out, words, parts = _allocate_layouts(weights, dtype, transposed)
    inv_scale = torch.empty((), device=out.device)
    for weight, part in zip(weights, parts, strict=True):
        launch_cast(weight, part, words, scale)
        _launch_fit(weight, part, words, scale, amax, inv_scale, margin)
    return out, _finish_transposed(out, words, transposed), inv_scale


def make_fake(weights: list[Tensor], dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    first, outputs = weights[0], sum(weight.shape[0] for weight in weights)
    second = (first.shape[1], outputs) if transposed else (0,)
    return (
        first.new_empty((outputs, first.shape[1]), dtype=dtype),
        first.new_empty(second, dtype=dtype),
        first.new_empty((), dtype=torch.float32),
    )


_cast_current_op = register(
    "cast_weight",
    _cast_current,
    lambda weights, dtype, transposed, margin: (
        *make_fake(weights, dtype, transposed),
        weights[0].new_empty((), dtype=torch.float32),
    ),
)
_cast_delayed_op = register(
    "cast_weight_delayed",
    cast_delayed,
    lambda weights, scale, amax, counts, pending, dtype, transposed, margin: make_fake(weights, dtype, transposed),
    ("amax", "counts", "pending"),
)
_recast_op = register(
    "cast_weight_again",
    recast,
    lambda weights, scale, amax, dtype, transposed, margin: make_fake(weights, dtype, transposed),
)
