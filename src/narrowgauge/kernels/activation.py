"""GELU and SwiGLU, forward and backward, in one pass; the output is FP8 in both layouts, or 16-bit.

    gelu             a = u Phi(u)                            tanh variant: u sigmoid(s), s = 2 k (u + c u^3)
    gelu_backward    grad_u = grad_a (Phi(u) + u phi(u))     tanh variant: grad_a (f + u f (1 - f) s'), f = sigmoid(s)
    swiglu           a = g f u                               f = sigmoid(g), on a packed [gate, up]
    swiglu_backward  grad_g = grad_a u f (1 + g (1 - f)),  grad_u = grad_a g f

phi and Phi are the normal density and its integral, k = sqrt(2/pi), c = 0.044715. Everything is computed in FP32 and
rounded once, to the output's format. Scales, amax and counts work as in ``cast``.

The instructions of erf would cost more than the memory traffic, so Phi is computed without it. For z >= 0,

    Phi(-z) = 2**Q(z),   Q of degree 7, fitted on [0, 6]: 5e-6 relative error in FP32, a thousandth of a BF16 step

This keeps its relative accuracy in the tail, where 1 + erf cancels. Beyond 6 (Phi = 6e-9) Q keeps falling.

With ``forward_scale``, the backward functions also recompute the forward output, transposed and in E4M3. It then does
not have to be saved: the bits are the same, and backward writes one more byte per element.

Bytes moved per element of BF16 input and FP8 output in both layouts: gelu 4, gelu_backward 6; per element of a: swiglu
6, swiglu_backward 10.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import FP8_MAX, can_bypass_op, register, use_triton
from narrowgauge.kernels.activation_kernels import pointwise_kernel, swiglu_backward_kernel
from narrowgauge.kernels.cast import allocate_words, finish_transposed, transpose_reference
from narrowgauge.kernels.fp8_tile import FLUSH_THRESHOLD, quantize_reference, tile_grid, tiles_evenly
from narrowgauge.kernels.launch import launch_kernel

# The fastest on an H200 (bench/tune_kernels.py). These kernels are bound by compute as much as by memory.
TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
PAIR_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 4}
GATED_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 8}
RECOMPUTED_DTYPE = torch.float8_e4m3fn
"""The format of the forward output when backward recomputes it."""
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
    """Return GELU of ``u`` [N, F] as [N, F]; an FP8 ``dtype`` needs ``scale``, and adds [F, N] if ``transposed``."""
    call = _pointwise if can_bypass_op(u) else _pointwise_op
    return _drop_missing(call(_name_op("gelu", approximate), u, None, scale, dtype, amax, counts, transposed, None))[:2]


def gelu_backward(
    grad_output: Tensor,
    u: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    approximate: str = "none",
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
    forward_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient of ``u`` in the layouts of ``gelu``; with ``forward_scale`` also gelu(u) as [F, N]."""
    call = _pointwise if can_bypass_op(grad_output, u) else _pointwise_op
    op = _name_op("gelu_backward", approximate)
    return _drop_missing(call(op, u, grad_output, scale, dtype, amax, counts, transposed, forward_scale))


