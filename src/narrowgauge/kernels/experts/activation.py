"""The gated activation of experts, multiplied by the router's weight w of each slot, and its backward.

    forward     a = w f(g) u                                                 u and g: the packed input [gate, up]
    backward    from v, the gradient of a:
                grad_g = w v u f'(g),  grad_u = w v f(g),  grad_w = sum over columns: v f(g) u

The weight multiplies the activation and not the expert's output: then the output, the largest tensor, is neither kept
nor read for the gradient of w. In FP8 the activation's scale covers the weights.

Backward also recomputes a, transposed, which the gradient of the expert's last matrix reads. Functions are those of
``kernels/activation.py``. Empty slots have zeros in all results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, define_op, jit, jit_unspecialized, use_triton
from narrowgauge.kernels.activation_kernels import compute_gated_gradients, compute_value
from narrowgauge.kernels.activation_reference import (
    GATES,
    activate_backward_reference,
    activate_reference,
    widen,
)
from narrowgauge.kernels.experts.rows import round_reference, turn_reference
from narrowgauge.kernels.experts.slots import Slots
from narrowgauge.kernels.fp8_formats import get_format_name
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
    tile_grid,
    tile_origin,
    tiles_evenly,
    to_fp32,
)
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON:
    import triton.language as tl

FORWARD_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 4}
BACKWARD_TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 8}
E4M3 = torch.float8_e4m3fn


def activate_experts(
    kind: str,
    u: Tensor,
    weights: Tensor,
    slots: Slots,
    scale: Tensor,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the activation of ``u`` [S, 2F], times FP32 ``weights`` [N, k], as [S, F] in E4M3; in FP32 if ``u`` is."""
    return _activate_op(kind, u, weights.contiguous(), slots.pairs, scale, amax, counts)


