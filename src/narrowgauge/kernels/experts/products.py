"""Products of slots with the matrices of their experts, in FP8 with one scale for each operand.

    multiply         C[s]  = A[s] B_e'                       e: the expert of slot s
    multiply_slots   C_e   = sum over the slots s of e:  A[:, s] B[:, s]'

Experts' matrices are a stack W [E, R, D], cast as one matrix [E R, D], and transposed as [D, E R]. Both serve as B:

    rows      B_e = W_e, rows e R to (e + 1) R of the first               A [S, D],  C [S, R]
    columns   B_e = W_e', columns e R to (e + 1) R of the second          A [S, R],  C [S, D]

Tensor cores read FP8 only along the dimension that is summed, which is why ``multiply_slots`` needs both operands
transposed. Tiles are loaded by the tensor memory accelerator (TMA). As slots of an expert begin at multiples of a tile
(``slots``), no tile is shared by experts, and no load needs a mask. Empty slots contain zeros.

``multiply`` accumulates in the tensor cores' own precision, ``multiply_slots`` in FP32 every 128 terms, as all products
of this project (``nn/products/gemm.py``).
"""

from __future__ import annotations

import itertools
import os

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, define_op, jit, use_triton
from narrowgauge.kernels.experts.slots import TILE, Slots
from narrowgauge.kernels.launch import launch_tiled

if HAVE_TRITON:
    import triton.language as tl

    INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

ALIGNMENT = 128
"""What the widths of experts must be a multiple of: the terms of one step of a product's loop."""
# Tiles, warps and stages are the fastest of those tried on an H200. GROUP was chosen by the size of the L2 cache.
MULTIPLY: dict[str, int] = {"BLOCK_N": 256, "BLOCK_K": 128, "GROUP": 16, "num_warps": 8, "num_stages": 3}
MULTIPLY_SLOTS: dict[str, int] = {"BLOCK_M": 128, "BLOCK_N": 256, "GROUP": 8, "num_warps": 8, "num_stages": 3}
INTERPRETED_PROGRAMS = 3
"""Programs of a kernel with one for each multiprocessor, in Triton's interpreter."""


def multiply(
    a: Tensor, b: Tensor, slots: Slots, inv_a: Tensor, inv_b: Tensor, width: int, columns: bool = False
) -> Tensor:
    """Multiply each slot by its expert's matrix; the result is [S, width] in BF16. Tiles behind the last expert are not
    computed.

    Args:
        a: [S, K] in FP8.
        b: [E * width, K] in FP8; with ``columns`` [width, E * K].
        slots: Of the rows of ``a``.
        inv_a: What the numbers of ``a`` are multiplied by, a scalar on the device.
        inv_b: The same of ``b``.
        width: The number of columns of the result.
        columns: Whether the experts' matrices are columns of ``b``, and not rows.
    """
    return _multiply_op(a, b, slots.experts, slots.starts, inv_a, inv_b, width, columns)