def swiglu(
    gate_up: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return silu(gate) * up of a packed [N, 2F], gate first, as [N, F]; for an FP8 ``dtype`` also as [F, N]."""
    gate, up = gate_up.chunk(2, dim=1)
    call = _pointwise if can_bypass_op(gate_up) else _pointwise_op
    return _drop_missing(call("swiglu", gate, up, scale, dtype, amax, counts, transposed, None))[:2]


def swiglu_backward(
    grad_output: Tensor,
    gate_up: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
    forward_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient of ``gate_up`` as [N, 2F], in FP8 also as [2F, N]; with ``forward_scale`` swiglu [F, N]."""
    call = _swiglu_backward if can_bypass_op(grad_output, gate_up) else _swiglu_backward_op
    return _drop_missing(call(grad_output, gate_up, scale, dtype, amax, counts, transposed, forward_scale))


def pointwise_reference(op: str, a: Tensor, b: Tensor | None = None) -> Tensor:
    """Return an op's value before the cast, in FP32 (FP64 for FP64 input). a: u or gate; b: None, grad_output or up."""
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


def swiglu_backward_reference(grad_output: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = (gate_up if gate_up.dtype is torch.float64 else gate_up.float()).chunk(2, dim=1)
    f = torch.sigmoid(gate)
    return torch.cat([grad_output * up * f * (1 + gate * (1 - f)), grad_output * gate * f], dim=1)


def _name_op(op: str, approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise UsageError(f"{op}: approximate={approximate!r} is unknown; expected 'none' or 'tanh'")
    return op if approximate == "none" else f"{op}_tanh"


def _check(op: str, dtype: torch.dtype, scale: Tensor | None, a: Tensor, b: Tensor, ratio: int = 1) -> None:
    if (dtype in FP8_MAX) is (scale is None):
        raise UsageError(f"{op}: output in {dtype} {'needs a' if scale is None else 'takes no'} scale")
    if a.dim() != 2 or b.shape != (a.shape[0], ratio * a.shape[1]):
        raise UsageError(
            f"{op}: got tensors of shape {tuple(a.shape)} and {tuple(b.shape)}; expected two dimensions each (flatten "
            f"the leading ones), the same number of rows, and {ratio} times the columns"
        )


def _make_rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()  # an expanded gradient, for example


def _allocate_output(
    length: int, width: int, like: Tensor, dtype: torch.dtype, transposed: bool
) -> tuple[Tensor, Tensor | None]:
    """Allocate the output, and its transposed copy as 32-bit words."""
    out = torch.empty((length, width), dtype=dtype, device=like.device)
    return out, allocate_words(out) if transposed and dtype in FP8_MAX else None


def _collect_outputs(
    out: Tensor, words: Tensor | None, transposed: bool, recomputed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, transposed copy and recomputed forward; a missing one is empty, as an op cannot return None."""
    out_t = finish_transposed(out, words) if transposed and out.dtype in FP8_MAX else out.new_empty(0)
    return (
        out,
        out_t,
        out.new_empty(0, dtype=RECOMPUTED_DTYPE) if recomputed is None else recomputed.view(RECOMPUTED_DTYPE),
    )


def _recompute_forward(op: str, a: Tensor, b: Tensor | None, scale: Tensor) -> Tensor:
    """Recompute the transposed forward output in separate passes, for a length that is not a multiple of 16."""
    return transpose_reference(_pointwise(op, a, b, scale, RECOMPUTED_DTYPE, None, None, False, None)[0])


def _allocate_recomputed(length: int, width: int, like: Tensor, forward_scale: Tensor | None) -> Tensor | None:
    """Allocate the transposed forward output as words; None if not requested or length % 16 is not 0."""
    if forward_scale is None or length % 16 or not length or not width:
        return None
    return torch.empty((width, length // 4), dtype=torch.int32, device=like.device)


def _store_reference(
    value: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    transposed: bool,
    forward: Tensor | None,
    forward_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Store a value as ``store_tiles`` does, in plain torch."""
    if scale is not None:
        out = quantize_reference(value, scale, dtype, amax, counts)
    else:
        out = value.to(dtype, copy=True)
        if amax is not None and value.numel():
            amax.copy_(torch.maximum(amax, value.abs().amax()))
    out_t = transpose_reference(out) if transposed and dtype in FP8_MAX else out.new_empty(0)
    if forward is None or forward_scale is None:
        return out, out_t, out.new_empty(0, dtype=RECOMPUTED_DTYPE)
    return out, out_t, transpose_reference(quantize_reference(forward, forward_scale, RECOMPUTED_DTYPE))


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
        return _store_reference(value, scale, dtype, amax, counts, transposed, forward, forward_scale)
    length, width = a.shape
    out, words = _allocate_output(length, width, a, dtype, transposed)
    recomputed = _allocate_recomputed(length, width, a, forward_scale)
    if not out.numel():
        return _collect_outputs(out, words, transposed, recomputed)
    a = _make_rows_contiguous(a)
    b = None if b is None else _make_rows_contiguous(b)
    tile = TILE if b is None else PAIR_TILE
    launch_kernel(
        pointwise_kernel, tile_grid(length, width, tile),
        a, b, out, words, scale, amax, counts, recomputed, forward_scale,
        length, width, a.stride(0), 0 if b is None else b.stride(0), width, length // 16,
        OP=op, LIMIT=FP8_MAX.get(dtype), TINY=FLUSH_THRESHOLD.get(dtype), WHOLE=tiles_evenly(length, width, tile),
        **tile,
    )  # fmt: skip
    if forward_scale is not None and recomputed is None:
        recomputed = _recompute_forward(op.replace("_backward", ""), a, None, forward_scale)
    return _collect_outputs(out, words, transposed, recomputed)


def _swiglu_backward(
    grad_output: Tensor,
    gate_up: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    transposed: bool,
    forward_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check("swiglu_backward", dtype, scale, grad_output, gate_up, ratio=2)
    if not use_triton(gate_up):
        forward = None if forward_scale is None else pointwise_reference("swiglu", *gate_up.chunk(2, dim=1))
        value = swiglu_backward_reference(grad_output, gate_up)
        return _store_reference(value, scale, dtype, amax, counts, transposed, forward, forward_scale)
    length, width = grad_output.shape
    out, words = _allocate_output(length, 2 * width, grad_output, dtype, transposed)
    recomputed = _allocate_recomputed(length, width, grad_output, forward_scale)
    if not out.numel():
        return _collect_outputs(out, words, transposed, recomputed)
    grad_output = _make_rows_contiguous(grad_output)
    gate, up = _make_rows_contiguous(gate_up).split(width, dim=1)
    grad_gate, grad_up = out.split(width, dim=1)
    grad_gate_t, grad_up_t = (None, None) if words is None else words.split(width)
    launch_kernel(
        swiglu_backward_kernel, tile_grid(length, width, GATED_TILE),
        grad_output, gate, up, grad_gate, grad_up, grad_gate_t, grad_up_t, scale, amax, counts, recomputed,
        forward_scale,
        length, width, grad_output.stride(0), gate.stride(0), 2 * width, length // 16,
        LIMIT=FP8_MAX.get(dtype), TINY=FLUSH_THRESHOLD.get(dtype), WHOLE=tiles_evenly(length, width, GATED_TILE),
        **GATED_TILE,
    )  # fmt: skip
    if forward_scale is not None and recomputed is None:
        recomputed = _recompute_forward("swiglu", gate, up, forward_scale)
    return _collect_outputs(out, words, transposed, recomputed)


def _drop_missing(made: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Replace empty tensors by None."""
    out, out_t, recomputed = made
    return out, out_t if out_t.dim() == 2 else None, recomputed if recomputed.dim() == 2 else None


def _make_fake(
    like: Tensor, width: int | torch.SymInt, dtype: torch.dtype, transposed: bool, recomputed: int | torch.SymInt | None
) -> tuple[Tensor, Tensor, Tensor]:
    length = like.shape[0]
    out = like.new_empty((length, width), dtype=dtype)
    out_t = out.new_empty((width, length) if transposed and dtype in FP8_MAX else (0,))
    return out, out_t, out.new_empty((recomputed, length) if recomputed is not None else (0,), dtype=RECOMPUTED_DTYPE)


_STATISTICS = ("amax", "counts")
_pointwise_op = register(
    "activation",
    _pointwise,
    lambda op, a, b, scale, dtype, amax, counts, transposed, forward_scale: _make_fake(
        a, a.shape[1], dtype, transposed, None if forward_scale is None else a.shape[1]
    ),
    _STATISTICS,
)
_swiglu_backward_op = register(
    "swiglu_backward",
    _swiglu_backward,
    lambda grad_output, gate_up, scale, dtype, amax, counts, transposed, forward_scale: _make_fake(
        gate_up, gate_up.shape[1], dtype, transposed, None if forward_scale is None else grad_output.shape[1]
    ),
    _STATISTICS,
)
