"""Activations, forward and backward, in one pass; the output is FP8 in both layouts, or 16-bit.

    plain     a = f(u)          grad_u = grad_a f'(u)
    gated     a = f(g) u        grad_g = grad_a u f'(g),  grad_u = grad_a f(g)        on a packed [gate, up]

    f             gated         f(x)                                       f'(x)
    gelu          geglu         x Phi(x)                                   Phi(x) + x phi(x)
    gelu-tanh     geglu-tanh    x s,  s = sigmoid(2 k (x + c x^3))         s + x s (1 - s) 2 k (1 + 3 c x^2)
    gelu-quick                  x s,  s = sigmoid(1.702 x)                 s (1 + 1.702 x (1 - s))
    silu          swiglu        x s,  s = sigmoid(x)                       s (1 + x (1 - s))
    relu          reglu         max(x, 0)                                  [x > 0]
    relu-squared                max(x, 0)^2                                2 max(x, 0)

phi and Phi are the normal density and its integral, k = sqrt(2/pi), c = 0.044715. Everything is computed in FP32 and
rounded once, to the output's format. Scales, amax and counts work as in ``cast``.

The instructions of erf would cost more than the memory traffic, so Phi is computed without it. For z >= 0,

    Phi(-z) = 2**Q(z),   Q of degree 7, fitted on [0, 6]: 5e-6 relative error in FP32, a thousandth of a BF16 step

This keeps its relative accuracy in the tail, where 1 + erf cancels. Beyond 6 (Phi = 6e-9) Q keeps falling.

With ``forward_scale``, the backward functions also recompute the forward output, transposed and in E4M3. It then does
not have to be saved: the bits are the same, and backward writes one more byte per element.

Instead of u, backward can read it in 8 bits (``blocks_8bit``), as ``activate_and_keep`` writes it: half the memory
between forward and backward. Forward then writes one more byte per element of u, and backward reads one less.

Bytes moved per element of BF16 input and FP8 output in both layouts: plain 4, backward 6; per element of a: gated 6,
backward 10. ReLU's exact zeros make the kernels count flushed values one by one (``finish_tile_stats``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import blocks_8bit, can_bypass_op, register, use_triton
from narrowgauge.kernels.activation_kernels import gated_backward_kernel, pointwise_kernel
from narrowgauge.kernels.activation_reference import (
    GATES,
    activate_backward_reference,
    activate_reference,
    evaluate_reference,
    split_gate,
    widen,
)
from narrowgauge.kernels.blocks_8bit import Blocks8, decode_reference, encode_reference
from narrowgauge.kernels.cast import allocate_words, finish_transposed, transpose_reference
from narrowgauge.kernels.fp8_formats import FP8_MAX, get_format_name
from narrowgauge.kernels.fp8_tile import quantize_reference, tile_grid, tiles_evenly
from narrowgauge.kernels.launch import launch_kernel

# The fastest on an H200 (bench/tune_kernels.py). These kernels are bound by compute as much as by memory.
TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
KEEP_TILE: dict[str, int] = {"BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 4}
"""Of a forward that also writes its input in 8 bits, which needs 64 columns."""
PAIR_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 4}
KEPT_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 8}
"""Of a backward that reads its input in 8 bits."""
GATED_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 8}
RECOMPUTED_DTYPE = torch.float8_e4m3fn
"""The format of the forward output when backward recomputes it."""
KINDS = ("gelu", "gelu-tanh", "gelu-quick", "silu", "relu", "relu-squared", *GATES)
"""The activations that have kernels."""


def activate(
    kind: str,
    u: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
    gate_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the activation of ``u`` as [N, F]; an FP8 ``dtype`` needs ``scale``, and adds [F, N] if ``transposed``.

    ``u`` is [N, F]; for a gated activation [N, 2F], gate first, or up first if ``gate_last``.
    """
    op, call = _name_op(kind), _pointwise if can_bypass_op(u) else _pointwise_op
    a, b = split_gate(u, gate_last) if kind in GATES else (u, None)
    return _drop_missing(call(op, a, b, scale, dtype, amax, counts, transposed, None, None, *NO_CODES))[:2]


NO_CODES = (None,) * 4
"""For calls that keep nothing in 8 bits."""
Kept = tuple[Blocks8, ...]
"""The input of an activation in 8 bits: of a gated one gate and up."""