def multiply_slots(a: Tensor, b: Tensor, starts: Tensor, inv_a: Tensor, inv_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the slots of each expert, and sum; the result is [E, M, N], with zeros for experts without slots.

    Args:
        a: [M, S] in FP8.
        b: [N, S] in FP8.
        starts: [E + 1], the first slot of each expert.
        inv_a: What the numbers of ``a`` are multiplied by, a scalar on the device.
        inv_b: The same of ``b``.
        dtype: BF16 or FP32.
    """
    return _multiply_slots_op(a, b, starts, inv_a, inv_b, dtype)


def multiply_reference(
    a: Tensor, b: Tensor, experts: Tensor, inv_a: Tensor, inv_b: Tensor, width: int, columns: bool
) -> Tensor:
    """Compute ``multiply``, with zeros in tiles without an expert."""
    out = torch.zeros(len(a), width, dtype=torch.float32, device=a.device)
    depth, owners = a.shape[1], experts.tolist()
    for expert in sorted(set(owners) - {-1}):
        first = owners.index(expert)
        rows = slice(first * TILE, (first + owners.count(expert)) * TILE)  # an expert's tiles lie together
        part = b[:, expert * depth :][:, :depth] if columns else b[expert * width :][:width]
        out[rows] = a[rows].float() @ part.float().t()
    return (out * (inv_a * inv_b)).to(_get_output_dtype(a))


def _get_output_dtype(a: Tensor) -> torch.dtype:
    """Return the dtype of ``multiply``'s result: FP32 for FP32, which only references take."""
    return torch.float32 if a.dtype is torch.float32 else torch.bfloat16


def multiply_slots_reference(
    a: Tensor, b: Tensor, starts: Tensor, inv_a: Tensor, inv_b: Tensor, dtype: torch.dtype
) -> Tensor:
    ends = starts.tolist()
    parts = [a[:, i:j].float() @ b[:, i:j].float().t() for i, j in itertools.pairwise(ends)]
    return (torch.stack(parts) * (inv_a * inv_b)).to(dtype)


@jit
def _find_tile(tile, height, tiles_n, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return row and column of a tile. Groups of rows come one after another, so that what they read stays in L2."""
    group = tile // (GROUP * tiles_n)
    within = tile % (GROUP * tiles_n)
    rows = tl.minimum(height - group * GROUP, GROUP)
    return group * GROUP + within % rows, within // rows


@jit
def _multiply_experts_kernel(  # type: ignore[no-untyped-def]
    a_tiles, b_tiles, c_tiles, experts_ptr, starts_ptr, inv_a_ptr, inv_b_ptr, count, tiles_n, steps, row_step,
    column_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program for each multiprocessor: while it stores a tile, the loads of the next one are under way."""
    factor = tl.load(inv_a_ptr) * tl.load(inv_b_ptr)
    height = tl.load(starts_ptr + count) // BLOCK_M
    for tile in tl.range(tl.program_id(0), height * tiles_n, tl.num_programs(0), flatten=True):
        m, n = _find_tile(tile, height, tiles_n, GROUP)
        expert = tl.load(experts_ptr + m)
        row = expert * row_step + n * BLOCK_N
        column = expert * column_step
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(steps):
            a = a_tiles.load([m * BLOCK_M, k * BLOCK_K])
            b = b_tiles.load([row, column + k * BLOCK_K])
            sums = _dot(a, b.T, sums, None)
        c_tiles.store([m * BLOCK_M, n * BLOCK_N], (sums * factor).to(tl.bfloat16))


@jit
def _multiply_slots_kernel(  # type: ignore[no-untyped-def]
    a_tiles, b_tiles, out_ptr, starts_ptr, inv_a_ptr, inv_b_ptr, tiles_m, tiles_n, height, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    row, column = _find_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    m = row * BLOCK_M
    n = column * BLOCK_N
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in range(tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1), BLOCK_K):
        sums = _dot(a_tiles.load([m, s]), b_tiles.load([n, s]).T, sums, BLOCK_K)
    sums *= tl.load(inv_a_ptr) * tl.load(inv_b_ptr)
    rows = (m + tl.arange(0, BLOCK_M))[:, None]
    columns = (n + tl.arange(0, BLOCK_N))[None, :]
    target = out_ptr + expert.to(tl.int64) * height * width + (rows * width + columns)
    tl.store(target, sums.to(out_ptr.dtype.element_ty), mask=(rows < height) & (columns < width))


@jit
def _dot(a, b, sums, IMPRECISE: tl.constexpr):  # type: ignore[no-untyped-def]
    if INTERPRETED:  # numpy multiplies no FP8
        return sums + tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, sums, max_num_imprecise_acc=IMPRECISE)


def _multiply(
    a: Tensor, b: Tensor, experts: Tensor, starts: Tensor, inv_a: Tensor, inv_b: Tensor, width: int, columns: bool
) -> Tensor:
    if not use_triton(a) or a.dtype is torch.float32:
        return multiply_reference(a, b, experts, inv_a, inv_b, width, columns)
    out = torch.empty(len(a), width, dtype=torch.bfloat16, device=a.device)
    shape, depth = MULTIPLY, a.shape[1]
    tiles_n = -(-width // shape["BLOCK_N"])
    launch_tiled(
        _multiply_experts_kernel, (_count_programs(a),),
        (a, (TILE, shape["BLOCK_K"])), (b, (shape["BLOCK_N"], shape["BLOCK_K"])), (out, (TILE, shape["BLOCK_N"])),
        experts, starts, inv_a, inv_b, len(starts) - 1, tiles_n, depth // shape["BLOCK_K"],
        0 if columns else width, depth if columns else 0, BLOCK_M=TILE, **shape,
    )  # fmt: skip
    return out


def _multiply_slots(a: Tensor, b: Tensor, starts: Tensor, inv_a: Tensor, inv_b: Tensor, dtype: torch.dtype) -> Tensor:
    if not use_triton(a) or a.dtype is torch.float32:
        return multiply_slots_reference(a, b, starts, inv_a, inv_b, dtype)
    experts, shape = len(starts) - 1, MULTIPLY_SLOTS
    out = torch.empty(experts, len(a), len(b), dtype=dtype, device=a.device)
    tiles_m, tiles_n = -(-len(a) // shape["BLOCK_M"]), -(-len(b) // shape["BLOCK_N"])
    launch_tiled(
        _multiply_slots_kernel, (experts * tiles_m * tiles_n,),
        (a, (shape["BLOCK_M"], TILE)), (b, (shape["BLOCK_N"], TILE)), out,
        starts, inv_a, inv_b, tiles_m, tiles_n, len(a), len(b), BLOCK_K=TILE, **shape,
    )  # fmt: skip
    return out


def _count_programs(tensor: Tensor) -> int:
    if not tensor.is_cuda:
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


_multiply_op = define_op(
    "multiply_by_experts",
    _multiply,
    lambda a, b, experts, starts, inv_a, inv_b, width, columns: a.new_empty(
        (len(a), width), dtype=_get_output_dtype(a)
    ),
)
_multiply_slots_op = define_op(
    "multiply_slots_of_experts",
    _multiply_slots,
    lambda a, b, starts, inv_a, inv_b, dtype: a.new_empty((len(starts) - 1, len(a), len(b)), dtype=dtype),
)
