"""GELU and SwiGLU, forward and backward, written in FP8 in both layouts or in 16 bits, in one pass.

    gelu             a  = u Phi(u)                        tanh variant: u sigmoid(s), s = 2 k (u + c u^3)
    gelu_backward    du = da (Phi(u) + u phi(u))          tanh variant: da (f + u f (1 - f) s'), f = sigmoid(s)
    swiglu           a  = g f u                           f = sigmoid(g), on a packed [gate, up]
    swiglu_backward  dg = da u f (1 + g (1 - f)),  du = da g f

with phi and Phi the normal density and its integral, k = sqrt(2/pi), c = 0.044715. Everything is computed in FP32 and
rounded once, to the output's format; scales, amax and counts are as in ``cast``.

Phi is not taken from erf, whose instructions would cost more than the bytes. Instead, for z >= 0,

    Phi(-z) = 2**Q(z),   Q of degree 7, fitted on [0, 6]: 5e-6 of relative error in FP32, a thousandth of a BF16 step

which keeps its relative accuracy in the tail, where 1 + erf cancels; beyond 6 (6e-9) Q goes on falling.

Bytes moved per element of BF16 input and FP8 output in both layouts: gelu 4, gelu_backward 6; per element of a: swiglu
6, swiglu_backward 10.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import FP8_MAX, HAVE_TRITON, direct, jit, jit_for_any, register, use_triton
from narrowgauge.kernels.cast import empty_words, programs, transpose_reference, transposed_copy
from narrowgauge.kernels.tile import FLUSHED, add_misfits, emit, load_rows, misfits, quantize_reference, tile_origin

if HAVE_TRITON:
    import triton.language as tl

# As measured on an H200 (bench/tune_kernels.py): these kernels compute as much as they move.
TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 4}
BACKWARD_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 32, "num_warps": 4}
GATED_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 8}
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
CUBIC = 0.044715
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)


def gelu(
    u: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    approximate: str = "none",
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """GELU of ``u`` [N, F]: [N, F], and for an FP8 ``dtype`` (which needs ``scale``) also [F, N] unless not wanted."""
    call = _pointwise if direct(u) else _pointwise_op
    return _pair(call(_named("gelu", approximate), u, None, scale, dtype, amax, counts, transposed))


def gelu_backward(
    da: Tensor,
    u: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    approximate: str = "none",
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The gradient at GELU's input ``u`` from ``da`` at its output, in the layouts of ``gelu``."""
    call = _pointwise if direct(da, u) else _pointwise_op
    return _pair(call(_named("gelu_backward", approximate), u, da, scale, dtype, amax, counts, transposed))


