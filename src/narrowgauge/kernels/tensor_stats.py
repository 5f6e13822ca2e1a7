"""Statistics of a tensor in one pass: how its values lie over the powers of two, the largest, the mean square.

    histogram[e]   how many |x| lie in [2**(e - 127), 2**(e - 126))      e is FP32's exponent field, 2 to 254
    histogram[0]   zeros;  histogram[1]  what is smaller than 2**-125    (FP32's own subnormals among them)
    histogram[255] what is not finite, of which ``nan`` are no numbers
    amax, squares  of the finite values

Of tensors beyond ``WHOLE`` values the histogram counts every so-manieth block of 4,096, as counting is what takes time:
some millions of values, whose shares are good to a few in a million. Its largest value, the squares and whatever is not
finite are of the whole tensor.

Which share of a tensor any format would flush, hold only as subnormals or overflow, at any scale, follows from these
(``gauges.readings``). Rows of a ``Table`` are filled by launches that wait for nothing; it is read as a whole, later.
FP8 tensors are read with the inverse of their scale, so that they count as what they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, jit, use_triton

if HAVE_TRITON:
    import triton.language as tl

BINS = 256
BLOCK = 4096
WHOLE = 2**22
"""Up to so many values, the histogram is of all."""
_PROGRAMS = 2048
_READ_DIRECTLY = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Table:
    """Statistics of many tensors, a row each, on one device."""

    counts: Tensor
    """[rows, 257] in int64: the histogram, and how many are NaN."""
    sizes: Tensor
    """[rows, 2] in FP32: amax and sum of squares of the finite values."""

    @staticmethod
    def make(rows: int, device: torch.device | str) -> Table:
        counts = torch.zeros(rows, BINS + 1, dtype=torch.int64, device=device)
        return Table(counts, torch.zeros(rows, 2, device=device))


@torch.no_grad()
def gather(table: Table, row: int, x: Tensor, inverse_scale: Tensor | None = None) -> None:
    """Add a tensor's values to a row."""
    if x.numel() == 0:
        return
    flat = x.detach().reshape(-1)
    if flat.dtype not in _READ_DIRECTLY:
        flat = flat.float()
    if use_triton(flat):
        grid = (min(-(-flat.numel() // BLOCK), _PROGRAMS),)
        _stats_kernel[grid](
            flat, inverse_scale, table.counts[row], table.sizes[row], flat.numel(), every(flat.numel()), BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    else:
        gather_reference(table, row, flat, inverse_scale)


def every(size: int) -> int:
    """Which blocks the histogram counts: odd, so that every one of an even number of programs has as many."""
    return size // WHOLE | 1


def gather_reference(table: Table, row: int, x: Tensor, inverse_scale: Tensor | None = None) -> None:
    values = x.reshape(-1).float()
    if inverse_scale is not None:
        values = values * inverse_scale
    bits = values.contiguous().view(torch.int32) & 0x7FFFFFFF
    exponent = (bits >> 23).clamp_(min=1)
    exponent = torch.where(bits == 0, 0, exponent)
    some, apart = exponent, every(exponent.numel())
    if apart > 1:
        some = exponent[torch.arange(exponent.numel(), device=x.device) // BLOCK % apart == 0]
    table.counts[row, : BINS - 1] += torch.bincount(some, minlength=BINS)[: BINS - 1]
    table.counts[row, BINS - 1] += (exponent == BINS - 1).sum()
    table.counts[row, BINS] += (bits > 0x7F800000).sum()
    finite = torch.where(exponent < 255, values, 0.0)
    amax, squares = table.sizes[row].unbind()
    amax.copy_(torch.maximum(amax, finite.abs().max()))
    squares.add_(finite.square().sum())


@jit
def _stats_kernel(x_ptr, inverse_ptr, counts_ptr, sizes_ptr, size, every, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    bins = tl.arange(0, 256)
    histogram = tl.zeros([256], tl.int32)
    amax, squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)  # not finite in the low half, NaN in the high one
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if inverse_ptr is not None:
            x = x * tl.load(inverse_ptr)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if block % every == 0:
            histogram += tl.histogram(tl.where(bits == 0, 0, tl.maximum(bits >> 23, 1)), 256)
            beyond = BLOCK - tl.sum(mask.to(tl.int32))  # the last block's missing values were counted as zeros
            histogram -= tl.where(bins == 0, beyond, 0)
        finite = tl.where(bits < 0x7F800000, tl.abs(x), 0.0)
        amax = tl.maximum(amax, finite)
        squares += finite * finite
        bad += (bits >= 0x7F800000).to(tl.int32) + ((bits > 0x7F800000).to(tl.int32) << 16)
    tl.atomic_add(counts_ptr + bins, histogram.to(tl.int64), mask=(histogram > 0) & (bins < 255), sem="relaxed")
    nonfinite = tl.sum(bad & 0xFFFF)
    if nonfinite > 0:
        tl.atomic_add(counts_ptr + 255, nonfinite.to(tl.int64), sem="relaxed")
        tl.atomic_add(counts_ptr + 256, tl.sum(bad >> 16).to(tl.int64), sem="relaxed")
    tl.atomic_max(sizes_ptr, tl.max(amax), sem="relaxed")
    tl.atomic_add(sizes_ptr + 1, tl.sum(squares), sem="relaxed")
