"""Casts to FP8 in one pass over the high-precision tensor: saturating, in both layouts, with amax and counts.

    y        = x * scale                                      in FP32
    x_lp     = round(clamp(y, -max, max))                     to nearest even; NaN stays NaN
    x_lp_t   = x_lp transposed                                Hopper's FP8 GEMMs need K contiguous in both operands
    amax     = max(amax, |x|)                                 of x before scaling
    counts  += [#(|y| > max), #(x != 0 and x_lp == 0)]        saturated, flushed to zero

Bytes moved per element of a BF16 x: ``cast`` 3, ``cast_transpose`` and its packed form 4, ``pack`` 4, ``transpose`` 2,
``max_abs`` 2. ``fp8_tile`` explains how the transposed copy is written. Weights are cast in
``cast_weights``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import (
    HAVE_TRITON,
    OpWithOptionalStats,
    can_bypass_op,
    jit,
    jit_unspecialized,
    register,
    use_triton,
)
from narrowgauge.kernels.fp8_formats import FP8_MAX, get_format_name
from narrowgauge.kernels.fp8_tile import (
    abs_bits,
    add_misfit_counts,
    count_misfits,
    finish_tile_stats,
    init_tile_stats,
    load_four,
    load_rows,
    pack_bytes,
    quantize_reference,
    record_amax,
    store_tiles,
    store_words,
    tile_grid,
    tile_origin,
    tiles_evenly,
    to_fp32,
)
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON:
    import triton.language as tl

# The fastest that bench/tune_kernels.py found on an H200.
TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
TRANSPOSE_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 128, "num_warps": 4}
MAX_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 128, "num_warps": 4}


def cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Cast ``x`` [N, D] to FP8."""
    return (_cast if can_bypass_op(x) else _cast_op.select(amax, counts))(x, scale, dtype, amax, counts)


def cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cast ``x`` [N, D] to FP8, as [N, D] and as [D, N]."""
    return (_cast_transpose if can_bypass_op(x) else _cast_transpose_op.select(amax, counts))(
        x, scale, dtype, amax, counts
    )


def cast_transpose_packed(
    parts: Sequence[Tensor],
    scale: Tensor,
    dtype: torch.dtype,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cast tensors [B, H, T, hd] of any strides to FP8, concatenated as [B*T, sum of H*hd], and transposed.

    Three parts are attention's gradients of q, k and v, in the layout of a packed qkv projection's output. One part is
    attention's output. The parts may differ in H, as with grouped queries.
    """
    return (_cast_transpose_packed if can_bypass_op(*parts) else _cast_transpose_packed_op.select(amax, counts))(
        list(parts), scale, dtype, amax, counts
    )


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors [B, H, T, hd] in BF16, as [B*T, sum of H*hd], like ``cast_transpose_packed``."""
    return (_pack if can_bypass_op(*parts) else _pack_op)(list(parts))


def transpose(x_lp: Tensor) -> Tensor:
    """Return FP8 ``x_lp`` [N, D] as a contiguous [D, N]."""
    return (_transpose if can_bypass_op(x_lp) else _transpose_op)(x_lp)


def max_abs(x: Tensor) -> Tensor:
    """Return the largest magnitude in ``x`` as an FP32 scalar on its device; NaN if ``x`` contains one."""
    return (_max_abs if can_bypass_op(x) else _max_abs_op)(x)


def cast_transpose_reference(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x_lp = quantize_reference(x, scale, dtype, amax, counts)
    return x_lp, transpose_reference(x_lp)


def cast_transpose_packed_reference(
    parts: list[Tensor], scale: Tensor, dtype: torch.dtype, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return cast_transpose_reference(pack_reference(parts), scale, dtype, amax, counts)


def pack_reference(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in parts], dim=1)


def transpose_reference(x_lp: Tensor) -> Tensor:
    # A custom op must not return a view of its argument, which contiguous() does for a single row.
    return x_lp.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(x_lp.dtype)


def max_abs_reference(x: Tensor) -> Tensor:
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


@jit
def _load(  # type: ignore[no-untyped-def]
    ptr, n, d0, length, width, batch_stride, head_stride, stride, time,
    HEAD: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load rows from [N, D], or from [B, H, T, HEAD] with row b * T + t and column h * HEAD + e."""
    if HEAD is None:
        x = load_rows(ptr, n, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    else:
        rows = 4 * tl.arange(0, BLOCK_N // 4)[:, None]
        columns = (d0 + tl.arange(0, BLOCK_D))[None, :]
        if WHOLE and HEAD % BLOCK_D == 0:  # all columns of a tile are in one head
            head = d0 // HEAD
            # Not d0 % HEAD: the compiler cannot tell that it allows 16-byte loads.
            along = head.to(tl.int64) * head_stride + (d0 - head * HEAD) + tl.arange(0, BLOCK_D)[None, :]
        else:
            along = (columns // HEAD).to(tl.int64) * head_stride + columns % HEAD
        if WHOLE:  # and all rows in one batch
            source = ptr + ((n // time).to(tl.int64) * batch_stride + (n % time).to(tl.int64) * stride) + rows * stride
            x = tl.load(source + along)
        else:
            source = ptr + ((n + rows) // time).to(tl.int64) * batch_stride + ((n + rows) % time).to(tl.int64) * stride
            x = tl.load(source + along, mask=(rows < length - n) & (columns < width), other=0.0)
    return x


@jit_unspecialized("length", "time", "n16")
def _cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, out_t_ptr, scale_ptr, amax_ptr, counts_ptr, length, width,
    batch_stride, head_stride, stride, time, out_stride, n16,
    HEAD: tl.constexpr, FORMAT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    x0 = _load(x_ptr, n0, d0, length, width, batch_stride, head_stride, stride, time, HEAD, WHOLE, BLOCK_N, BLOCK_D)
    x1 = _load(x_ptr, n0 + 1, d0, length, width, batch_stride, head_stride, stride, time, HEAD, WHOLE, BLOCK_N, BLOCK_D)
    x2 = _load(x_ptr, n0 + 2, d0, length, width, batch_stride, head_stride, stride, time, HEAD, WHOLE, BLOCK_N, BLOCK_D)
    x3 = _load(x_ptr, n0 + 3, d0, length, width, batch_stride, head_stride, stride, time, HEAD, WHOLE, BLOCK_N, BLOCK_D)
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    highest, lowest, nonzero = init_tile_stats(BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = store_tiles(
        to_fp32(x0), to_fp32(x1), to_fp32(x2), to_fp32(x3), highest, lowest, nonzero, out_ptr, out_t_ptr, scale,
        amax_ptr,
        counts_ptr, n0, d0, length, width, out_stride, n16, FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    recount = finish_tile_stats(highest, lowest, nonzero, BLOCK_N * BLOCK_D, scale, amax_ptr, counts_ptr, FORMAT)
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if recount:
            counted = 0
            for i in range(4):
                x = _load(
                    x_ptr, n0 + i, d0, length, width, batch_stride, head_stride, stride, time,
                    HEAD, WHOLE, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                counted += count_misfits(to_fp32(x) * scale, FORMAT)
            add_misfit_counts(counts_ptr, counted)


@jit_unspecialized("length", "n16")
def _transpose_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_t_ptr, length, width, n16,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    x0, x1, x2, x3 = load_four(x_ptr, n0, d0, length, width, width, WHOLE, BLOCK_N, BLOCK_D)
    store_words(pack_bytes(x0, x1, x2, x3), out_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)


@jit_unspecialized("length")
def _max_abs_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amax_ptr, length, width, stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    rows = (n0 + tl.arange(0, BLOCK_N))[:, None]
    columns = (d0 + tl.arange(0, BLOCK_D))[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64) * stride + columns, mask=(rows < length) & (columns < width), other=0.0)
    record_amax(amax_ptr, abs_bits(x.to(tl.float32)))


def allocate_words(x_lp: Tensor) -> Tensor | None:
    """Allocate the transposed copy of ``x_lp`` [N, D] as words; None if N is not a multiple of 16 (bytes a store)."""
    if x_lp.shape[0] % 16 or not x_lp.numel():
        return None
    return x_lp.new_empty((x_lp.shape[1], x_lp.shape[0])).view(torch.int32)


def finish_transposed(x_lp: Tensor, words: Tensor | None) -> Tensor:
    """Return what a kernel wrote into ``words``; without words, transpose with torch."""
    return transpose_reference(x_lp) if words is None else words.view(x_lp.dtype)


def launch_cast(
    x: Tensor,
    out: Tensor,
    out_t: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    length, width = out.shape
    if not length or not width:
        return
    if x.stride(-1) != 1:  # an expanded gradient, for example
        x = x.contiguous()
    heads = x.dim() == 4
    time = x.shape[2] if heads else 1
    fits = tiles_evenly(length, width, TILE) and (not heads or time % TILE["BLOCK_N"] == 0)
    launch_kernel(
        _cast_kernel, tile_grid(length, width, TILE),
        x, out, out_t, scale, amax, counts, length, width,
        x.stride(0), x.stride(1) if heads else 0, x.stride(2 if heads else 0), time,
        out.stride(0), length // 16, HEAD=x.shape[3] if heads else None,
        FORMAT=get_format_name(out.dtype), WHOLE=fits, **TILE,
    )  # fmt: skip


def _check(x: Tensor, dims: int, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
    if x.dim() != dims or dtype not in FP8_MAX:
        raise UsageError(
            f"cast of a tensor of shape {tuple(x.shape)} to {dtype}: expected {dims} dimensions "
            "and float8_e4m3fn or float8_e5m2; flatten the leading dimensions first"
        )


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None) -> Tensor:
    _check(x, 2, dtype)
    if not use_triton(x):
        return quantize_reference(x, scale, dtype, amax, counts)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    launch_cast(x, out, None, scale, amax, counts)
    return out


def _cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check(x, 2, dtype)
    if not use_triton(x):
        return cast_transpose_reference(x, scale, dtype, amax, counts)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    words = allocate_words(out)
    launch_cast(x, out, words, scale, amax, counts)
    return out, finish_transposed(out, words)


def _cast_transpose_packed(
    parts: list[Tensor], scale: Tensor, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    for part in parts:
        _check(part, 4, dtype)
    if not use_triton(parts[0]):
        return cast_transpose_packed_reference(parts, scale, dtype, amax, counts)
    batch, _, time, _ = parts[0].shape
    widths = [part.shape[1] * part.shape[3] for part in parts]
    out = torch.empty((batch * time, sum(widths)), dtype=dtype, device=parts[0].device)
    words = allocate_words(out)
    word_rows = [None] * len(parts) if words is None else words.split(widths)
    for part, columns, rows in zip(parts, out.split(widths, 1), word_rows, strict=True):
        launch_cast(part, columns, rows, scale, amax, counts)
    return out, finish_transposed(out, words)


def _pack(parts: list[Tensor]) -> Tensor:
    for part in parts:
        _check(part, 4)
    if not use_triton(parts[0]):
        return pack_reference(parts).to(torch.bfloat16)
    batch, _, time, _ = parts[0].shape
    widths = [part.shape[1] * part.shape[3] for part in parts]
    out = torch.empty((batch * time, sum(widths)), dtype=torch.bfloat16, device=parts[0].device)
    for part, columns in zip(parts, out.split(widths, 1), strict=True):
        launch_cast(part, columns, None, None)
    return out


def _transpose(x_lp: Tensor) -> Tensor:
    _check(x_lp, 2, x_lp.dtype)
    length, width = x_lp.shape
    words = allocate_words(x_lp) if use_triton(x_lp) else None
    if words is not None:
        source = x_lp.contiguous().view(torch.uint8)
        launch_kernel(
            _transpose_kernel,
            tile_grid(length, width, TRANSPOSE_TILE),
            source,
            words,
            length,
            width,
            length // 16,
            WHOLE=tiles_evenly(length, width, TRANSPOSE_TILE),
            **TRANSPOSE_TILE,
        )
    return finish_transposed(x_lp, words)


def raise_amax_by(x: Tensor, amax: Tensor) -> None:
    """Raise ``amax`` to the largest magnitude in ``x``, on the GPU."""
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1] if x.dim() else 1)
    length, width = rows.shape
    launch_kernel(
        _max_abs_kernel, tile_grid(length, width, MAX_TILE), rows, amax, length, width, rows.stride(0), **MAX_TILE
    )


def _max_abs(x: Tensor) -> Tensor:
    if not use_triton(x) or not x.numel():
        return max_abs_reference(x)
    amax = torch.zeros((), device=x.device)
    raise_amax_by(x, amax)
    return amax


_STATISTICS = ("amax", "counts")
_cast_op = OpWithOptionalStats(
    "cast", _cast, lambda x, scale, dtype, amax, counts: x.new_empty(x.shape, dtype=dtype), _STATISTICS
)


def _fake_layouts(like: Tensor, length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return like.new_empty((length, width), dtype=dtype), like.new_empty((width, length), dtype=dtype)


_cast_transpose_op = OpWithOptionalStats(
    "cast_transpose",
    _cast_transpose,
    lambda x, scale, dtype, amax, counts: _fake_layouts(x, x.shape[0], x.shape[1], dtype),
    _STATISTICS,
)
_cast_transpose_packed_op = OpWithOptionalStats(
    "cast_transpose_packed",
    _cast_transpose_packed,
    lambda parts, scale, dtype, amax, counts: _fake_layouts(
        parts[0], parts[0].shape[0] * parts[0].shape[2], sum(part.shape[1] * part.shape[3] for part in parts), dtype
    ),
    _STATISTICS,
)
_pack_op = register(
    "pack",
    _pack,
    lambda parts: parts[0].new_empty(
        (parts[0].shape[0] * parts[0].shape[2], sum(part.shape[1] * part.shape[3] for part in parts)),
        dtype=torch.bfloat16,
    ),
)
_transpose_op = register("transpose", _transpose, lambda x_lp: x_lp.new_empty((x_lp.shape[1], x_lp.shape[0])))
_max_abs_op = register("max_abs", _max_abs, lambda x: x.new_empty((), dtype=torch.float32))
