"""The Triton kernels of ``cross_entropy``: statistics of a row of logits, and its gradient in BF16 or FP8.

``multiplier``, ``cap`` and ``smoothing`` are numbers, or None, which removes their code when the kernel is compiled.
"""

from __future__ import annotations

from narrowgauge.kernels import HAVE_TRITON, jit, jit_unspecialized
from narrowgauge.kernels.fp8_formats import flush_threshold_of
from narrowgauge.kernels.fp8_tile import issue_loads, load_four, pack_fp8, store_words, tile_origin, to_fp8, to_fp32

LATTICE = 3242174889, 2447445414
"""2^32 divided by the plastic number and by its square. Their multiples, and sums of those, fill [0, 2^32) evenly."""

if HAVE_TRITON:
    import triton.language as tl

    ROW_STEP, COLUMN_STEP = tl.constexpr(LATTICE[0]), tl.constexpr(LATTICE[1])


@jit
def _decay(x, cap):  # type: ignore[no-untyped-def]
    return tl.exp2(tl.abs(x / cap) * -2.8853900817779268)  # exp(-2 |x / cap|), which cannot overflow


@jit
def _shape_logits(x, multiplier, cap):  # type: ignore[no-untyped-def]
    """Return the head's logits, scaled and capped: cap * tanh(multiplier * x / cap)."""
    if multiplier is not None:
        x = x * multiplier
    if cap is not None:
        e = _decay(x, cap)
        size = cap * ((1.0 - e) / (1.0 + e))
        x = tl.where(x / cap < 0.0, -size, size)
    return x


@jit
def _shape_gradient(d, x, multiplier, cap):  # type: ignore[no-untyped-def]
    """Multiply d by the slope of the cap at the head's logits x: 1 - tanh^2, written so that nothing cancels."""
    if cap is not None:
        if multiplier is not None:
            x = x * multiplier
        e = _decay(x, cap)
        d = d * (4.0 * e / ((1.0 + e) * (1.0 + e)))
    return d


@jit
def _shape_row(x, inside, multiplier, cap):  # type: ignore[no-untyped-def]
    """Return scaled and capped logits in FP32; those outside of the row are -inf."""
    x = x.to(tl.float32)
    if multiplier is not None or cap is not None:
        x = tl.where(inside, _shape_logits(x, multiplier, cap), float("-inf"))
    return x


@jit
def _compute_loss(counts, lse, picked, every, width, smoothing):  # type: ignore[no-untyped-def]
    """Return a row's loss from log-sum-exp, the target's logit and the sum of all logits."""
    if smoothing is not None:
        picked = (1.0 - smoothing) * picked + smoothing / width * every
    return tl.where(counts, lse - picked, 0.0)