def activate_and_keep(
    kind: str,
    u: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    gate_last: bool = False,
) -> tuple[Tensor, Kept]:
    """Return the activation of ``u`` as ``activate`` does, and ``u`` in 8 bits."""
    op, call = _name_op(kind), _pointwise if can_bypass_op(u) else _pointwise_op
    a, b = split_gate(u, gate_last) if kind in GATES else (u, None)
    kept = tuple(blocks_8bit.allocate(part) for part in (a, b) if part is not None)
    codes = [*(tensor for blocks in kept for tensor in (blocks.codes, blocks.scales)), *NO_CODES][: len(NO_CODES)]
    return call(op, a, b, scale, dtype, amax, counts, False, None, None, *codes)[0], kept


def decode(kept: Kept, gate_last: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return what ``activate_and_keep`` kept as one tensor."""
    return torch.cat([blocks.decode(dtype) for blocks in kept[:: -1 if gate_last else 1]], dim=1)


def activate_backward(
    kind: str,
    grad_output: Tensor,
    u: Tensor | Kept,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    transposed: bool = True,
    forward_scale: Tensor | None = None,
    gate_last: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient of ``u``, in FP8 also transposed; with ``forward_scale`` also the activation as [F, N]."""
    op, options = _name_op(kind), (scale, dtype, amax, counts, transposed, forward_scale)
    direct = can_bypass_op(grad_output, u if isinstance(u, Tensor) else u[0].codes)
    if kind in GATES:
        gated = _gated_backward if direct else _gated_backward_op
        gate, up = split_gate(u, gate_last) if isinstance(u, Tensor) else (u[0].codes, u[1].codes)
        of_gate, of_up = (None, None) if isinstance(u, Tensor) else (u[0].scales, u[1].scales)
        return _drop_missing(gated(op, grad_output, gate, up, gate_last, *options, of_gate, of_up))
    call = _pointwise if direct else _pointwise_op
    codes, scales = (u, None) if isinstance(u, Tensor) else (u[0].codes, u[0].scales)
    return _drop_missing(call(f"{op}_backward", codes, grad_output, *options, scales, *NO_CODES))


def _name_op(kind: str) -> str:
    if kind not in KINDS:
        raise UsageError(f"activate: {kind!r} is unknown; expected one of {', '.join(KINDS)}")
    return kind.replace("-", "_")


def _check(op: str, dtype: torch.dtype, scale: Tensor | None, a: Tensor, b: Tensor) -> None:
    if (dtype in FP8_MAX) is (scale is None):
        raise UsageError(f"{op}: output in {dtype} {'needs a' if scale is None else 'takes no'} scale")
    if a.dim() != 2 or b.shape != a.shape:
        raise UsageError(
            f"{op}: got tensors of shape {tuple(a.shape)} and {tuple(b.shape)}; expected two dimensions each (flatten "
            "the leading ones) and the same shape, for gate and up each"
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
    return transpose_reference(
        _pointwise(op, a, b, scale, RECOMPUTED_DTYPE, None, None, False, None, None, *NO_CODES)[0]
    )


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
    a_scales: Tensor | None,
    a_codes: Tensor | None,
    a_codes_scales: Tensor | None,
    b_codes: Tensor | None,
    b_codes_scales: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one output; a is codes if it has scales. What a and b are in 8 bits is written to the codes' tensors."""
    like = a if a_scales is None or b is None else b  # codes have another shape
    _check(op, dtype, scale, like, like if b is None else b)
    plain = op.removesuffix("_backward")
    if not use_triton(a):
        _encode_reference(a, a_codes, a_codes_scales)
        _encode_reference(b, b_codes, b_codes_scales)
        a = _decode(a, a_scales, like.shape[1])
        kind = plain.replace("_", "-")
        value, slope = evaluate_reference(GATES.get(kind, kind), widen(a))
        forward = None if forward_scale is None else value
        value = value if b is None else widen(b) * (value if kind in GATES else slope)
        return _store_reference(value, scale, dtype, amax, counts, transposed, forward, forward_scale)
    length, width = like.shape
    out, words = _allocate_output(length, width, a, dtype, transposed)
    recomputed = _allocate_recomputed(length, width, a, forward_scale)
    if not out.numel():
        return _collect_outputs(out, words, transposed, recomputed)
    a = a if a_scales is not None else _make_rows_contiguous(a)
    b = None if b is None else _make_rows_contiguous(b)
    reading = PAIR_TILE if a_scales is None else KEPT_TILE
    tile = reading if b is not None else TILE if a_codes is None else KEEP_TILE
    launch_kernel(
        pointwise_kernel, tile_grid(length, width, tile),
        a, b, out, words, scale, amax, counts, recomputed, forward_scale,
        a_scales, a_codes, a_codes_scales, b_codes, b_codes_scales,
        length, width, a.stride(0), 0 if b is None else b.stride(0), width, length // 16,
        OP=op, FORWARD=plain, FORMAT=get_format_name(dtype),
        WHOLE=tiles_evenly(length, width, tile), **tile,
    )  # fmt: skip
    if forward_scale is not None and recomputed is None:
        recomputed = _recompute_forward(plain, _decode(a, a_scales, width), None, forward_scale)
    return _collect_outputs(out, words, transposed, recomputed)


def _encode_reference(x: Tensor | None, codes: Tensor | None, scales: Tensor | None) -> None:
    if x is not None and codes is not None and scales is not None:
        made = encode_reference(x)
        codes.copy_(made.codes)
        scales.copy_(made.scales)


def _decode(x: Tensor, scales: Tensor | None, width: int) -> Tensor:
    return x if scales is None else decode_reference(x, scales, width)


def _gated_backward(
    op: str,
    grad_output: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_last: bool,
    scale: Tensor | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    counts: Tensor | None,
    transposed: bool,
    forward_scale: Tensor | None,
    gate_scales: Tensor | None,
    up_scales: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    for part in (gate, up) if gate_scales is None else (grad_output,):
        _check(f"{op}_backward", dtype, scale, grad_output, part)
    length, width = grad_output.shape
    kind = op.replace("_", "-")
    if not use_triton(grad_output):
        parts = [widen(_decode(gate, gate_scales, width)), widen(_decode(up, up_scales, width))]
        gate_up = torch.cat(parts[:: -1 if gate_last else 1], dim=1)
        forward = None if forward_scale is None else activate_reference(kind, gate_up, gate_last)
        value = activate_backward_reference(kind, grad_output, gate_up, gate_last)
        return _store_reference(value, scale, dtype, amax, counts, transposed, forward, forward_scale)
    out, words = _allocate_output(length, 2 * width, grad_output, dtype, transposed)
    recomputed = _allocate_recomputed(length, width, grad_output, forward_scale)
    if not out.numel():
        return _collect_outputs(out, words, transposed, recomputed)
    grad_output = _make_rows_contiguous(grad_output)
    if gate_scales is None:
        gate, up = _make_rows_contiguous(gate), _make_rows_contiguous(up)
    grad_gate, grad_up = split_gate(out, gate_last)
    grad_gate_t, grad_up_t = (None, None) if words is None else words.split(width)[:: -1 if gate_last else 1]
    launch_kernel(
        gated_backward_kernel, tile_grid(length, width, GATED_TILE),
        grad_output, gate, up, grad_gate, grad_up, grad_gate_t, grad_up_t, scale, amax, counts, recomputed,
        forward_scale, gate_scales, up_scales,
        length, width, grad_output.stride(0), gate.stride(0), 2 * width, length // 16,
        NAME=GATES[kind].replace("-", "_"), FORWARD=op, FORMAT=get_format_name(dtype),
        WHOLE=tiles_evenly(length, width, GATED_TILE), **GATED_TILE,
    )  # fmt: skip
    if forward_scale is not None and recomputed is None:
        recomputed = _recompute_forward(
            op, _decode(gate, gate_scales, width), _decode(up, up_scales, width), forward_scale
        )
    return _collect_outputs(out, words, transposed, recomputed)


def _drop_missing(made: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Replace empty tensors by None."""
    out, out_t, recomputed = made
    return out, out_t if out_t.dim() == 2 else None, recomputed if recomputed.dim() == 2 else None


def _make_fake(
    like: Tensor, times: int, dtype: torch.dtype, transposed: bool, forward_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    length, width = like.shape
    out = like.new_empty((length, times * width), dtype=dtype)
    out_t = out.new_empty((times * width, length) if transposed and dtype in FP8_MAX else (0,))
    recomputed = (0,) if forward_scale is None else (width, length)
    return out, out_t, out.new_empty(recomputed, dtype=RECOMPUTED_DTYPE)


_STATISTICS = ("amax", "counts")
_pointwise_op = register(
    "activation",
    _pointwise,
    lambda op, a, b, scale, dtype, amax, counts, transposed, forward_scale, a_scales, *codes: _make_fake(
        a if a_scales is None else b, 1, dtype, transposed, forward_scale
    ),
    (*_STATISTICS, "a_codes", "a_codes_scales", "b_codes", "b_codes_scales"),
)
_gated_backward_op = register(
    "gated_backward",
    _gated_backward,
    lambda op, grad_output, gate, up, gate_last, scale, dtype, amax, counts, transposed, forward_scale, *scales: (
        _make_fake(grad_output, 2, dtype, transposed, forward_scale)
    ),
    _STATISTICS,
)
