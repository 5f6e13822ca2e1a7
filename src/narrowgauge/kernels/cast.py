"""Casts to FP8: saturating, in both layouts, with amax and counts, in one pass over the high-precision tensor.

    y        = x * scale                                      in FP32
    x_lp     = round(clamp(y, -max, max))                     to nearest even; NaN stays NaN
    x_lp_t   = x_lp transposed                                Hopper's FP8 GEMMs want K contiguous in both operands
    amax     = max(amax, |x|)                                 of x itself, so it needs no unscaling
    counts  += [#(|y| > max), #(x != 0 and x_lp == 0)]        saturated, flushed to zero

Bytes moved per element of a BF16 x: ``cast`` 3, ``cast_transpose`` and its packed form 4, ``pack`` 4, ``transpose`` 2,
``max_abs`` 2. How the transposed copy is written: see ``tile``. Weights have a file of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import FP8_MAX, HAVE_TRITON, Recording, direct, jit, jit_for_any, register, use_triton
from narrowgauge.kernels.fp8_tile import (
    FLUSHED,
    abs_bits,
    add_misfits,
    emit,
    load_four,
    load_rows,
    misfits,
    pack_bytes,
    quantize_reference,
    record_amax,
    settle,
    store_words,
    tile_origin,
    tiles,
    unseen,
    whole,
    widen,
)

if HAVE_TRITON:
    import triton.language as tl

# The best of those that bench/tune_kernels.py tried on an H200.
TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
TRANSPOSE_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 128, "num_warps": 4}
MAX_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 128, "num_warps": 4}


def cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """``x`` [N, D] in FP8."""
    return (_cast if direct(x) else _cast_op.of(amax, counts))(x, scale, dtype, amax, counts)


def cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``x`` [N, D] in FP8, as [N, D] and as [D, N]."""
    return (_cast_transpose if direct(x) else _cast_transpose_op.of(amax, counts))(x, scale, dtype, amax, counts)