@jit
def _log2_sum_exp(logits_ptr, width, multiplier, cap, smoothing, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return log2 of the sum of a row's exponentials; with smoothing also the sum of its logits."""
    LOG2E: tl.constexpr = 1.4426950408889634  # exp2 of a fused multiply-add takes 2 instructions, exp takes 6
    columns = tl.arange(0, BLOCK)
    # The lowest finite number, not -inf: a block of logits that are all -inf would give -inf - -inf.
    top = tl.full([], -3.4028234663852886e38, tl.float32)
    # One maximum for all lanes, so that a logit costs one exponential. Lanes keep separate sums until the end.
    total = tl.zeros([BLOCK], tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    ahead = tl.load(logits_ptr + columns, mask=columns < width, other=float("-inf"))
    for start in range(0, width, BLOCK):
        x = _shape_row(ahead, start + columns < width, multiplier, cap)
        if smoothing is not None:
            added += tl.where(start + columns < width, x, 0.0)
        following = start + BLOCK + columns
        ahead = tl.load(logits_ptr + following, mask=following < width, other=float("-inf"))  # prefetch
        higher = tl.maximum(top, tl.max(x, 0) * LOG2E)
        total = total * tl.exp2(top - higher) + tl.exp2(x * LOG2E - higher)
        top = higher
    every = top
    if smoothing is not None:
        every = tl.sum(added, 0)
    return top + tl.log2(tl.sum(total, 0)), every


@jit
def _pick_target(logits_ptr, target, width, multiplier, cap):  # type: ignore[no-untyped-def]
    """Return the target's logit; NaN if the target is outside the vocabulary."""
    x = tl.load(logits_ptr + target, mask=(target >= 0) & (target < width), other=float("nan")).to(tl.float32)
    return _shape_logits(x, multiplier, cap)


@jit
def statistics_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, loss_ptr, width, stride, ignore_index, multiplier, cap, smoothing,
    BLOCK: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    power, every = _log2_sum_exp(logits_ptr, width, multiplier, cap, smoothing, BLOCK)
    lse = power / LOG2E
    target = tl.load(targets_ptr + row)
    tl.store(lse_ptr + row, lse)
    picked = _pick_target(logits_ptr, target, width, multiplier, cap)
    tl.store(loss_ptr + row, _compute_loss(target != ignore_index, lse, picked, every, width, smoothing))


@jit
def _load_row(logits_ptr, start, columns, width, multiplier, cap):  # type: ignore[no-untyped-def]
    x = tl.load(logits_ptr + start + columns, mask=start + columns < width, other=float("-inf"))
    return _shape_row(x, start + columns < width, multiplier, cap)


@jit
def _log2_sum_exp_one_max(logits_ptr, width, multiplier, cap, smoothing, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute ``_log2_sum_exp`` with the first block's maximum for the whole row, so that blocks do not wait.

    FP32 overflows only if a logit is 88 above that maximum. Then, or if the first block has no finite maximum, a second
    pass finds the row's maximum first.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    columns = tl.arange(0, BLOCK)
    x = _load_row(logits_ptr, 0, columns, width, multiplier, cap)
    top = tl.max(x, 0) * LOG2E
    total = tl.exp2(x * LOG2E - top)
    added = tl.zeros([BLOCK], tl.float32)
    if smoothing is not None:
        added += tl.where(columns < width, x, 0.0)
    for start in range(BLOCK, width, BLOCK):
        x = _load_row(logits_ptr, start, columns, width, multiplier, cap)
        total += tl.exp2(x * LOG2E - top)
        if smoothing is not None:
            added += tl.where(start + columns < width, x, 0.0)
    every = tl.sum(total, 0)
    if (every < float("inf")) == 0:  # NaN too
        total = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
        for start in range(0, width, BLOCK):
            x = _load_row(logits_ptr, start, columns, width, multiplier, cap)
            total = tl.maximum(total, x)
        top = tl.max(total, 0) * LOG2E
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            x = _load_row(logits_ptr, start, columns, width, multiplier, cap)
            total += tl.exp2(x * LOG2E - top)
        every = tl.sum(total, 0)
    total_logits = top
    if smoothing is not None:
        total_logits = tl.sum(added, 0)
    return top + tl.log2(every), total_logits


@jit
def _subtract_target(d, hit, scale, width, smoothing):  # type: ignore[no-untyped-def]
    """Subtract the target's distribution, times ``scale``, from the softmax."""
    if smoothing is not None:
        d = tl.where(hit, d - scale * (1.0 - smoothing), d) - scale * smoothing / width
    else:
        d = tl.where(hit, d - scale, d)
    return d


@jit
def loss_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, loss_ptr, factor_ptr, out_ptr, width, stride, out_stride, ignore_index,
    multiplier, cap, smoothing, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and gradient of a row. The second read starts with the last block, which is still in the cache."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    out_ptr += row * out_stride
    target = tl.load(targets_ptr + row).to(tl.int32)  # first: the next load depends on it
    picked = _pick_target(logits_ptr, target, width, multiplier, cap)
    power, every = _log2_sum_exp_one_max(logits_ptr, width, multiplier, cap, smoothing, BLOCK)
    tl.store(loss_ptr + row, _compute_loss(target != ignore_index, power / LOG2E, picked, every, width, smoothing))
    tl.debug_barrier()  # the gradient may overwrite the logits, so all threads must have read them
    factor, counts = tl.load(factor_ptr), target != ignore_index
    blocks = tl.cdiv(width, BLOCK)
    for index in range(blocks):
        columns = (blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
        d = tl.exp2(_shape_logits(x, multiplier, cap) * LOG2E - power)
        d = _subtract_target(d, columns == target, 1.0, width, smoothing)
        d = _shape_gradient(d, x, multiplier, cap)
        d = tl.where(counts, d * factor, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + columns, d, mask=columns < width)


@jit
def _grad_logits(  # type: ignore[no-untyped-def]
    x, targets_ptr, lse_ptr, row, columns, length, width, ignore_index, multiplier, cap, smoothing,
    scale, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return d * scale for logits x, with 2**SHIFT = scale; the shift is added to the exponent at no cost."""
    LOG2E: tl.constexpr = 1.4426950408889634
    target = tl.load(targets_ptr + row, mask=row < length, other=ignore_index).to(tl.int32)
    offset = SHIFT - tl.load(lse_ptr + row, mask=row < length, other=0.0) * LOG2E
    x = to_fp32(x)
    d = tl.exp2(_shape_logits(x, multiplier, cap) * LOG2E + offset[:, None])
    d = _subtract_target(d, columns[None, :] == target[:, None], scale, width, smoothing)
    d = _shape_gradient(d, x, multiplier, cap)
    return tl.where((target != ignore_index)[:, None], d, 0.0)


@jit
def grad_logits_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, factor_ptr, out_ptr, length, width, stride, out_stride, ignore_index,
    multiplier, cap, smoothing, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, BLOCK_V)
    row = (tl.program_id(0) // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = (tl.program_id(0) % across) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (row < length)[:, None] & (columns < width)[None, :]
    wide = row.to(tl.int64)[:, None]  # GPT-2's 65,536 x 50,304 logits are more than 2^31
    x = tl.load(logits_ptr + wide * stride + columns[None, :], mask=mask, other=0.0)
    d = _grad_logits(
        x, targets_ptr, lse_ptr, row, columns, length, width, ignore_index, multiplier, cap, smoothing, 1.0, 0.0
    ) * tl.load(factor_ptr)  # fmt: skip
    tl.store(out_ptr + wide * out_stride + columns[None, :], d.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _dither(x, places, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round x so that it is right on average, with numbers of 23 bits that depend on its place. Small x stay unrounded.

    Normal numbers: bits that the format does not have are added to, and cut off. Smaller ones have a constant step.
    """
    CUT: tl.constexpr = 20 if FORMAT == "e4m3" else 21
    step = 2.0 * flush_threshold_of(FORMAT)
    bits = x.to(tl.int32, bitcast=True) + (places >> (23 - CUT))
    normal = (bits & (-1 << CUT)).to(tl.float32, bitcast=True)
    # 23 bits become the fraction of a number from 1 to 2, with one logical operation.
    small = x + ((places | 0x3F800000).to(tl.float32, bitcast=True) - 1.5) * step
    return tl.where(tl.abs(x) >= step * (1 << (23 - CUT)), normal, small)  # NaN counts as small: bits could overflow


@jit
def _store_rows(  # type: ignore[no-untyped-def]
    x, flushed, targets_ptr, lse_ptr, out_ptr, n, d0, first_row, length, width, ignore_index,
    multiplier, cap, smoothing, SCALE: tl.constexpr, SHIFT: tl.constexpr, FORMAT: tl.constexpr,
    COUNT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store d * SCALE of every fourth row from n in FP8, dithered by up to half a step.

    COUNT: count values that become 0.
    """
    below, along = 4 * tl.arange(0, BLOCK_N // 4), tl.arange(0, BLOCK_D)
    row, columns = n + below, d0 + along
    exact = _grad_logits(
        x, targets_ptr, lse_ptr, row, columns, length, width, ignore_index, multiplier, cap, smoothing, SCALE, SHIFT
    )
    high = (((row + first_row).to(tl.uint32) * ROW_STEP) >> 9).to(tl.int32)
    wide = ((columns.to(tl.uint32) * COLUMN_STEP) >> 9).to(tl.int32)
    d = _dither(exact, (high[:, None] + wide[None, :]) & 0x7FFFFF, FORMAT)
    mask = (row < length)[:, None] & (columns < width)[None, :]
    if COUNT:
        zero = (exact != 0.0) & (tl.abs(d) <= flush_threshold_of(FORMAT))
        flushed += tl.where(zero if WHOLE else zero & mask, 1, 0)
    target = out_ptr + (n.to(tl.int64) * width + d0) + (below[:, None] * width + along[None, :])
    if WHOLE:
        tl.store(target, to_fp8(d, FORMAT))
    else:
        tl.store(target, to_fp8(d, FORMAT), mask=mask)
    return d, flushed


@jit_unspecialized("length", "n16", "first_row")
def grad_logits_fp8_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, out_ptr, words_ptr, counts_ptr, length, width, stride, n16,
    ignore_index, first_row, multiplier, cap, smoothing,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, FORMAT: tl.constexpr,
    COUNT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    # A tile has every fourth row, so that one thread has the four bytes of a transposed word (see ``fp8_tile``).
    x0, x1, x2, x3 = load_four(logits_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    issue_loads()
    f = tl.zeros([BLOCK_N // 4, BLOCK_D], tl.int32)
    y0, f = _store_rows(
        x0, f, targets_ptr, lse_ptr, out_ptr, n0, d0, first_row, length, width, ignore_index,
        multiplier, cap, smoothing, SCALE, SHIFT, FORMAT, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y1, f = _store_rows(
        x1, f, targets_ptr, lse_ptr, out_ptr, n0 + 1, d0, first_row, length, width, ignore_index,
        multiplier, cap, smoothing, SCALE, SHIFT, FORMAT, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y2, f = _store_rows(
        x2, f, targets_ptr, lse_ptr, out_ptr, n0 + 2, d0, first_row, length, width, ignore_index,
        multiplier, cap, smoothing, SCALE, SHIFT, FORMAT, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    y3, f = _store_rows(
        x3, f, targets_ptr, lse_ptr, out_ptr, n0 + 3, d0, first_row, length, width, ignore_index,
        multiplier, cap, smoothing, SCALE, SHIFT, FORMAT, COUNT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if words_ptr is not None:
        packed = pack_fp8(y0, y1, y2, y3, FORMAT)
        store_words(packed, words_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D, length)
    if counts_ptr is not None:
        tl.atomic_add(counts_ptr + 1, tl.sum(f).to(counts_ptr.dtype.element_ty), sem="relaxed")


@jit
def rescale_kernel(tensor_ptr, factor_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(tensor_ptr + offsets, mask=offsets < size)
        tl.store(tensor_ptr + offsets, (x.to(tl.float32) * factor).to(x.dtype), mask=offsets < size)
