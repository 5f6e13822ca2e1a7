"""The Triton kernels of activations; ``activation`` has their mathematics, references and launches.

OP names a function of u (gelu), its gradient (gelu_backward), or a function of gate and up (swiglu); FORWARD is the
function that backward recomputes. A pointer that is None removes its code when the kernel is compiled. The backward
kernels recompute the forward output into ``recomputed_t_ptr``, transposed and in E4M3, for the product that reads it.
They already load what this needs, so the output does not have to be saved in forward.

With ``a_codes_ptr`` the forward kernel also writes its inputs in 8 bits (``blocks_8bit``). With ``a_scales_ptr`` the
backward kernels read them: the inputs are codes then.
"""

from __future__ import annotations

from narrowgauge.kernels import HAVE_TRITON, jit, jit_unspecialized
from narrowgauge.kernels.blocks_8bit import (
    decode_codes,
    load_code_rows,
    load_four_codes,
    load_scales,
    store_codes,
)
from narrowgauge.kernels.fp8_tile import (
    add_misfit_counts,
    count_misfits,
    finish_tile_stats,
    init_tile_stats,
    issue_loads,
    load_four,
    load_rows,
    pack_fp8,
    store_tiles,
    store_words,
    tile_origin,
    to_fp32,
)

if HAVE_TRITON:
    import triton.language as tl


@jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@jit
def _normal_integral(u):  # type: ignore[no-untyped-def]
    z = tl.abs(u)
    q = -1.8348099501963588e-06 * z + 6.15982644376345e-05
    q = q * z - 0.0009305245475843549
    q = q * z + 0.008507889695465565
    q = q * z - 0.05396006628870964
    q = q * z - 0.45846439370879444
    q = q * z - 1.1512510776519775
    q = q * z - 0.9999952912330627
    tail = tl.exp2(q)
    return tl.where(u > 0.0, 1.0 - tail, tail)


