"""The passes and products of experts in BF16, in slots as in FP8 (``slots``).

    gather                 out[s] = x[token of s]                        zeros in empty slots
    activate_wide          a = w f(g) u                                  u and g: the packed input [gate, up]
    activate_wide_backward grad_g = w v u f'(g),  grad_u = w v f(g),     from v, the gradient of a;
                           a again,  grad_w                              as in ``activation``
    multiply_wide          C[s]  = A[s] B_e  or  A[s] B_e'               e: the expert of slot s
    multiply_slots_wide    C_e   = sum over the slots s of e:  A[s]' B[s]

Products are torch's grouped ones, one kernel for all experts. Each of the other passes reads and writes every number
once. Their sums and functions are computed in FP32. References also take FP32, to compare with models' own code.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, define_op, jit, rehearsal, use_triton
from narrowgauge.kernels.activation_kernels import compute_gated_gradients, compute_value
from narrowgauge.kernels.activation_reference import GATES, activate_backward_reference, activate_reference, widen
from narrowgauge.kernels.experts.activation import get_factors
from narrowgauge.kernels.experts.rows import gather_reference
from narrowgauge.kernels.experts.slots import Slots
from narrowgauge.kernels.fp8_tile import to_fp32
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON:
    import triton.language as tl

COLUMNS = 1024
"""Of a slot that a program computes at once."""
ALIGNMENT = 8
"""What the widths of experts must be a multiple of: rows of BF16 that begin at multiples of 16 bytes."""


def gather(x: Tensor, slots: Slots) -> Tensor:
    """Return the tokens ``x`` [N, D] of all slots, as [S, D]."""
    return _gather_op(x, slots.pairs, slots.choices)


def activate_wide(kind: str, u: Tensor, weights: Tensor, slots: Slots) -> Tensor:
    """Return the activation of ``u`` [S, 2F], times FP32 ``weights`` [N, k], as [S, F] in the dtype of ``u``."""
    return _activate_op(kind, u, weights.contiguous(), slots.pairs)


def activate_wide_backward(
    kind: str, grad: Tensor, u: Tensor, weights: Tensor, slots: Slots
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of ``u`` [S, 2F], the activation again [S, F], and the gradient of ``weights`` [N, k]."""
    of_u, again, dots = _backward_op(kind, grad, u, weights.contiguous(), slots.pairs)
    return of_u, again, dots[slots.of_pairs.long()]


def multiply_wide(a: Tensor, stack: Tensor, slots: Slots, transposed: bool) -> Tensor:
    """Multiply each slot of ``a`` by its expert's matrix of ``stack`` [E, ., .], transposed or not."""
    return _multiply_op(a, stack, slots.starts, transposed)


def multiply_slots_wide(a: Tensor, b: Tensor, slots: Slots) -> Tensor:
    """Return for each expert the sum over its slots of the products a' b: [E, M, N], zeros for experts without slots.

    Args:
        a: [S, M].
        b: [S, N].
        slots: Of the rows of both.
    """
    return _multiply_slots_op(a, b, slots.starts)


def activate_wide_reference(kind: str, u: Tensor, weights: Tensor, pairs: Tensor) -> Tensor:
    value = activate_reference(kind, widen(u)) * get_factors(weights, pairs)
    return torch.where((pairs >= 0)[:, None], value, 0.0).to(u.dtype)


