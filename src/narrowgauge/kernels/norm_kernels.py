"""The Triton kernels of LayerNorm and RMSNorm; ``norm`` has their mathematics, references and launches.

A program walks over every P-th group of rows, where P is the number of programs. That leaves one atomic per program for
amax and one for each count that is not 0, and one partial sum of dweight per program, which ``sum_kernel`` adds up. A
pointer that is None leaves out, when the kernel is compiled, all that belongs to it.
"""

from __future__ import annotations

from narrowgauge.kernels import HAVE_TRITON, jit
from narrowgauge.kernels.fp8_tile import abs_bits, record_amax, saturates, to_fp8

if HAVE_TRITON:
    import triton.language as tl


@jit
def _watch(  # type: ignore[no-untyped-def]
    y, scale, largest, saturated, flushed, amax_ptr, counts_ptr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Running maxima and counts; the four neighbours a thread holds fold into one, to spare registers."""
    if amax_ptr is not None:
        largest = tl.maximum(largest, tl.max(tl.max(tl.reshape(abs_bits(y), [ROWS, BLOCK // 4, 4]), 2), 0))
    if counts_ptr is not None:
        size = tl.abs(y * scale)
        too_large = saturates(size, LIMIT).to(tl.int32)
        too_small = ((size <= TINY) & (y != 0.0)).to(tl.int32)
        saturated += tl.sum(tl.sum(tl.reshape(too_large, [ROWS, BLOCK // 4, 4]), 2), 0)
        flushed += tl.sum(tl.sum(tl.reshape(too_small, [ROWS, BLOCK // 4, 4]), 2), 0)
    return largest, saturated, flushed


@jit
def _publish(largest, saturated, flushed, amax_ptr, counts_ptr):  # type: ignore[no-untyped-def]
    if amax_ptr is not None:
        record_amax(amax_ptr, largest)
    if counts_ptr is not None:
        above = tl.sum(saturated, 0).to(counts_ptr.dtype.element_ty)
        below = tl.sum(flushed, 0).to(counts_ptr.dtype.element_ty)
        tl.atomic_add(counts_ptr, above, mask=above > 0, sem="relaxed")
        tl.atomic_add(counts_ptr + 1, below, mask=below > 0, sem="relaxed")


@jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, branch_ptr, weight_ptr, bias_ptr, scale_ptr, out_ptr, residual_ptr, mean_ptr, rstd_ptr, amax_ptr, counts_ptr,
    rows, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    LIMIT: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    # Told that columns come in fours, Triton gives a thread 4 neighbours of every tensor (16 bytes of FP32, 4 of FP8;
    # a warp covers whole lines). Left alone it takes 16 for the FP8 store and turns the others through shared memory.
    cols = tl.multiple_of(tl.arange(0, BLOCK), 4)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    largest = tl.zeros([BLOCK // 4], tl.int32)
    saturated = tl.zeros([BLOCK // 4], tl.int32)
    flushed = tl.zeros([BLOCK // 4], tl.int32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        there = row < rows
        live = there[:, None] & inside[None, :]
        first = row.to(tl.int64)[:, None] * D
        r = tl.load(x_ptr + first + cols[None, :], mask=live, other=0.0).to(tl.float32)
        if branch_ptr is not None:
            r += tl.load(branch_ptr + first + cols[None, :], mask=live, other=0.0).to(tl.float32)
            stored = r.to(residual_ptr.dtype.element_ty)
            tl.store(residual_ptr + first + cols[None, :], stored, mask=live)
            r = stored.to(tl.float32)  # what backward will read
        if mean_ptr is not None:
            mean = tl.sum(r, 1) / D
            tl.store(mean_ptr + row, mean, mask=there)
            r = tl.where(live, r - mean[:, None], 0.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(r * r, 1) / D + eps))
        tl.store(rstd_ptr + row, rstd, mask=there)
        y = r * rstd[:, None] * weight
        if bias_ptr is not None:
            y += bias
        y = tl.where(live, y, 0.0)  # rows beyond the end would show the bias, or 0 * inf, to amax
        largest, saturated, flushed = _watch(
            y, scale, largest, saturated, flushed, amax_ptr, counts_ptr, ROWS, BLOCK, LIMIT, TINY
        )
        out = y.to(out_ptr.dtype.element_ty) if scale_ptr is None else to_fp8(y * scale, LIMIT)
        tl.store(out_ptr + first + cols[None, :], out, mask=live)
    _publish(largest, saturated, flushed, amax_ptr, counts_ptr)


@jit
def backward_kernel(  # type: ignore[no-untyped-def]
    dout_ptr, residual_ptr, weight_ptr, mean_ptr, rstd_ptr, dresidual_ptr, scale_ptr, dx_ptr, dx_lp_ptr, dweight_ptr,
    dbias_ptr, amax_ptr, counts_ptr, rows, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    cols = tl.multiple_of(tl.arange(0, BLOCK), 4)  # as in the forward kernel
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    largest = tl.zeros([BLOCK // 4], tl.int32)
    saturated = tl.zeros([BLOCK // 4], tl.int32)
    flushed = tl.zeros([BLOCK // 4], tl.int32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        there = row < rows
        live = there[:, None] & inside[None, :]
        first = row.to(tl.int64)[:, None] * D
        h = tl.load(residual_ptr + first + cols[None, :], mask=live, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + first + cols[None, :], mask=live, other=0.0).to(tl.float32)
        if dresidual_ptr is not None:
            dresidual = tl.load(dresidual_ptr + first + cols[None, :], mask=live, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=there, other=0.0)[:, None]
        if mean_ptr is not None:
            h -= tl.load(mean_ptr + row, mask=there, other=0.0)[:, None]
        h *= rstd
        dweight += dout * h  # beyond the end dout is 0, and with it every product
        if dbias_ptr is not None:
            dbias += dout
        g = dout * weight
        dx = g - h * (tl.sum(g * h, 1, keep_dims=True) / D)
        if mean_ptr is not None:
            dx -= tl.sum(g, 1, keep_dims=True) / D
        dx *= rstd
        if dresidual_ptr is not None:
            dx += dresidual
        dx = tl.where(live, dx, 0.0)  # columns beyond the end would show the means to amax
        tl.store(dx_ptr + first + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=live)
        largest, saturated, flushed = _watch(
            dx, scale, largest, saturated, flushed, amax_ptr, counts_ptr, ROWS, BLOCK, LIMIT, TINY
        )
        if dx_lp_ptr is not None:
            low = dx.to(dx_lp_ptr.dtype.element_ty) if scale_ptr is None else to_fp8(dx * scale, LIMIT)
            tl.store(dx_lp_ptr + first + cols[None, :], low, mask=live)
    part = tl.program_id(0) * D + cols
    tl.store(dweight_ptr + part, tl.sum(dweight, 0), mask=inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + part, tl.sum(dbias, 0), mask=inside)
    _publish(largest, saturated, flushed, amax_ptr, counts_ptr)


@jit
def sum_kernel(partial_ptr, total_ptr, programs, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < programs)[:, None] & (cols < D)[None, :]
        total += tl.load(partial_ptr + row[:, None] * D + cols[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + cols, tl.sum(total, 0), mask=cols < D)