def activate_experts_backward(
    kind: str,
    grad: Tensor,
    u: Tensor,
    weights: Tensor,
    slots: Slots,
    scale: Tensor,
    dtype: torch.dtype,
    forward_scale: Tensor,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``u`` in FP8 as [S, 2F] and as [2F, S], the activation as [F, S], and grad_w [N, k]."""
    made, turned, recomputed, dots = _backward_op(
        kind, grad, u, weights.contiguous(), slots.pairs, scale, dtype, forward_scale, amax, counts
    )
    return made, turned, recomputed, dots.sum(0)[slots.of_pairs.long()]


def get_forward_dtype(u: Tensor) -> torch.dtype:
    """Return the format of the activation of ``u``."""
    return torch.float32 if u.dtype is torch.float32 else E4M3


def get_factors(weights: Tensor, pairs: Tensor) -> Tensor:
    """Return the router's weight of each slot as [S, 1], 0 in empty slots."""
    if not weights.numel():
        return weights.new_zeros(len(pairs), 1)
    return torch.where(pairs >= 0, weights.reshape(-1)[pairs.clamp(min=0).long()], 0.0)[:, None]


def _weigh_reference(value: Tensor, weights: Tensor, pairs: Tensor) -> Tensor:
    return torch.where((pairs >= 0)[:, None], value * get_factors(weights, pairs), 0.0)


@jit
def _load_factors(weights_ptr, pairs_ptr, n, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the weights of every fourth slot from ``n``, and whether slots have a pair."""
    pairs = tl.load(pairs_ptr + n + 4 * tl.arange(0, BLOCK_N // 4))
    return tl.load(weights_ptr + pairs, mask=pairs >= 0, other=0.0)[:, None], (pairs >= 0)[:, None]


@jit
def _weigh(value, w, present):  # type: ignore[no-untyped-def]
    """Return value * w; 0 in empty slots, whatever was computed there."""
    return tl.where(present, value * w, 0.0)


@jit_unspecialized("length", "n16")
def _activate_experts_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, weights_ptr, pairs_ptr, out_ptr, scale_ptr, amax_ptr, counts_ptr, length, width, stride, n16,
    OP: tl.constexpr, FORMAT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    gate0, gate1, gate2, gate3 = load_four(gate_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    up0, up1, up2, up3 = load_four(up_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    w0, p0 = _load_factors(weights_ptr, pairs_ptr, n0, BLOCK_N)
    w1, p1 = _load_factors(weights_ptr, pairs_ptr, n0 + 1, BLOCK_N)
    w2, p2 = _load_factors(weights_ptr, pairs_ptr, n0 + 2, BLOCK_N)
    w3, p3 = _load_factors(weights_ptr, pairs_ptr, n0 + 3, BLOCK_N)
    scale = tl.load(scale_ptr)
    highest, lowest, nonzero = init_tile_stats(BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = store_tiles(
        _weigh(compute_value(gate0, up0, OP), w0, p0), _weigh(compute_value(gate1, up1, OP), w1, p1),
        _weigh(compute_value(gate2, up2, OP), w2, p2), _weigh(compute_value(gate3, up3, OP), w3, p3),
        highest, lowest, nonzero,
        out_ptr, None, scale, amax_ptr, counts_ptr, n0, d0, length, width, width, n16, FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    recount = finish_tile_stats(highest, lowest, nonzero, BLOCK_N * BLOCK_D, scale, amax_ptr, counts_ptr, FORMAT)
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if recount:
            counted = 0
            for i in range(4):
                gate = load_rows(gate_ptr, n0 + i, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
                up = load_rows(up_ptr, n0 + i, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
                w, present = _load_factors(weights_ptr, pairs_ptr, n0 + i, BLOCK_N)
                counted += count_misfits(_weigh(compute_value(gate, up, OP), w, present) * scale, FORMAT)
            add_misfit_counts(counts_ptr, counted)


@jit
def _compute_gradients(grad, gate, up, w, present, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the gradients of gate and up; 0 in empty slots."""
    of_gate, of_up = compute_gated_gradients(to_fp32(grad) * w, gate, up, NAME)
    return tl.where(present, of_gate, 0.0), tl.where(present, of_up, 0.0)


@jit
def _store_dots(dots_ptr, n, products, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(dots_ptr + n + 4 * tl.arange(0, BLOCK_N // 4), tl.sum(products, 1))


@jit_unspecialized("length", "n16")
def _activate_experts_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, gate_ptr, up_ptr, weights_ptr, pairs_ptr, grad_gate_ptr, grad_up_ptr, grad_gate_t_ptr, grad_up_t_ptr,
    recomputed_t_ptr, dots_ptr, scale_ptr, recomputed_scale_ptr, amax_ptr, counts_ptr, length, width, stride, n16,
    OP: tl.constexpr, NAME: tl.constexpr, FORMAT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    gate0, gate1, gate2, gate3 = load_four(gate_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    up0, up1, up2, up3 = load_four(up_ptr, n0, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
    grad0, grad1, grad2, grad3 = load_four(grad_ptr, n0, d0, length, width, width, WHOLE, BLOCK_N, BLOCK_D)
    w0, p0 = _load_factors(weights_ptr, pairs_ptr, n0, BLOCK_N)
    w1, p1 = _load_factors(weights_ptr, pairs_ptr, n0 + 1, BLOCK_N)
    w2, p2 = _load_factors(weights_ptr, pairs_ptr, n0 + 2, BLOCK_N)
    w3, p3 = _load_factors(weights_ptr, pairs_ptr, n0 + 3, BLOCK_N)
    issue_loads()
    scale = tl.load(scale_ptr)
    forward_scale = tl.load(recomputed_scale_ptr)
    a0 = compute_value(gate0, up0, OP)
    a1 = compute_value(gate1, up1, OP)
    a2 = compute_value(gate2, up2, OP)
    a3 = compute_value(gate3, up3, OP)
    dots = dots_ptr + tl.program_id(0).to(tl.int64) * length
    _store_dots(dots, n0, a0 * to_fp32(grad0), BLOCK_N)
    _store_dots(dots, n0 + 1, a1 * to_fp32(grad1), BLOCK_N)
    _store_dots(dots, n0 + 2, a2 * to_fp32(grad2), BLOCK_N)
    _store_dots(dots, n0 + 3, a3 * to_fp32(grad3), BLOCK_N)
    words = pack_fp8(
        _weigh(a0, w0, p0) * forward_scale, _weigh(a1, w1, p1) * forward_scale,
        _weigh(a2, w2, p2) * forward_scale, _weigh(a3, w3, p3) * forward_scale, "e4m3",
    )  # fmt: skip
    store_words(words, recomputed_t_ptr, n0, d0, n16, width, WHOLE, BLOCK_N, BLOCK_D)
    grad_gate0, grad_up0 = _compute_gradients(grad0, gate0, up0, w0, p0, NAME)
    grad_gate1, grad_up1 = _compute_gradients(grad1, gate1, up1, w1, p1, NAME)
    grad_gate2, grad_up2 = _compute_gradients(grad2, gate2, up2, w2, p2, NAME)
    grad_gate3, grad_up3 = _compute_gradients(grad3, gate3, up3, w3, p3, NAME)
    highest, lowest, nonzero = init_tile_stats(BLOCK_N, BLOCK_D)
    highest, lowest, nonzero = store_tiles(
        grad_gate0, grad_gate1, grad_gate2, grad_gate3, highest, lowest, nonzero, grad_gate_ptr, grad_gate_t_ptr,
        scale, amax_ptr, counts_ptr, n0, d0, length, width, 2 * width, n16, FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    highest, lowest, nonzero = store_tiles(
        grad_up0, grad_up1, grad_up2, grad_up3, highest, lowest, nonzero, grad_up_ptr, grad_up_t_ptr,
        scale, amax_ptr, counts_ptr, n0, d0, length, width, 2 * width, n16, FORMAT, WHOLE, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    recount = finish_tile_stats(highest, lowest, nonzero, 2 * BLOCK_N * BLOCK_D, scale, amax_ptr, counts_ptr, FORMAT)
    if counts_ptr is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if recount:
            counted = 0
            for i in range(4):
                gate = load_rows(gate_ptr, n0 + i, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
                up = load_rows(up_ptr, n0 + i, d0, length, width, stride, WHOLE, BLOCK_N, BLOCK_D)
                grad = load_rows(grad_ptr, n0 + i, d0, length, width, width, WHOLE, BLOCK_N, BLOCK_D)
                w, present = _load_factors(weights_ptr, pairs_ptr, n0 + i, BLOCK_N)
                grad_gate, grad_up = _compute_gradients(grad, gate, up, w, present, NAME)
                counted += count_misfits(grad_gate * scale, FORMAT) + count_misfits(grad_up * scale, FORMAT)
            add_misfit_counts(counts_ptr, counted)


def _activate(
    kind: str,
    u: Tensor,
    weights: Tensor,
    pairs: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    length, width = len(u), u.shape[1] // 2
    if not use_triton(u) or u.dtype is torch.float32:
        value = _weigh_reference(activate_reference(kind, widen(u)), weights, pairs)
        return round_reference(value, scale, get_forward_dtype(u), amax, counts)
    out = torch.empty((length, width), dtype=E4M3, device=u.device)
    gate, up = u.split(width, 1)
    launch_kernel(
        _activate_experts_kernel, tile_grid(length, width, FORWARD_TILE),
        gate, up, weights, pairs, out, scale, amax, counts, length, width, u.stride(0), length // 16,
        OP=kind.replace("-", "_"), FORMAT="e4m3", WHOLE=tiles_evenly(length, width, FORWARD_TILE), **FORWARD_TILE,
    )  # fmt: skip
    return out


def _backward(
    kind: str,
    grad: Tensor,
    u: Tensor,
    weights: Tensor,
    pairs: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    forward_scale: Tensor,
    amax: Tensor | None,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length, width = grad.shape
    if not use_triton(u) or u.dtype is torch.float32:
        value, factors = activate_reference(kind, widen(u)), get_factors(weights, pairs)
        of_u = activate_backward_reference(kind, widen(grad) * factors, widen(u))
        made = round_reference(torch.where((pairs >= 0)[:, None], of_u, 0.0), scale, dtype, amax, counts)
        weighed = _weigh_reference(value, weights, pairs)
        recomputed = turn_reference(round_reference(weighed, forward_scale, get_forward_dtype(u), None, None))
        return made, turn_reference(made), recomputed, (value * widen(grad)).sum(1)[None]
    made = torch.empty((length, 2 * width), dtype=dtype, device=u.device)
    turned = torch.empty((2 * width, length // 4), dtype=torch.int32, device=u.device)
    recomputed = torch.empty((width, length // 4), dtype=torch.int32, device=u.device)
    tile = BACKWARD_TILE
    dots = torch.empty((-(-width // tile["BLOCK_D"]), length), device=u.device)
    gate, up = u.split(width, 1)
    grad_gate, grad_up = made.split(width, 1)
    launch_kernel(
        _activate_experts_backward_kernel, tile_grid(length, width, tile),
        grad, gate, up, weights, pairs, grad_gate, grad_up, *turned.split(width), recomputed, dots, scale,
        forward_scale, amax, counts, length, width, u.stride(0), length // 16,
        OP=kind.replace("-", "_"), NAME=GATES[kind].replace("-", "_"), FORMAT=get_format_name(dtype),
        WHOLE=tiles_evenly(length, width, tile), **tile,
    )  # fmt: skip
    return made, turned.view(dtype), recomputed.view(E4M3), dots


_activate_op = define_op(
    "activate_experts",
    _activate,
    lambda kind, u, weights, pairs, scale, amax, counts: u.new_empty(
        (len(u), u.shape[1] // 2), dtype=get_forward_dtype(u)
    ),
    ("amax", "counts"),
)
_backward_op = define_op(
    "activate_experts_backward",
    _backward,
    lambda kind, grad, u, weights, pairs, scale, dtype, forward_scale, amax, counts: (
        u.new_empty(u.shape, dtype=dtype),
        u.new_empty(u.shape[::-1], dtype=dtype),
        u.new_empty(grad.shape[::-1], dtype=get_forward_dtype(u)),
        u.new_empty((-(-grad.shape[1] // BACKWARD_TILE["BLOCK_D"]), len(u)), dtype=torch.float32),
    ),
    ("amax", "counts"),
)