def activate_wide_backward_reference(
    kind: str, grad: Tensor, u: Tensor, weights: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    present, factors = (pairs >= 0)[:, None], get_factors(weights, pairs)
    of_u = activate_backward_reference(kind, widen(grad) * factors, widen(u))
    value = torch.where(present, activate_reference(kind, widen(u)), 0.0)
    dots = torch.where(present, value * widen(grad), 0.0).sum(1)
    return torch.where(present, of_u, 0.0).to(u.dtype), (value * factors).to(u.dtype), dots


def multiply_wide_reference(a: Tensor, stack: Tensor, starts: Tensor, transposed: bool) -> Tensor:
    out = a.new_zeros(len(a), stack.shape[1 if transposed else 2])
    for expert, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        matrix = stack[expert].t() if transposed else stack[expert]
        out[first:last] = (a[first:last].float() @ matrix.float()).to(a.dtype)
    return out


def multiply_slots_wide_reference(a: Tensor, b: Tensor, starts: Tensor) -> Tensor:
    bounds = itertools.pairwise(starts.tolist())
    return torch.stack([(a[i:j].float().t() @ b[i:j].float()).to(a.dtype) for i, j in bounds])


@jit
def _find_end(pair, width):  # type: ignore[no-untyped-def]
    """Return how many columns of a slot are read: none of an empty one."""
    return tl.where(pair >= 0, width, 0)


@jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    x_ptr, pairs_ptr, out_ptr, width, stride, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(pairs_ptr + slot)
    source = x_ptr + (pair // CHOICES).to(tl.int64) * stride + columns
    value = tl.load(source, mask=columns < _find_end(pair, width), other=0.0)
    tl.store(out_ptr + slot * width + columns, value, mask=columns < width)


@jit
def _activate_wide_kernel(  # type: ignore[no-untyped-def]
    u_ptr, weights_ptr, pairs_ptr, out_ptr, width, OP: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(pairs_ptr + slot)
    inside = columns < _find_end(pair, width)
    gate = tl.load(u_ptr + slot * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(u_ptr + slot * 2 * width + width + columns, mask=inside, other=0.0)
    weight = tl.load(weights_ptr + tl.maximum(pair, 0))
    value = tl.where(inside, compute_value(gate, up, OP) * weight, 0.0)
    tl.store(out_ptr + slot * width + columns, value.to(out_ptr.dtype.element_ty), mask=columns < width)


@jit
def _activate_wide_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, u_ptr, weights_ptr, pairs_ptr, of_u_ptr, again_ptr, dots_ptr, width,
    OP: tl.constexpr, NAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each slot, which sums over its columns for the gradient of the router's weight."""
    slot = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs_ptr + slot)
    weight = tl.load(weights_ptr + tl.maximum(pair, 0))
    dots = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < _find_end(pair, width)
        gate = tl.load(u_ptr + slot * 2 * width + columns, mask=inside, other=0.0)
        up = tl.load(u_ptr + slot * 2 * width + width + columns, mask=inside, other=0.0)
        grad = to_fp32(tl.load(grad_ptr + slot * width + columns, mask=inside, other=0.0))
        value = tl.where(inside, compute_value(gate, up, OP), 0.0)
        dots += value * grad
        of_gate, of_up = compute_gated_gradients(grad * weight, gate, up, NAME)
        kind = of_u_ptr.dtype.element_ty
        tl.store(again_ptr + slot * width + columns, (value * weight).to(kind), mask=columns < width)
        target = of_u_ptr + slot * 2 * width + columns
        tl.store(target, tl.where(inside, of_gate, 0.0).to(kind), mask=columns < width)
        tl.store(target + width, tl.where(inside, of_up, 0.0).to(kind), mask=columns < width)
    tl.store(dots_ptr + slot, tl.sum(dots, 0))


def _gather(x: Tensor, pairs: Tensor, choices: int) -> Tensor:
    if not use_triton(x) or x.dtype is torch.float32:
        return gather_reference(x, pairs, choices)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(len(pairs), x.shape[1], dtype=x.dtype, device=x.device)
    grid = len(pairs), -(-x.shape[1] // COLUMNS)
    launch_kernel(
        _gather_kernel, grid, x, pairs, out, x.shape[1], x.stride(0), CHOICES=choices, BLOCK=COLUMNS, num_warps=4
    )
    return out


def _activate(kind: str, u: Tensor, weights: Tensor, pairs: Tensor) -> Tensor:
    if not use_triton(u) or u.dtype is torch.float32:
        return activate_wide_reference(kind, u, weights, pairs)
    width = u.shape[1] // 2
    out = torch.empty(len(u), width, dtype=u.dtype, device=u.device)
    grid = len(u), -(-width // COLUMNS)
    launch_kernel(
        _activate_wide_kernel, grid, u, weights, pairs, out, width, OP=kind.replace("-", "_"), BLOCK=COLUMNS,
        num_warps=4,
    )  # fmt: skip
    return out


def _backward(kind: str, grad: Tensor, u: Tensor, weights: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not use_triton(u) or u.dtype is torch.float32:
        return activate_wide_backward_reference(kind, grad, u, weights, pairs)
    of_u, again, dots = torch.empty_like(u), torch.empty_like(grad), torch.empty(len(u), device=u.device)
    launch_kernel(
        _activate_wide_backward_kernel, (len(u),), grad, u, weights, pairs, of_u, again, dots, grad.shape[1],
        OP=kind.replace("-", "_"), NAME=GATES[kind].replace("-", "_"), BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip
    return of_u, again, dots


def _multiply(a: Tensor, stack: Tensor, starts: Tensor, transposed: bool) -> Tensor:
    if not a.is_cuda or a.dtype is torch.float32:
        return multiply_wide_reference(a, stack, starts, transposed)
    if rehearsal.noted is not None:  # nothing is Triton's here, and no kernel has written the slots
        return a.new_empty(len(a), stack.shape[1 if transposed else 2])
    return torch._grouped_mm(a, stack.transpose(-2, -1) if transposed else stack, offs=starts[1:])


def _multiply_slots(a: Tensor, b: Tensor, starts: Tensor) -> Tensor:
    if not a.is_cuda or a.dtype is torch.float32:
        return multiply_slots_wide_reference(a, b, starts)
    if rehearsal.noted is not None:
        return a.new_empty(len(starts) - 1, a.shape[1], b.shape[1])
    return torch._grouped_mm(a.t(), b, offs=starts[1:])


_gather_op = define_op("gather", _gather, lambda x, pairs, choices: x.new_empty((len(pairs), x.shape[1])))
_activate_op = define_op(
    "activate_experts_wide", _activate, lambda kind, u, weights, pairs: u.new_empty((len(u), u.shape[1] // 2))
)
_backward_op = define_op(
    "activate_experts_wide_backward",
    _backward,
    lambda kind, grad, u, weights, pairs: (
        u.new_empty(u.shape), u.new_empty(grad.shape), u.new_empty((len(u),), dtype=torch.float32),
    ),
)  # fmt: skip
_multiply_op = define_op(
    "multiply_wide_by_experts",
    _multiply,
    lambda a, stack, starts, transposed: a.new_empty((len(a), stack.shape[1 if transposed else 2])),
)
_multiply_slots_op = define_op(
    "multiply_wide_slots_of_experts",
    _multiply_slots,
    lambda a, b, starts: a.new_empty((len(starts) - 1, a.shape[1], b.shape[1])),
)