def cast_transpose_packed(
    parts: Sequence[Tensor],
    scale: Tensor,
    dtype: torch.dtype,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tensors [B, H, T, hd] of any strides, side by side in FP8: [B*T, sum of H*hd], and that transposed.

    Three parts are attention's dq, dk and dv in the layout of a packed qkv projection's output; one is its output.
    The parts may differ in H, as under grouped queries.
    """
    return (_packed if direct(*parts) else _packed_op.of(amax, counts))(list(parts), scale, dtype, amax, counts)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors [B, H, T, hd] side by side in BF16, laid out as by ``cast_transpose_packed``: [B*T, sum of H*hd]."""
    return (_pack if direct(*parts) else _pack_op)(list(parts))


def transpose(x_lp: Tensor) -> Tensor:
    """``x_lp`` [N, D] in FP8 as [D, N], contiguous."""
    return (_transpose if direct(x_lp) else _transpose_op)(x_lp)


def max_abs(x: Tensor) -> Tensor:
    """The largest magnitude in ``x`` as an FP32 scalar on its device; NaN if one is in it."""
    return (_max_abs if direct(x) else _max_abs_op)(x)


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
    """``load_rows`` from [N, D], or from [B, H, T, HEAD] with row b * T + t and column h * HEAD + e."""
    if HEAD is None:
        x = load_rows(ptr, n, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    else:
        rows = 4 * tl.arange(0, BLOCK_N // 4)[:, None]
        columns = (d0 + tl.arange(0, BLOCK_D))[None, :]
        if WHOLE and HEAD % BLOCK_D == 0:  # all columns of a tile are in one head
            head = d0 // HEAD
            # Not d0 % HEAD: of that the compiler does not know that it allows 16-byte loads.
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


@jit_for_any("length", "time", "n16")
def _cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, out_t_ptr, scale_ptr, amax_ptr, counts_ptr, length, width,
    batch_stride, head_stride, stride, time, out_stride, n16,
    HEAD: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    x0 = _load(x_ptr, n0, d0, length, width, batch_stride, head_stride, stride, time, HEAD, WHOLE, BLOCK_N, BLOCK_D)
    x1 = _load(x_ptr, n0 + 1, d0, length, width, batch_stride, head_stride, stride, time, HEAD, WHOLE, BLOCK_N, BLOCK_D)
    x2 = _load(x_ptr, n0 + 2, d0, length, width, batch_stride, head_stride, stride, time, HEAD, WHOLE, BLOCK_N, BLOCK_D)
    x3 = _load(x_ptr, n0 + 3, d0, length, width, batch_stride, head_stride, stride, time, HEAD, WHOLE, BLOCK_N, BLOCK_D)
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    highest, lowest, nonzero = unseen(BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = emit(
        widen(x0), widen(x1), widen(x2), widen(x3), highest, lowest, nonzero, out_ptr, out_t_ptr, scale, amax_ptr,
        counts_ptr, n0, d0, length, width, out_stride, n16, LIMIT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    again = settle(highest, lowest, nonzero, BLOCK_N * BLOCK_D, scale, amax_ptr, counts_ptr, LIMIT)
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if again:
            both = 0
            for i in range(4):
                x = _load(
                    x_ptr, n0 + i, d0, length, width, batch_stride, head_stride, stride, time,
                    HEAD, WHOLE, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                both += misfits(widen(x) * scale, LIMIT, TINY)
            add_misfits(counts_ptr, both)


@jit_for_any("length", "n16")
def _transpose_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_t_ptr, length, width, n16,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    x0, x1, x2, x3 = load_four(x_ptr, n0, d0, length, width, width, WHOLE, BLOCK_N, BLOCK_D)
    store_words(pack_bytes(x0, x1, x2, x3), out_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)


@jit_for_any("length")
def _max_abs_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amax_ptr, length, width, stride, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    rows = (n0 + tl.arange(0, BLOCK_N))[:, None]
    columns = (d0 + tl.arange(0, BLOCK_D))[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64) * stride + columns, mask=(rows < length) & (columns < width), other=0.0)
    record_amax(amax_ptr, abs_bits(x.to(tl.float32)))


def empty_words(x_lp: Tensor) -> Tensor | None:
    """Memory for the transposed copy of ``x_lp`` [N, D], in words; None where N has no whole 16-byte stores."""
    if x_lp.shape[0] % 16 or not x_lp.numel():
        return None
    return x_lp.new_empty((x_lp.shape[1], x_lp.shape[0])).view(torch.int32)


def transposed_copy(x_lp: Tensor, words: Tensor | None) -> Tensor:
    """What a kernel has written into ``words``, or a copy by torch where it could not."""
    return transpose_reference(x_lp) if words is None else words.view(x_lp.dtype)


def launch(
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
    if x.stride(-1) != 1:  # an expanded gradient, say
        x = x.contiguous()
    heads = x.dim() == 4
    time = x.shape[2] if heads else 1
    fits = whole(length, width, TILE) and (not heads or time % TILE["BLOCK_N"] == 0)
    _cast_kernel[tiles(length, width, TILE)](
        x, out, out_t, scale, amax, counts, length, width,
        x.stride(0), x.stride(1) if heads else 0, x.stride(2 if heads else 0), time,
        out.stride(0), length // 16, HEAD=x.shape[3] if heads else None,
        LIMIT=FP8_MAX.get(out.dtype), TINY=FLUSHED.get(out.dtype), WHOLE=fits, **TILE,
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
    launch(x, out, None, scale, amax, counts)
    return out


def _cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check(x, 2, dtype)
    if not use_triton(x):
        return cast_transpose_reference(x, scale, dtype, amax, counts)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    words = empty_words(out)
    launch(x, out, words, scale, amax, counts)
    return out, transposed_copy(out, words)


def _packed(
    parts: list[Tensor], scale: Tensor, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    for part in parts:
        _check(part, 4, dtype)
    if not use_triton(parts[0]):
        return cast_transpose_packed_reference(parts, scale, dtype, amax, counts)
    batch, _, time, _ = parts[0].shape
    widths = [part.shape[1] * part.shape[3] for part in parts]
    out = torch.empty((batch * time, sum(widths)), dtype=dtype, device=parts[0].device)
    words = empty_words(out)
    word_rows = [None] * len(parts) if words is None else words.split(widths)
    for part, columns, rows in zip(parts, out.split(widths, 1), word_rows, strict=True):
        launch(part, columns, rows, scale, amax, counts)
    return out, transposed_copy(out, words)


def _pack(parts: list[Tensor]) -> Tensor:
    for part in parts:
        _check(part, 4)
    if not use_triton(parts[0]):
        return pack_reference(parts).to(torch.bfloat16)
    batch, _, time, _ = parts[0].shape
    widths = [part.shape[1] * part.shape[3] for part in parts]
    out = torch.empty((batch * time, sum(widths)), dtype=torch.bfloat16, device=parts[0].device)
    for part, columns in zip(parts, out.split(widths, 1), strict=True):
        launch(part, columns, None, None)
    return out


def _transpose(x_lp: Tensor) -> Tensor:
    _check(x_lp, 2, x_lp.dtype)
    length, width = x_lp.shape
    words = empty_words(x_lp) if use_triton(x_lp) else None
    if words is not None:
        source = x_lp.contiguous().view(torch.uint8)
        _transpose_kernel[tiles(length, width, TRANSPOSE_TILE)](
            source, words, length, width, length // 16, WHOLE=whole(length, width, TRANSPOSE_TILE), **TRANSPOSE_TILE
        )
    return transposed_copy(x_lp, words)


def max_abs_of(x: Tensor, amax: Tensor) -> None:
    """Raise ``amax`` to the largest magnitude in ``x``, by the kernel."""
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1] if x.dim() else 1)
    length, width = rows.shape
    _max_abs_kernel[tiles(length, width, MAX_TILE)](rows, amax, length, width, rows.stride(0), **MAX_TILE)


def _max_abs(x: Tensor) -> Tensor:
    if not use_triton(x) or not x.numel():
        return max_abs_reference(x)
    amax = torch.zeros((), device=x.device)
    max_abs_of(x, amax)
    return amax


_STATISTICS = ("amax", "counts")
_cast_op = Recording(
    "cast", _cast, lambda x, scale, dtype, amax, counts: x.new_empty(x.shape, dtype=dtype), _STATISTICS
)


def _fake_layouts(like: Tensor, length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return like.new_empty((length, width), dtype=dtype), like.new_empty((width, length), dtype=dtype)


_cast_transpose_op = Recording(
    "cast_transpose",
    _cast_transpose,
    lambda x, scale, dtype, amax, counts: _fake_layouts(x, x.shape[0], x.shape[1], dtype),
    _STATISTICS,
)
_packed_op = Recording(
    "cast_transpose_packed",
    _packed,
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
