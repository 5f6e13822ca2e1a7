"""The Triton kernels of LayerNorm and RMSNorm; ``norm`` has their mathematics, references and launches.

A program handles every P-th group of rows, where P is the number of programs. So each program issues one atomic for
amax and one for each nonzero count, and writes one partial sum of grad_weight, which ``sum_kernel`` adds up. A pointer
that is None removes its code when the kernel is compiled.

With ``normalized_ptr`` forward also writes the rows before weight and bias. With NORMALIZED backward reads these in
place of the residual stream, and with ``again_ptr`` it writes forward's output once more. IN_FP8 is forward's output in
FP8; else FORMAT and the scale are those of a later cast, of which forward records amax and counts.
"""

from __future__ import annotations

from narrowgauge.kernels import HAVE_TRITON, jit
from narrowgauge.kernels.fp8_formats import flush_threshold_of
from narrowgauge.kernels.fp8_tile import abs_bits, record_amax, saturates, to_fp8

if HAVE_TRITON:
    import triton.language as tl


@jit
def _update_stats(  # type: ignore[no-untyped-def]
    y, scale, largest, saturated, flushed, amax_ptr, counts_ptr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Update maxima and counts. A thread's four neighbours are reduced to one, to save registers."""
    if amax_ptr is not None:
        largest = tl.maximum(largest, tl.max(tl.max(tl.reshape(abs_bits(y), [ROWS, BLOCK // 4, 4]), 2), 0))
    if counts_ptr is not None:
        size = tl.abs(y * scale)
        too_large = saturates(size, FORMAT).to(tl.int32)
        too_small = ((size <= flush_threshold_of(FORMAT)) & (y != 0.0)).to(tl.int32)
        saturated += tl.sum(tl.sum(tl.reshape(too_large, [ROWS, BLOCK // 4, 4]), 2), 0)
        flushed += tl.sum(tl.sum(tl.reshape(too_small, [ROWS, BLOCK // 4, 4]), 2), 0)
    return largest, saturated, flushed


@jit
def _write_stats(largest, saturated, flushed, amax_ptr, counts_ptr):  # type: ignore[no-untyped-def]
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
    normalized_ptr, rows, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    FORMAT: tl.constexpr, IN_FP8: tl.constexpr,
):  # fmt: skip
    # With this hint Triton gives a thread 4 neighbours of every tensor (16 bytes of FP32, 4 of FP8; a warp covers whole
    # lines). Without it a thread gets 16 for the FP8 store, and the other tensors go through shared memory.
    cols = tl.multiple_of(tl.arange(0, BLOCK), 4)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
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
        y = r * rstd[:, None]
        if normalized_ptr is not None:
            tl.store(normalized_ptr + first + cols[None, :], y.to(normalized_ptr.dtype.element_ty), mask=live)
        y *= weight
        if bias_ptr is not None:  # loaded again for each row, from the L1 cache: it would take a thread 16 registers
            y += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = tl.where(live, y, 0.0)  # rows beyond the end would add the bias, or 0 * inf, to amax
        largest, saturated, flushed = _update_stats(
            y, scale, largest, saturated, flushed, amax_ptr, counts_ptr, ROWS, BLOCK, FORMAT
        )
        out = to_fp8(y * scale, FORMAT) if IN_FP8 else y.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + first + cols[None, :], out, mask=live)
    _write_stats(largest, saturated, flushed, amax_ptr, counts_ptr)


@jit
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_output_ptr, residual_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_residual_ptr, scale_ptr, grad_input_ptr,
    grad_input_lp_ptr, grad_weight_ptr,
    grad_bias_ptr, amax_ptr, counts_ptr, bias_ptr, again_ptr, again_scale_ptr,
    rows, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, FORMAT: tl.constexpr, LAYER: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    cols = tl.multiple_of(tl.arange(0, BLOCK), 4)  # as in the forward kernel
    inside = cols < D
    if grad_bias_ptr is None:
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    if again_ptr is not None:
        again_scale = tl.load(again_scale_ptr)
    grad_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    grad_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    largest = tl.zeros([BLOCK // 4], tl.int32)
    saturated = tl.zeros([BLOCK // 4], tl.int32)
    flushed = tl.zeros([BLOCK // 4], tl.int32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        there = row < rows
        live = there[:, None] & inside[None, :]
        first = row.to(tl.int64)[:, None] * D
        h = tl.load(residual_ptr + first + cols[None, :], mask=live, other=0.0).to(tl.float32)
        grad_output = tl.load(grad_output_ptr + first + cols[None, :], mask=live, other=0.0).to(tl.float32)
        if grad_residual_ptr is not None:
            grad_residual = tl.load(grad_residual_ptr + first + cols[None, :], mask=live, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=there, other=0.0)[:, None]
        if not NORMALIZED:
            if LAYER:
                h -= tl.load(mean_ptr + row, mask=there, other=0.0)[:, None]
            h *= rstd
        if grad_bias_ptr is not None:  # a thread's share of both sums and of the weight would take 48 registers
            weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        if again_ptr is not None:
            y = h * weight
            if bias_ptr is not None:
                y += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
            tl.store(again_ptr + first + cols[None, :], to_fp8(y * again_scale, "e4m3"), mask=live)
        grad_weight += grad_output * h  # grad_output is 0 beyond the end
        if grad_bias_ptr is not None:
            grad_bias += grad_output
        g = grad_output * weight
        grad_input = g - h * (tl.sum(g * h, 1, keep_dims=True) / D)
        if LAYER:
            grad_input -= tl.sum(g, 1, keep_dims=True) / D
        grad_input *= rstd
        if grad_residual_ptr is not None:
            grad_input += grad_residual
        grad_input = tl.where(live, grad_input, 0.0)  # columns beyond the end would add the means to amax
        tl.store(grad_input_ptr + first + cols[None, :], grad_input.to(grad_input_ptr.dtype.element_ty), mask=live)
        largest, saturated, flushed = _update_stats(
            grad_input, scale, largest, saturated, flushed, amax_ptr, counts_ptr, ROWS, BLOCK, FORMAT
        )
        if grad_input_lp_ptr is not None:
            low = (
                grad_input.to(grad_input_lp_ptr.dtype.element_ty)
                if scale_ptr is None
                else to_fp8(grad_input * scale, FORMAT)
            )
            tl.store(grad_input_lp_ptr + first + cols[None, :], low, mask=live)
    part = tl.program_id(0) * D + cols
    tl.store(grad_weight_ptr + part, tl.sum(grad_weight, 0), mask=inside)
    if grad_bias_ptr is not None:
        tl.store(grad_bias_ptr + part, tl.sum(grad_bias, 0), mask=inside)
    _write_stats(largest, saturated, flushed, amax_ptr, counts_ptr)


@jit
def sum_kernel(partial_ptr, total_ptr, programs, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < programs)[:, None] & (cols < D)[None, :]
        total += tl.load(partial_ptr + row[:, None] * D + cols[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + cols, tl.sum(total, 0), mask=cols < D)