def swiglu(
    gate_up: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """silu(gate) * up of a packed [N, 2F], gate first: [N, F], and for an FP8 ``dtype`` also [F, N]."""
    gate, up = gate_up.chunk(2, dim=1)
    call = _pointwise if direct(gate_up) else _pointwise_op
    return _pair(call("swiglu", gate, up, scale, dtype, amax, counts, transposed))


def swiglu_backward(
    da: Tensor,
    gate_up: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The gradient at the packed ``gate_up`` [N, 2F] from ``da`` [N, F]: [N, 2F], and in FP8 also [2F, N]."""
    call = _swiglu_backward if direct(da, gate_up) else _swiglu_backward_op
    return _pair(call(da, gate_up, scale, dtype, amax, counts, transposed))


def pointwise_reference(op: str, a: Tensor, b: Tensor | None = None) -> Tensor:
    """The value of an op before its cast: a is u or gate; b is None, da or up. In FP32, or FP64 where that comes in."""
    a = a if a.dtype is torch.float64 else a.float()
    f = torch.sigmoid(a if op == "swiglu" else SLOPE * (a + CUBIC * a**3))
    cdf: Tensor = 0.5 * torch.special.erfc(-a * math.sqrt(0.5))  # not 1 + erf, which cancels in the tail
    if b is None:
        return a * (cdf if op == "gelu" else f)
    if op == "swiglu":
        return a * f * b
    if op == "gelu_backward":
        return b * (cdf + a * torch.exp(-0.5 * a**2) * DENSITY)
    return b * (f + a * f * (1 - f) * SLOPE * (1 + 3 * CUBIC * a**2))


def swiglu_backward_reference(da: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = (gate_up if gate_up.dtype is torch.float64 else gate_up.float()).chunk(2, dim=1)
    f = torch.sigmoid(gate)
    return torch.cat([da * up * f * (1 + gate * (1 - f)), da * gate * f], dim=1)


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
    a = a.to(tl.float32)
    if OP == "swiglu":
        return a * _sigmoid(a) * b.to(tl.float32)
    elif OP == "gelu":
        return a * _normal_integral(a)
    elif OP == "gelu_backward":
        density = 0.3989422804014327 * tl.exp2(a * a * -0.7213475204444817)
        return b.to(tl.float32) * (_normal_integral(a) + a * density)
    elif OP == "gelu_tanh":
        return a * _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))
    else:
        f = _sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a))
        return b.to(tl.float32) * (f + a * f * (1.0 - f) * (1.5957691216057308 * (1.0 + 0.134145 * a * a)))


@jit_for_any("length", "n16")
def _pointwise_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, out_ptr, out_t_ptr, scale_ptr, amax_ptr, counts_ptr, length, width, a_stride, b_stride, out_stride,
    n16, OP: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(width, BLOCK_N, BLOCK_D)
    a0 = load_rows(a_ptr, n0, d0, length, width, a_stride, BLOCK_N, BLOCK_D)
    a1 = load_rows(a_ptr, n0 + 1, d0, length, width, a_stride, BLOCK_N, BLOCK_D)
    a2 = load_rows(a_ptr, n0 + 2, d0, length, width, a_stride, BLOCK_N, BLOCK_D)
    a3 = load_rows(a_ptr, n0 + 3, d0, length, width, a_stride, BLOCK_N, BLOCK_D)
    b0, b1, b2, b3 = a0, a1, a2, a3
    if b_ptr is not None:
        b0 = load_rows(b_ptr, n0, d0, length, width, b_stride, BLOCK_N, BLOCK_D)
        b1 = load_rows(b_ptr, n0 + 1, d0, length, width, b_stride, BLOCK_N, BLOCK_D)
        b2 = load_rows(b_ptr, n0 + 2, d0, length, width, b_stride, BLOCK_N, BLOCK_D)
        b3 = load_rows(b_ptr, n0 + 3, d0, length, width, b_stride, BLOCK_N, BLOCK_D)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    again = emit(
        _value(a0, b0, OP), _value(a1, b1, OP), _value(a2, b2, OP), _value(a3, b3, OP), out_ptr, out_t_ptr, scale,
        amax_ptr, counts_ptr, n0, d0, length, width, out_stride, n16, LIMIT, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if again:
            both = 0
            for i in range(4):
                a = load_rows(a_ptr, n0 + i, d0, length, width, a_stride, BLOCK_N, BLOCK_D)
                b = a
                if b_ptr is not None:
                    b = load_rows(b_ptr, n0 + i, d0, length, width, b_stride, BLOCK_N, BLOCK_D)
                both += misfits(_value(a, b, OP) * scale, LIMIT, TINY)
            add_misfits(counts_ptr, both)


@jit
def _swiglu_gradients(da, gate, up):  # type: ignore[no-untyped-def]
    da = da.to(tl.float32)
    gate = gate.to(tl.float32)
    f = _sigmoid(gate)
    return da * up.to(tl.float32) * f * (1.0 + gate * (1.0 - f)), da * gate * f


@jit_for_any("length", "n16")
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    da_ptr, gate_ptr, up_ptr, dg_ptr, du_ptr, dg_t_ptr, du_t_ptr, scale_ptr, amax_ptr, counts_ptr,
    length, width, da_stride, stride, out_stride, n16,
    LIMIT: tl.constexpr, TINY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(width, BLOCK_N, BLOCK_D)
    gate0 = load_rows(gate_ptr, n0, d0, length, width, stride, BLOCK_N, BLOCK_D)
    gate1 = load_rows(gate_ptr, n0 + 1, d0, length, width, stride, BLOCK_N, BLOCK_D)
    gate2 = load_rows(gate_ptr, n0 + 2, d0, length, width, stride, BLOCK_N, BLOCK_D)
    gate3 = load_rows(gate_ptr, n0 + 3, d0, length, width, stride, BLOCK_N, BLOCK_D)
    up0 = load_rows(up_ptr, n0, d0, length, width, stride, BLOCK_N, BLOCK_D)
    up1 = load_rows(up_ptr, n0 + 1, d0, length, width, stride, BLOCK_N, BLOCK_D)
    up2 = load_rows(up_ptr, n0 + 2, d0, length, width, stride, BLOCK_N, BLOCK_D)
    up3 = load_rows(up_ptr, n0 + 3, d0, length, width, stride, BLOCK_N, BLOCK_D)
    da0 = load_rows(da_ptr, n0, d0, length, width, da_stride, BLOCK_N, BLOCK_D)
    da1 = load_rows(da_ptr, n0 + 1, d0, length, width, da_stride, BLOCK_N, BLOCK_D)
    da2 = load_rows(da_ptr, n0 + 2, d0, length, width, da_stride, BLOCK_N, BLOCK_D)
    da3 = load_rows(da_ptr, n0 + 3, d0, length, width, da_stride, BLOCK_N, BLOCK_D)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    dg0, du0 = _swiglu_gradients(da0, gate0, up0)
    dg1, du1 = _swiglu_gradients(da1, gate1, up1)
    dg2, du2 = _swiglu_gradients(da2, gate2, up2)
    dg3, du3 = _swiglu_gradients(da3, gate3, up3)
    gate_again = emit(
        dg0, dg1, dg2, dg3, dg_ptr, dg_t_ptr, scale, amax_ptr, counts_ptr,
        n0, d0, length, width, out_stride, n16, LIMIT, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    up_again = emit(
        du0, du1, du2, du3, du_ptr, du_t_ptr, scale, amax_ptr, counts_ptr,
        n0, d0, length, width, out_stride, n16, LIMIT, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if gate_again or up_again:
            both = 0
            for i in range(4):
                gate = load_rows(gate_ptr, n0 + i, d0, length, width, stride, BLOCK_N, BLOCK_D)
                up = load_rows(up_ptr, n0 + i, d0, length, width, stride, BLOCK_N, BLOCK_D)
                da = load_rows(da_ptr, n0 + i, d0, length, width, da_stride, BLOCK_N, BLOCK_D)
                dg, du = _swiglu_gradients(da, gate, up)
                both += misfits(dg * scale, LIMIT, TINY) if gate_again else 0
                both += misfits(du * scale, LIMIT, TINY) if up_again else 0
            add_misfits(counts_ptr, both)


def _named(op: str, approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise UsageError(f"{op}: approximate={approximate!r} is unknown; expected 'none' or 'tanh'")
    return op if approximate == "none" else f"{op}_tanh"


def _check(op: str, dtype: torch.dtype, scale: Tensor | None, a: Tensor, b: Tensor, ratio: int = 1) -> None:
    if (dtype in FP8_MAX) is (scale is None):
        raise UsageError(f"{op}: output in {dtype} {'needs a' if scale is None else 'takes no'} scale")
    if a.dim() != 2 or b.shape != (a.shape[0], ratio * a.shape[1]):
        raise UsageError(
            f"{op}: got tensors of shape {tuple(a.shape)} and {tuple(b.shape)}; expected two dimensions (flatten the "
            f"leading ones), as many rows, and {ratio} times the columns"
        )


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()  # an expanded gradient, say


def _output(
    length: int, width: int, like: Tensor, dtype: torch.dtype, transposed: bool
) -> tuple[Tensor, Tensor | None]:
    """Memory for the output and for its transposed copy in words."""
    out = torch.empty((length, width), dtype=dtype, device=like.device)
    return out, empty_words(out) if transposed and dtype in FP8_MAX else None


def _layouts(out: Tensor, words: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor]:
    """The output and its transposed copy, which is empty where none was asked for."""
    return out, transposed_copy(out, words) if transposed and out.dtype in FP8_MAX else out.new_empty(0)


def _settle(
    value: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """The reference's counterpart of ``emit``."""
    if scale is not None:
        out = quantize_reference(value, scale, dtype, amax, counts)
    else:
        out = value.to(dtype, copy=True)
        if amax is not None and value.numel():
            amax.copy_(torch.maximum(amax, value.abs().amax()))
    return out, transpose_reference(out) if transposed and dtype in FP8_MAX else out.new_empty(0)


def _pointwise(
    op: str,
    a: Tensor,
    b: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    _check(op, dtype, scale, a, a if b is None else b)
    if not use_triton(a):
        return _settle(pointwise_reference(op, a, b), scale, dtype, amax, counts, transposed)
    length, width = a.shape
    out, words = _output(length, width, a, dtype, transposed)
    if not out.numel():
        return _layouts(out, words, transposed)
    a = _rows(a)
    b = None if b is None else _rows(b)
    tile = TILE if b is None or op == "swiglu" else BACKWARD_TILE
    _pointwise_kernel[programs(length, width, tile)](
        a, b, out, words, scale, amax, counts, length, width, a.stride(0), 0 if b is None else b.stride(0),
        width, length // 16, OP=op, LIMIT=FP8_MAX.get(dtype), TINY=FLUSHED.get(dtype), **tile,
    )  # fmt: skip
    return _layouts(out, words, transposed)


def _swiglu_backward(
    da: Tensor,
    gate_up: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    _check("swiglu_backward", dtype, scale, da, gate_up, ratio=2)
    if not use_triton(gate_up):
        return _settle(swiglu_backward_reference(da, gate_up), scale, dtype, amax, counts, transposed)
    length, width = da.shape
    out, words = _output(length, 2 * width, da, dtype, transposed)
    if not out.numel():
        return _layouts(out, words, transposed)
    da = _rows(da)
    gate, up = _rows(gate_up).split(width, dim=1)
    dg, du = out.split(width, dim=1)
    dg_t, du_t = (None, None) if words is None else words.split(width)
    _swiglu_backward_kernel[programs(length, width, GATED_TILE)](
        da, gate, up, dg, du, dg_t, du_t, scale, amax, counts, length, width, da.stride(0), gate.stride(0),
        2 * width, length // 16, LIMIT=FP8_MAX.get(dtype), TINY=FLUSHED.get(dtype), **GATED_TILE,
    )  # fmt: skip
    return _layouts(out, words, transposed)


def _pair(layouts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """An op cannot return None: a missing transposed copy leaves it as an empty vector."""
    out, out_t = layouts
    return out, out_t if out_t.dim() == 2 else None


def _fake(like: Tensor, width: int | torch.SymInt, dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor]:
    out = like.new_empty((like.shape[0], width), dtype=dtype)
    if transposed and dtype in FP8_MAX:
        return out, out.new_empty((width, like.shape[0]))
    return out, out.new_empty(0)


_STATISTICS = ("amax", "counts")
_pointwise_op = register(
    "activation",
    _pointwise,
    lambda op, a, b, scale, dtype, amax, counts, transposed: _fake(a, a.shape[1], dtype, transposed),
    _STATISTICS,
)
_swiglu_backward_op = register(
    "swiglu_backward",
    _swiglu_backward,
    lambda da, gate_up, scale, dtype, amax, counts, transposed: _fake(gate_up, gate_up.shape[1], dtype, transposed),
    _STATISTICS,
)