@jit
def compute_value(a, b, OP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute one output from u, from u and grad_output, or from gate and up; same constants as the references.

    GELU and SwiGLU stay as they were tuned: written like the others below, they would be scheduled differently.
    """
    a = to_fp32(a)
    if OP == "swiglu":
        return a * _sigmoid(a) * to_fp32(b)
    elif OP == "gelu":
        return a * _normal_integral(a)
    elif OP == "gelu_backward":
        density = tl.exp2(a * a * -0.7213475204444817 - 1.3257480647361593)  # log2(1 / sqrt(2 pi))
        return to_fp32(b) * (_normal_integral(a) + a * density)
    elif OP == "gelu_tanh":
        return a * _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))
    elif OP == "gelu_tanh_backward":
        f = _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))
        return to_fp32(b) * (f + a * f * (1.0 - f) * (1.5957691216057308 * (1.0 + 0.134145 * a * a)))
    elif OP == "geglu":
        return _function(a, "gelu") * to_fp32(b)
    elif OP == "geglu_tanh":
        return _function(a, "gelu_tanh") * to_fp32(b)
    elif OP == "reglu":
        return _function(a, "relu") * to_fp32(b)
    elif OP == "silu_backward":
        return to_fp32(b) * _slope(a, "silu")
    elif OP == "gelu_quick_backward":
        return to_fp32(b) * _slope(a, "gelu_quick")
    elif OP == "relu_backward":
        return to_fp32(b) * _slope(a, "relu")
    elif OP == "relu_squared_backward":
        return to_fp32(b) * _slope(a, "relu_squared")
    else:
        return _function(a, OP)


@jit
def _function(a, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    if NAME == "gelu":
        return a * _normal_integral(a)
    elif NAME == "gelu_tanh":
        return a * _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))
    elif NAME == "gelu_quick":
        return a * _sigmoid(1.702 * a)
    elif NAME == "silu":
        return a * _sigmoid(a)
    else:
        tl.static_assert(NAME == "relu" or NAME == "relu_squared")
        positive = tl.where(a < 0.0, 0.0, a)  # keeps NaN, unlike a maximum
        return positive * positive if NAME == "relu_squared" else positive


@jit
def _slope(a, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    if NAME == "gelu":
        return _normal_integral(a) + a * tl.exp2(a * a * -0.7213475204444817 - 1.3257480647361593)
    elif NAME == "gelu_tanh":
        f = _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))
        return f + a * f * (1.0 - f) * (1.5957691216057308 * (1.0 + 0.134145 * a * a))
    elif NAME == "gelu_quick":
        f = _sigmoid(1.702 * a)
        return f * (1.0 + 1.702 * a * (1.0 - f))
    elif NAME == "silu":
        f = _sigmoid(a)
        return f * (1.0 + a * (1.0 - f))
    elif NAME == "relu":
        return tl.where(a <= 0.0, 0.0, 1.0)
    else:
        tl.static_assert(NAME == "relu_squared")
        return tl.where(a <= 0.0, 0.0, 2.0 * a)


@jit
def _decode_four(x0, x1, x2, x3, scales):  # type: ignore[no-untyped-def]
    """Return the four tiles of ``load_four_codes`` in FP32."""
    return decode_codes(x0, scales), decode_codes(x1, scales), decode_codes(x2, scales), decode_codes(x3, scales)


@jit
def _decode_rows(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, i, n0, d0, length, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return one of the four tiles of ``load_four`` in FP32, from codes."""
    codes = load_code_rows(codes_ptr, n0 + i, d0, length, WHOLE, BLOCK_N)
    return decode_codes(codes, load_scales(scales_ptr, n0, d0, length, WHOLE, BLOCK_N))


@jit_unspecialized("length", "n16")
def pointwise_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, out_ptr, out_t_ptr, scale_ptr, amax_ptr, counts_ptr, recomputed_t_ptr, recomputed_scale_ptr,
    a_scales_ptr, a_codes_ptr, a_codes_scales_ptr, b_codes_ptr, b_codes_scales_ptr,
    length, width, a_stride, b_stride, out_stride, n16, OP: tl.constexpr, FORWARD: tl.constexpr,
    FORMAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    if a_scales_ptr is None:
        a0, a1, a2, a3 = load_four(a_ptr, n0, d0, length, width, a_stride, WHOLE, BLOCK_N, BLOCK_D)
    else:
        a0, a1, a2, a3 = load_four_codes(a_ptr, n0, d0, length, WHOLE, BLOCK_N)
    b0, b1, b2, b3 = a0, a1, a2, a3
    if b_ptr is not None:
        b0, b1, b2, b3 = load_four(b_ptr, n0, d0, length, width, b_stride, WHOLE, BLOCK_N, BLOCK_D)
    if a_scales_ptr is not None:
        scales = load_scales(a_scales_ptr, n0, d0, length, WHOLE, BLOCK_N)
    if recomputed_t_ptr is not None:
        issue_loads()
    if a_scales_ptr is not None:
        a0, a1, a2, a3 = _decode_four(a0, a1, a2, a3, scales)
    if a_codes_ptr is not None:
        store_codes(a0, a1, a2, a3, a_codes_ptr, a_codes_scales_ptr, n0, d0, length, WHOLE, BLOCK_N, BLOCK_D)
        if b_codes_ptr is not None:
            store_codes(b0, b1, b2, b3, b_codes_ptr, b_codes_scales_ptr, n0, d0, length, WHOLE, BLOCK_N, BLOCK_D)
            b0, b1, b2, b3 = load_four(b_ptr, n0, d0, length, width, b_stride, WHOLE, BLOCK_N, BLOCK_D)
        # Loaded again, from the L1 cache: kept until here as FP32 numbers, the inputs take 128 registers instead of 72.
        a0, a1, a2, a3 = load_four(a_ptr, n0, d0, length, width, a_stride, WHOLE, BLOCK_N, BLOCK_D)
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    if recomputed_t_ptr is not None:
        forward_scale = tl.load(recomputed_scale_ptr)
        words = pack_fp8(
            compute_value(a0, a0, FORWARD) * forward_scale, compute_value(a1, a1, FORWARD) * forward_scale,
            compute_value(a2, a2, FORWARD) * forward_scale, compute_value(a3, a3, FORWARD) * forward_scale, "e4m3",
        )  # fmt: skip
        store_words(words, recomputed_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = init_tile_stats(BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = store_tiles(
        compute_value(a0, b0, OP), compute_value(a1, b1, OP), compute_value(a2, b2, OP), compute_value(a3, b3, OP),
        highest, lowest, nonzero,
        out_ptr, out_t_ptr, scale, amax_ptr, counts_ptr, n0, d0, length, width, out_stride, n16,
        FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    recount = finish_tile_stats(highest, lowest, nonzero, BLOCK_N * BLOCK_D, scale, amax_ptr, counts_ptr, FORMAT)
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if recount:
            counted = 0
            for i in range(4):
                if a_scales_ptr is None:
                    a = load_rows(a_ptr, n0 + i, d0, length, width, a_stride, WHOLE, BLOCK_N, BLOCK_D)
                else:
                    a = _decode_rows(a_ptr, a_scales_ptr, i, n0, d0, length, WHOLE, BLOCK_N)
                b = a
                if b_ptr is not None:
                    b = load_rows(b_ptr, n0 + i, d0, length, width, b_stride, WHOLE, BLOCK_N, BLOCK_D)
                counted += count_misfits(compute_value(a, b, OP) * scale, FORMAT)
            add_misfit_counts(counts_ptr, counted)


@jit
def compute_gated_gradients(grad_output, gate, up, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the gradients of gate and up; NAME is the function of the gate."""
    grad_output = to_fp32(grad_output)
    gate = to_fp32(gate)
    if NAME == "silu":
        f = _sigmoid(gate)
        return grad_output * to_fp32(up) * f * (1.0 + gate * (1.0 - f)), grad_output * gate * f
    else:
        return grad_output * to_fp32(up) * _slope(gate, NAME), grad_output * _function(gate, NAME)


@jit_unspecialized("length", "n16")
def gated_backward_kernel(  # type: ignore[no-untyped-def]
    grad_output_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, grad_gate_t_ptr, grad_up_t_ptr, scale_ptr,
    amax_ptr, counts_ptr, recomputed_t_ptr,
    recomputed_scale_ptr, gate_scales_ptr, up_scales_ptr,
    length, width, grad_stride, stride, out_stride, n16, NAME: tl.constexpr,
    FORWARD: tl.constexpr, FORMAT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    if gate_scales_ptr is None:
        gate0, gate1, gate2, gate3 = load_four(gate_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
        up0, up1, up2, up3 = load_four(up_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    else:
        gate0, gate1, gate2, gate3 = load_four_codes(gate_ptr, n0, d0, length, WHOLE, BLOCK_N)
        up0, up1, up2, up3 = load_four_codes(up_ptr, n0, d0, length, WHOLE, BLOCK_N)
    grad0, grad1, grad2, grad3 = load_four(grad_output_ptr, n0, d0, length, width, grad_stride, WHOLE, BLOCK_N, BLOCK_D)
    if gate_scales_ptr is not None:
        gate_scales = load_scales(gate_scales_ptr, n0, d0, length, WHOLE, BLOCK_N)
        up_scales = load_scales(up_scales_ptr, n0, d0, length, WHOLE, BLOCK_N)
    issue_loads()
    if gate_scales_ptr is not None:
        gate0, gate1, gate2, gate3 = _decode_four(gate0, gate1, gate2, gate3, gate_scales)
        up0, up1, up2, up3 = _decode_four(up0, up1, up2, up3, up_scales)
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    if recomputed_t_ptr is not None:
        forward_scale = tl.load(recomputed_scale_ptr)
        words = pack_fp8(
            compute_value(gate0, up0, FORWARD) * forward_scale, compute_value(gate1, up1, FORWARD) * forward_scale,
            compute_value(gate2, up2, FORWARD) * forward_scale, compute_value(gate3, up3, FORWARD) * forward_scale,
            "e4m3",
        )  # fmt: skip
        store_words(words, recomputed_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
    grad_gate0, grad_up0 = compute_gated_gradients(grad0, gate0, up0, NAME)
    grad_gate1, grad_up1 = compute_gated_gradients(grad1, gate1, up1, NAME)
    grad_gate2, grad_up2 = compute_gated_gradients(grad2, gate2, up2, NAME)
    grad_gate3, grad_up3 = compute_gated_gradients(grad3, gate3, up3, NAME)
    highest, lowest, nonzero = init_tile_stats(BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = store_tiles(
        grad_gate0, grad_gate1, grad_gate2, grad_gate3, highest, lowest, nonzero, grad_gate_ptr, grad_gate_t_ptr,
        scale, amax_ptr, counts_ptr,
        n0, d0, length, width, out_stride, n16, FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    highest, lowest, nonzero = store_tiles(
        grad_up0, grad_up1, grad_up2, grad_up3, highest, lowest, nonzero, grad_up_ptr, grad_up_t_ptr, scale, amax_ptr,
        counts_ptr,
        n0, d0, length, width, out_stride, n16, FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    recount = finish_tile_stats(highest, lowest, nonzero, 2 * BLOCK_N * BLOCK_D, scale, amax_ptr, counts_ptr, FORMAT)
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if recount:
            counted = 0
            for i in range(4):
                if gate_scales_ptr is None:
                    gate = load_rows(gate_ptr, n0 + i, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
                    up = load_rows(up_ptr, n0 + i, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
                else:
                    gate = _decode_rows(gate_ptr, gate_scales_ptr, i, n0, d0, length, WHOLE, BLOCK_N)
                    up = _decode_rows(up_ptr, up_scales_ptr, i, n0, d0, length, WHOLE, BLOCK_N)
                grad_output = load_rows(
                    grad_output_ptr, n0 + i, d0, length, width, grad_stride, WHOLE, BLOCK_N, BLOCK_D
                )
                grad_gate, grad_up = compute_gated_gradients(grad_output, gate, up, NAME)
                counted += count_misfits(grad_gate * scale, FORMAT) + count_misfits(grad_up * scale, FORMAT)
            add_misfit_counts(counts_ptr, counted)
