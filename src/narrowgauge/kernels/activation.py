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

Where ``forward_scale`` is given, the backward functions make the forward's output once more, transposed and in E4M3, so
that it need not be kept: the same bits, for one byte more to write.

Bytes moved per element of BF16 input and FP8 output in both layouts: gelu 4, gelu_backward 6; per element of a: swiglu
6, swiglu_backward 10.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import FP8_MAX, direct, register, use_triton
from narrowgauge.kernels.activation_kernels import pointwise_kernel, swiglu_backward_kernel
from narrowgauge.kernels.cast import empty_words, transpose_reference, transposed_copy
from narrowgauge.kernels.fp8_tile import FLUSHED, quantize_reference, tiles, whole

# As measured on an H200 (bench/tune_kernels.py): these kernels compute as much as they move.
TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
PAIR_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 4}
GATED_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 8}
AGAIN = torch.float8_e4m3fn
"""The format of forward's output where backward makes it once more."""
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
    return _given(call(_named("gelu", approximate), u, None, scale, dtype, amax, counts, transposed, None))[:2]


def gelu_backward(
    da: Tensor,
    u: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    approximate: str = "none",
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
    forward_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient at GELU's input ``u`` from ``da`` at its output, in the layouts of ``gelu``; and gelu(u) [F, N]."""
    call = _pointwise if direct(da, u) else _pointwise_op
    op = _named("gelu_backward", approximate)
    return _given(call(op, u, da, scale, dtype, amax, counts, transposed, forward_scale))


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
    return _given(call("swiglu", gate, up, scale, dtype, amax, counts, transposed, None))[:2]


def swiglu_backward(
    da: Tensor,
    gate_up: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
    forward_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient at ``gate_up`` [N, 2F] from ``da`` [N, F]: [N, 2F], in FP8 also [2F, N]; and swiglu [F, N]."""
    call = _swiglu_backward if direct(da, gate_up) else _swiglu_backward_op
    return _given(call(da, gate_up, scale, dtype, amax, counts, transposed, forward_scale))


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


def _layouts(
    out: Tensor, words: Tensor | None, transposed: bool, again: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, its transposed copy, and the forward's; an op cannot return None: what is missing is empty."""
    out_t = transposed_copy(out, words) if transposed and out.dtype in FP8_MAX else out.new_empty(0)
    return out, out_t, out.new_empty(0, dtype=AGAIN) if again is None else again.view(AGAIN)


def _forward_again(op: str, a: Tensor, b: Tensor | None, scale: Tensor) -> Tensor:
    """The forward's output transposed, in passes of its own, where there are no whole words."""
    return transpose_reference(_pointwise(op, a, b, scale, AGAIN, None, None, False, None)[0])


def _empty_again(length: int, width: int, like: Tensor, forward_scale: Tensor | None) -> Tensor | None:
    """Memory for the forward's output transposed, in words; None where it is not wanted or has no whole words."""
    if forward_scale is None or length % 16 or not length or not width:
        return None
    return torch.empty((width, length // 4), dtype=torch.int32, device=like.device)


def _settle(
    value: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    transposed: bool,
    forward: Tensor | None,
    forward_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's counterpart of ``emit``."""
    if scale is not None:
        out = quantize_reference(value, scale, dtype, amax, counts)
    else:
        out = value.to(dtype, copy=True)
        if amax is not None and value.numel():
            amax.copy_(torch.maximum(amax, value.abs().amax()))
    out_t = transpose_reference(out) if transposed and dtype in FP8_MAX else out.new_empty(0)
    if forward is None or forward_scale is None:
        return out, out_t, out.new_empty(0, dtype=AGAIN)
    return out, out_t, transpose_reference(quantize_reference(forward, forward_scale, AGAIN))


def _pointwise(
    op: str,
    a: Tensor,
    b: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    transposed: bool,
    forward_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(op, dtype, scale, a, a if b is None else b)
    if not use_triton(a):
        forward = None if forward_scale is None else pointwise_reference(op.replace("_backward", ""), a)
        value = pointwise_reference(op, a, b)
        return _settle(value, scale, dtype, amax, counts, transposed, forward, forward_scale)
    length, width = a.shape
    out, words = _output(length, width, a, dtype, transposed)
    again = _empty_again(length, width, a, forward_scale)
    if not out.numel():
        return _layouts(out, words, transposed, again)
    a = _rows(a)
    b = None if b is None else _rows(b)
    tile = TILE if b is None else PAIR_TILE
    pointwise_kernel[tiles(length, width, tile)](
        a, b, out, words, scale, amax, counts, again, forward_scale,
        length, width, a.stride(0), 0 if b is None else b.stride(0), width, length // 16,
        OP=op, LIMIT=FP8_MAX.get(dtype), TINY=FLUSHED.get(dtype), WHOLE=whole(length, width, tile), **tile,
    )  # fmt: skip
    if forward_scale is not None and again is None:
        again = _forward_again(op.replace("_backward", ""), a, None, forward_scale)
    return _layouts(out, words, transposed, again)


def _swiglu_backward(
    da: Tensor,
    gate_up: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    transposed: bool,
    forward_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check("swiglu_backward", dtype, scale, da, gate_up, ratio=2)
    if not use_triton(gate_up):
        forward = None if forward_scale is None else pointwise_reference("swiglu", *gate_up.chunk(2, dim=1))
        value = swiglu_backward_reference(da, gate_up)
        return _settle(value, scale, dtype, amax, counts, transposed, forward, forward_scale)
    length, width = da.shape
    out, words = _output(length, 2 * width, da, dtype, transposed)
    again = _empty_again(length, width, da, forward_scale)
    if not out.numel():
        return _layouts(out, words, transposed, again)
    da = _rows(da)
    gate, up = _rows(gate_up).split(width, dim=1)
    dg, du = out.split(width, dim=1)
    dg_t, du_t = (None, None) if words is None else words.split(width)
    swiglu_backward_kernel[tiles(length, width, GATED_TILE)](
        da, gate, up, dg, du, dg_t, du_t, scale, amax, counts, again, forward_scale,
        length, width, da.stride(0), gate.stride(0), 2 * width, length // 16,
        LIMIT=FP8_MAX.get(dtype), TINY=FLUSHED.get(dtype), WHOLE=whole(length, width, GATED_TILE), **GATED_TILE,
    )  # fmt: skip
    if forward_scale is not None and again is None:
        again = _forward_again("swiglu", gate, up, forward_scale)
    return _layouts(out, words, transposed, again)


def _given(made: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """None for what is missing."""
    out, out_t, again = made
    return out, out_t if out_t.dim() == 2 else None, again if again.dim() == 2 else None


def _fake(
    like: Tensor, width: int | torch.SymInt, dtype: torch.dtype, transposed: bool, again: int | torch.SymInt | None
) -> tuple[Tensor, Tensor, Tensor]:
    length = like.shape[0]
    out = like.new_empty((length, width), dtype=dtype)
    out_t = out.new_empty((width, length) if transposed and dtype in FP8_MAX else (0,))
    return out, out_t, out.new_empty((again, length) if again is not None else (0,), dtype=AGAIN)


_STATISTICS = ("amax", "counts")
_pointwise_op = register(
    "activation",
    _pointwise,
    lambda op, a, b, scale, dtype, amax, counts, transposed, forward_scale: _fake(
        a, a.shape[1], dtype, transposed, None if forward_scale is None else a.shape[1]
    ),
    _STATISTICS,
)
_swiglu_backward_op = register(
    "swiglu_backward",
    _swiglu_backward,
    lambda da, gate_up, scale, dtype, amax, counts, transposed, forward_scale: _fake(
        gate_up, gate_up.shape[1], dtype, transposed, None if forward_scale is None else da.shape[1]
    ),
    _STATISTICS,
)
