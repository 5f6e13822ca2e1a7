"""The Triton kernels of ``cross_entropy``: statistics of a row of logits, and their gradient in BF16 or FP8."""

from __future__ import annotations

from narrowgauge.kernels import HAVE_TRITON, jit, jit_for_any
from narrowgauge.kernels.fp8_tile import load_four, pack_fp8, store_words, tile_origin, to_fp8, under_way, widen

LATTICE = 3242174889, 2447445414
"""2^32 over the plastic number, and over its square: multiples of them fill [0, 2^32) evenly, also as sums."""

if HAVE_TRITON:
    import triton.language as tl

    ROWS_APART, COLUMNS_APART = tl.constexpr(LATTICE[0]), tl.constexpr(LATTICE[1])


@jit
def _log_sum(logits_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The base-2 logarithm of the sum of a row's exponentials."""
    LOG2E: tl.constexpr = 1.4426950408889634  # exp2 of a fused multiply-add: 2 instructions, where exp takes 6
    columns = tl.arange(0, BLOCK)
    # The lowest number rather than -inf: a block of logits that are all -inf would give -inf - -inf.
    top = tl.full([], -3.4028234663852886e38, tl.float32)
    # One maximum for all lanes, so that a logit costs one exponential; the lanes' sums stay apart until the end.
    total = tl.zeros([BLOCK], tl.float32)
    ahead = tl.load(logits_ptr + columns, mask=columns < width, other=float("-inf"))
    for start in range(0, width, BLOCK):
        x = ahead.to(tl.float32)
        following = start + BLOCK + columns
        ahead = tl.load(logits_ptr + following, mask=following < width, other=float("-inf"))  # under way meanwhile
        higher = tl.maximum(top, tl.max(x, 0) * LOG2E)
        total = total * tl.exp2(top - higher) + tl.exp2(x * LOG2E - higher)
        top = higher
    return top + tl.log2(tl.sum(total, 0))


@jit
def _picked(logits_ptr, target, width):  # type: ignore[no-untyped-def]
    """The target's logit; NaN where there is no such word."""
    return tl.load(logits_ptr + target, mask=(target >= 0) & (target < width), other=float("nan")).to(tl.float32)


@jit
def statistics_kernel(logits_ptr, targets_ptr, lse_ptr, loss_ptr, width, stride, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    lse = _log_sum(logits_ptr, width, BLOCK) / LOG2E
    target = tl.load(targets_ptr + row)
    tl.store(lse_ptr + row, lse)
    picked = _picked(logits_ptr, target, width)
    tl.store(loss_ptr + row, tl.where(target != ignore_index, lse - picked, 0.0))


@jit
def _log_sum_quick(logits_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``_log_sum`` with the first block's maximum for all of the row, so that no block waits for another's.

    Only a logit 88 above that maximum leaves FP32; then, and where the first block has none, the row's is found first.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    columns = tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0) * LOG2E
    total = tl.exp2(x * LOG2E - top)
    for start in range(BLOCK, width, BLOCK):
        x = tl.load(logits_ptr + start + columns, mask=start + columns < width, other=float("-inf")).to(tl.float32)
        total += tl.exp2(x * LOG2E - top)
    every = tl.sum(total, 0)
    if (every < float("inf")) == 0:  # NaN too
        total = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
        for start in range(0, width, BLOCK):
            x = tl.load(logits_ptr + start + columns, mask=start + columns < width, other=float("-inf")).to(tl.float32)
            total = tl.maximum(total, x)
        top = tl.max(total, 0) * LOG2E
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            x = tl.load(logits_ptr + start + columns, mask=start + columns < width, other=float("-inf")).to(tl.float32)
            total += tl.exp2(x * LOG2E - top)
        every = tl.sum(total, 0)
    return top + tl.log2(every)


@jit
def loss_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, loss_ptr, factor_ptr, out_ptr, width, stride, out_stride, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and gradient of a row, which is read twice, but the second time from the cache: the last block first."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    out_ptr += row * out_stride
    target = tl.load(targets_ptr + row).to(tl.int32)  # first, as two loads that wait for each other take a while
    picked = _picked(logits_ptr, target, width)
    power = _log_sum_quick(logits_ptr, width, BLOCK)
    tl.store(loss_ptr + row, tl.where(target != ignore_index, power / LOG2E - picked, 0.0))
    tl.debug_barrier()  # the gradient may be written over the logits, which all must have read
    factor, counts = tl.load(factor_ptr), target != ignore_index
    blocks = tl.cdiv(width, BLOCK)
    for index in range(blocks):
        columns = (blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
        d = tl.exp2(x * LOG2E - power)
        d = tl.where(columns == target, d - 1.0, d)
        d = tl.where(counts, d * factor, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + columns, d, mask=columns < width)


@jit
def _gradient(x, targets_ptr, lse_ptr, row, columns, length, ignore_index, scale, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """d * scale for the logits x of some rows, with 2**SHIFT = scale: it joins the exponent, so it costs nothing."""
    LOG2E: tl.constexpr = 1.4426950408889634
    target = tl.load(targets_ptr + row, mask=row < length, other=ignore_index).to(tl.int32)
    offset = SHIFT - tl.load(lse_ptr + row, mask=row < length, other=0.0) * LOG2E
    d = tl.exp2(widen(x) * LOG2E + offset[:, None])
    d = tl.where(columns[None, :] == target[:, None], d - scale, d)
    return tl.where((target != ignore_index)[:, None], d, 0.0)


@jit
def dlogits_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, factor_ptr, out_ptr, length, width, stride, out_stride, ignore_index,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BLOCK_V)
    row = (tl.program_id(0) // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = (tl.program_id(0) % across) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (row < length)[:, None] & (columns < width)[None, :]
    wide = row.to(tl.int64)[:, None]  # GPT-2's 65,536 x 50,304 logits are more than 2^31
    x = tl.load(logits_ptr + wide * stride + columns[None, :], mask=mask, other=0.0)
    d = _gradient(x, targets_ptr, lse_ptr, row, columns, length, ignore_index, 1.0, 0.0) * tl.load(factor_ptr)
    tl.store(out_ptr + wide * out_stride + columns[None, :], d.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _put(  # type: ignore[no-untyped-def]
    x, flushed, targets_ptr, lse_ptr, out_ptr, n, d0, first_row, length, width, ignore_index,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr, COUNT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store d * SCALE of every fourth row from n on in FP8, dithered by TINY to either side. COUNT: what becomes 0."""
    below, along = 4 * tl.arange(0, BLOCK_N // 4), tl.arange(0, BLOCK_D)
    row, columns = n + below, d0 + along
    exact = _gradient(x, targets_ptr, lse_ptr, row, columns, length, ignore_index, SCALE, SHIFT)
    high = (((row + first_row).to(tl.uint32) * ROWS_APART) >> 9).to(tl.int32)
    wide = ((columns.to(tl.uint32) * COLUMNS_APART) >> 9).to(tl.int32)
    # 23 bits as the fraction of a number from 1 to 2: an addition and a logical operation make it.
    even = (((high[:, None] + wide[None, :]) & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    d = exact + (even - 1.5) * (2.0 * TINY)
    mask = (row < length)[:, None] & (columns < width)[None, :]
    if COUNT:
        zero = (exact != 0.0) & (tl.abs(d) <= TINY)
        flushed += tl.where(zero if WHOLE else zero & mask, 1, 0)
    target = out_ptr + (n.to(tl.int64) * width + d0) + (below[:, None] * width + along[None, :])
    if WHOLE:
        tl.store(target, to_fp8(d, LIMIT))
    else:
        tl.store(target, to_fp8(d, LIMIT), mask=mask)
    return d, flushed


@jit_for_any("length", "n16", "first_row")
def dlogits_lp_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, out_ptr, words_ptr, counts_ptr, length, width, stride, n16,
    ignore_index, first_row, SCALE: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
    COUNT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    # Every fourth row makes a tile, so that the four bytes of a transposed word are in one thread: see ``tile``.
    x0, x1, x2, x3 = load_four(logits_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    under_way()
    f = tl.zeros([BLOCK_N // 4, BLOCK_D], tl.int32)
    y0, f = _put(
        x0, f, targets_ptr, lse_ptr, out_ptr, n0, d0, first_row, length, width, ignore_index,
        SCALE, SHIFT, LIMIT, TINY, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y1, f = _put(
        x1, f, targets_ptr, lse_ptr, out_ptr, n0 + 1, d0, first_row, length, width, ignore_index,
        SCALE, SHIFT, LIMIT, TINY, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y2, f = _put(
        x2, f, targets_ptr, lse_ptr, out_ptr, n0 + 2, d0, first_row, length, width, ignore_index,
        SCALE, SHIFT, LIMIT, TINY, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y3, f = _put(
        x3, f, targets_ptr, lse_ptr, out_ptr, n0 + 3, d0, first_row, length, width, ignore_index,
        SCALE, SHIFT, LIMIT, TINY, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if words_ptr is not None:
        store_words(pack_fp8(y0, y1, y2, y3, LIMIT), words_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
    if counts_ptr is not None:
        tl.atomic_add(counts_ptr + 1, tl.sum(f).to(counts_ptr.dtype.element_ty), sem="relaxed")


@jit
def rescale_kernel(tensor_ptr, factor_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(tensor_ptr + offsets, mask=offsets < size)
        tl.store(tensor_ptr + offsets, (x.to(tl.float32) * factor).to(x.dtype), mask=offsets < size)
