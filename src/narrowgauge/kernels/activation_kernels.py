"""The Triton kernels of GELU and SwiGLU; ``activation`` has their mathematics, references and launches.

A pointer that is None leaves out, when the kernel is compiled, all that belongs to it. ``again_t_ptr`` is where the
backward kernels write the forward's output once more, transposed and in E4M3, for the product that reads it: they have
all it takes, so it need not be kept from one to the other.
"""

from __future__ import annotations

from narrowgauge.kernels import HAVE_TRITON, jit, jit_for_any
from narrowgauge.kernels.fp8_tile import (
    add_misfits,
    emit,
    load_four,
    load_rows,
    misfits,
    pack_fp8,
    settle,
    store_words,
    tile_origin,
    under_way,
    unseen,
    widen,
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
def _value(a, b, OP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One output from u, from u and da, or from gate and up; the constants are the references', written out."""
    a = widen(a)
    if OP == "swiglu":
        return a * _sigmoid(a) * widen(b)
    elif OP == "gelu":
        return a * _normal_integral(a)
    elif OP == "gelu_backward":
        density = tl.exp2(a * a * -0.7213475204444817 - 1.3257480647361593)  # of 1 / sqrt(2 pi), the logarithm
        return widen(b) * (_normal_integral(a) + a * density)
    elif OP == "gelu_tanh":
        return a * _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))
    else:
        f = _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))
        return widen(b) * (f + a * f * (1.0 - f) * (1.5957691216057308 * (1.0 + 0.134145 * a * a)))


@jit_for_any("length", "n16")
def pointwise_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, out_ptr, out_t_ptr, scale_ptr, amax_ptr, counts_ptr, again_t_ptr, again_scale_ptr,
    length, width, a_stride, b_stride, out_stride, n16, OP: tl.constexpr,
    LIMIT: tl.constexpr, TINY: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    a0, a1, a2, a3 = load_four(a_ptr, n0, d0, length, width, a_stride, WHOLE, BLOCK_N, BLOCK_D)
    b0, b1, b2, b3 = a0, a1, a2, a3
    if b_ptr is not None:
        b0, b1, b2, b3 = load_four(b_ptr, n0, d0, length, width, b_stride, WHOLE, BLOCK_N, BLOCK_D)
    if again_t_ptr is not None:
        under_way()
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    if again_t_ptr is not None:
        forward: tl.constexpr = "gelu" if OP == "gelu_backward" else "gelu_tanh"
        by = tl.load(again_scale_ptr)
        words = pack_fp8(
            _value(a0, a0, forward) * by, _value(a1, a1, forward) * by,
            _value(a2, a2, forward) * by, _value(a3, a3, forward) * by, 448.0,
        )  # fmt: skip
        store_words(words, again_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = unseen(BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = emit(
        _value(a0, b0, OP), _value(a1, b1, OP), _value(a2, b2, OP), _value(a3, b3, OP), highest, lowest, nonzero,
        out_ptr, out_t_ptr, scale, amax_ptr, counts_ptr, n0, d0, length, width, out_stride, n16,
        LIMIT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    again = settle(highest, lowest, nonzero, BLOCK_N * BLOCK_D, scale, amax_ptr, counts_ptr, LIMIT)
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if again:
            both = 0
            for i in range(4):
                a = load_rows(a_ptr, n0 + i, d0, length, width, a_stride, WHOLE, BLOCK_N, BLOCK_D)
                b = a
                if b_ptr is not None:
                    b = load_rows(b_ptr, n0 + i, d0, length, width, b_stride, WHOLE, BLOCK_N, BLOCK_D)
                both += misfits(_value(a, b, OP) * scale, LIMIT, TINY)
            add_misfits(counts_ptr, both)


@jit
def _swiglu_gradients(da, gate, up):  # type: ignore[no-untyped-def]
    da = widen(da)
    gate = widen(gate)
    f = _sigmoid(gate)
    return da * widen(up) * f * (1.0 + gate * (1.0 - f)), da * gate * f


@jit_for_any("length", "n16")
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    da_ptr, gate_ptr, up_ptr, dg_ptr, du_ptr, dg_t_ptr, du_t_ptr, scale_ptr, amax_ptr, counts_ptr, again_t_ptr,
    again_scale_ptr, length, width, da_stride, stride, out_stride, n16,
    LIMIT: tl.constexpr, TINY: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    gate0, gate1, gate2, gate3 = load_four(gate_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    up0, up1, up2, up3 = load_four(up_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    da0, da1, da2, da3 = load_four(da_ptr, n0, d0, length, width, da_stride, WHOLE, BLOCK_N, BLOCK_D)
    under_way()
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    if again_t_ptr is not None:
        by = tl.load(again_scale_ptr)
        words = pack_fp8(
            _value(gate0, up0, "swiglu") * by, _value(gate1, up1, "swiglu") * by,
            _value(gate2, up2, "swiglu") * by, _value(gate3, up3, "swiglu") * by, 448.0,
        )  # fmt: skip
        store_words(words, again_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
    dg0, du0 = _swiglu_gradients(da0, gate0, up0)
    dg1, du1 = _swiglu_gradients(da1, gate1, up1)
    dg2, du2 = _swiglu_gradients(da2, gate2, up2)
    dg3, du3 = _swiglu_gradients(da3, gate3, up3)
    highest, lowest, nonzero = unseen(BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = emit(
        dg0, dg1, dg2, dg3, highest, lowest, nonzero, dg_ptr, dg_t_ptr, scale, amax_ptr, counts_ptr,
        n0, d0, length, width, out_stride, n16, LIMIT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    highest, lowest, nonzero = emit(
        du0, du1, du2, du3, highest, lowest, nonzero, du_ptr, du_t_ptr, scale, amax_ptr, counts_ptr,
        n0, d0, length, width, out_stride, n16, LIMIT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    again = settle(highest, lowest, nonzero, 2 * BLOCK_N * BLOCK_D, scale, amax_ptr, counts_ptr, LIMIT)
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if again:
            both = 0
            for i in range(4):
                gate = load_rows(gate_ptr, n0 + i, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
                up = load_rows(up_ptr, n0 + i, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
                da = load_rows(da_ptr, n0 + i, d0, length, width, da_stride, WHOLE, BLOCK_N, BLOCK_D)
                dg, du = _swiglu_gradients(da, gate, up)
                both += misfits(dg * scale, LIMIT, TINY) + misfits(du * scale, LIMIT, TINY)
            add_misfits(counts_ptr, both)
