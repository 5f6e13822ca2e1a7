"""The Triton kernels of ``cross_entropy``: statistics of a row of logits, and its gradient in BF16 or FP8."""

from __future__ import annotations

from narrowgauge.kernels import HAVE_TRITON, jit, jit_unspecialized
from narrowgauge.kernels.fp8_tile import issue_loads, load_four, pack_fp8, store_words, tile_origin, to_fp8, to_fp32

LATTICE = 3242174889, 2447445414
"""2^32 divided by the plastic number and by its square. Their multiples, and sums of those, fill [0, 2^32) evenly."""

if HAVE_TRITON:
    import triton.language as tl

    ROW_STEP, COLUMN_STEP = tl.constexpr(LATTICE[0]), tl.constexpr(LATTICE[1])


@jit
def _log2_sum_exp(logits_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return log2 of the sum of a row's exponentials."""
    LOG2E: tl.constexpr = 1.4426950408889634  # exp2 of a fused multiply-add takes 2 instructions, exp takes 6
    columns = tl.arange(0, BLOCK)
    # The lowest finite number, not -inf: a block of logits that are all -inf would give -inf - -inf.
    top = tl.full([], -3.4028234663852886e38, tl.float32)
    # One maximum for all lanes, so that a logit costs one exponential. Lanes keep separate sums until the end.
    total = tl.zeros([BLOCK], tl.float32)
    ahead = tl.load(logits_ptr + columns, mask=columns < width, other=float("-inf"))
    for start in range(0, width, BLOCK):
        x = ahead.to(tl.float32)
        following = start + BLOCK + columns
        ahead = tl.load(logits_ptr + following, mask=following < width, other=float("-inf"))  # prefetch
        higher = tl.maximum(top, tl.max(x, 0) * LOG2E)
        total = total * tl.exp2(top - higher) + tl.exp2(x * LOG2E - higher)
        top = higher
    return top + tl.log2(tl.sum(total, 0))


@jit
def _pick_target(logits_ptr, target, width):  # type: ignore[no-untyped-def]
    """Return the target's logit; NaN if the target is outside the vocabulary."""
    return tl.load(logits_ptr + target, mask=(target >= 0) & (target < width), other=float("nan")).to(tl.float32)


@jit
def statistics_kernel(logits_ptr, targets_ptr, lse_ptr, loss_ptr, width, stride, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    lse = _log2_sum_exp(logits_ptr, width, BLOCK) / LOG2E
    target = tl.load(targets_ptr + row)
    tl.store(lse_ptr + row, lse)
    picked = _pick_target(logits_ptr, target, width)
    tl.store(loss_ptr + row, tl.where(target != ignore_index, lse - picked, 0.0))


@jit
def _log2_sum_exp_one_max(logits_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute ``_log2_sum_exp`` with the first block's maximum for the whole row, so that blocks do not wait.

    FP32 overflows only if a logit is 88 above that maximum. Then, or if the first block has no finite maximum, a second
    pass finds the row's maximum first.
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
    """Loss and gradient of a row. The second read starts with the last block, which is still in the cache."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    out_ptr += row * out_stride
    target = tl.load(targets_ptr + row).to(tl.int32)  # first: the next load depends on it
    picked = _pick_target(logits_ptr, target, width)
    power = _log2_sum_exp_one_max(logits_ptr, width, BLOCK)
    tl.store(loss_ptr + row, tl.where(target != ignore_index, power / LOG2E - picked, 0.0))
    tl.debug_barrier()  # the gradient may overwrite the logits, so all threads must have read them
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
def _grad_logits(x, targets_ptr, lse_ptr, row, columns, length, ignore_index, scale, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return d * scale for logits x, with 2**SHIFT = scale; the shift is added to the exponent at no cost."""
    LOG2E: tl.constexpr = 1.4426950408889634
    target = tl.load(targets_ptr + row, mask=row < length, other=ignore_index).to(tl.int32)
    offset = SHIFT - tl.load(lse_ptr + row, mask=row < length, other=0.0) * LOG2E
    d = tl.exp2(to_fp32(x) * LOG2E + offset[:, None])
    d = tl.where(columns[None, :] == target[:, None], d - scale, d)
    return tl.where((target != ignore_index)[:, None], d, 0.0)


@jit
def grad_logits_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, factor_ptr, out_ptr, length, width, stride, out_stride, ignore_index,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BLOCK_V)
    row = (tl.program_id(0) // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = (tl.program_id(0) % across) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (row < length)[:, None] & (columns < width)[None, :]
    wide = row.to(tl.int64)[:, None]  # GPT-2's 65,536 x 50,304 logits are more than 2^31
    x = tl.load(logits_ptr + wide * stride + columns[None, :], mask=mask, other=0.0)
    d = _grad_logits(x, targets_ptr, lse_ptr, row, columns, length, ignore_index, 1.0, 0.0) * tl.load(factor_ptr)
    tl.store(out_ptr + wide * out_stride + columns[None, :], d.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _store_rows(  # type: ignore[no-untyped-def]
    x, flushed, targets_ptr, lse_ptr, out_ptr, n, d0, first_row, length, width, ignore_index,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr, COUNT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store d * SCALE of every fourth row from n in FP8, dithered by up to TINY. COUNT: count values that become 0."""
    below, along = 4 * tl.arange(0, BLOCK_N // 4), tl.arange(0, BLOCK_D)
    row, columns = n + below, d0 + along
    exact = _grad_logits(x, targets_ptr, lse_ptr, row, columns, length, ignore_index, SCALE, SHIFT)
    high = (((row + first_row).to(tl.uint32) * ROW_STEP) >> 9).to(tl.int32)
    wide = ((columns.to(tl.uint32) * COLUMN_STEP) >> 9).to(tl.int32)
    # 23 bits become the fraction of a number from 1 to 2, with one addition and one logical operation.
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


@jit_unspecialized("length", "n16", "first_row")
def grad_logits_fp8_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, out_ptr, words_ptr, counts_ptr, length, width, stride, n16,
    ignore_index, first_row, SCALE: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
    COUNT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    # A tile has every fourth row, so that one thread has the four bytes of a transposed word (see ``fp8_tile``).
    x0, x1, x2, x3 = load_four(logits_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    issue_loads()
    f = tl.zeros([BLOCK_N // 4, BLOCK_D], tl.int32)
    y0, f = _store_rows(
        x0, f, targets_ptr, lse_ptr, out_ptr, n0, d0, first_row, length, width, ignore_index,
        SCALE, SHIFT, LIMIT, TINY, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y1, f = _store_rows(
        x1, f, targets_ptr, lse_ptr, out_ptr, n0 + 1, d0, first_row, length, width, ignore_index,
        SCALE, SHIFT, LIMIT, TINY, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y2, f = _store_rows(
        x2, f, targets_ptr, lse_ptr, out_ptr, n0 + 2, d0, first_row, length, width, ignore_index,
        SCALE, SHIFT, LIMIT, TINY, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y3, f = _store_rows(
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
