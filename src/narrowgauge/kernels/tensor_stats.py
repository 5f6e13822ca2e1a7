"""Statistics of a tensor in one pass: a histogram over powers of two, the largest value and the sum of squares.

    histogram[e]   how many |x| are in [2**(e - 127), 2**(e - 126))      e is FP32's exponent field, 2 to 254
    histogram[0]   zeros;  histogram[1]  values smaller than 2**-125     (including FP32's own subnormals)
    histogram[255] non-finite values; ``nan`` counts the NaNs among them
    amax, squares  of the finite values

Counting takes most of the time. So for tensors of more than ``WHOLE`` values the histogram counts every k-th block of
4,096: some millions of values, whose shares are accurate to a few in a million. The largest value, the squares and the
non-finite values always cover the whole tensor.

From these follows the share of a tensor that a format would flush, store as subnormals or overflow, at any scale
(``gauges.watch.readings``). Launches that fill the rows of a ``StatsTable`` wait for nothing; the table is read later,
in one copy. FP8 tensors are read with their inverse scale, so that the statistics are of the values they represent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.kernels import HAVE_TRITON, jit, use_triton
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON:
    import triton.language as tl

BINS = 256
BLOCK = 4096
WHOLE = 2**22
"""Up to this many values, the histogram counts all of them."""
_PROGRAMS = 2048
_READ_DIRECTLY = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class StatsTable:
    """Statistics of many tensors on one device, one row per tensor."""

    counts: Tensor
    """[rows, 257] in int64: the histogram, and the number of NaNs."""
    sizes: Tensor
    """[rows, 2] in FP32: amax and sum of squares of the finite values."""

    @staticmethod
    def make(rows: int, device: torch.device | str) -> StatsTable:
        counts = torch.zeros(rows, BINS + 1, dtype=torch.int64, device=device)
        return StatsTable(counts, torch.zeros(rows, 2, device=device))


@torch.no_grad()
def add_statistics(table: StatsTable, row: int, x: Tensor, inverse_scale: Tensor | None = None) -> None:
    """Add a tensor's values to a row."""
    if x.numel() == 0:
        return
    flat = x.detach().reshape(-1)
    if flat.dtype not in _READ_DIRECTLY:
        flat = flat.float()
    if use_triton(flat):
        grid = (min(-(-flat.numel() // BLOCK), _PROGRAMS),)
        launch_kernel(
            _stats_kernel, grid,
            flat, inverse_scale, table.counts[row], table.sizes[row], flat.numel(),
            choose_sample_stride(flat.numel()), BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    else:
        # Outside of the modes of a training step on a CPU, in which this may be called: a quarter of the time.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            add_statistics_reference(table, row, flat, inverse_scale)


def choose_sample_stride(size: int) -> int:
    """Return k if the histogram counts every k-th block; k is odd, so that an even number of programs share evenly."""
    return size // WHOLE | 1


def add_statistics_reference(table: StatsTable, row: int, x: Tensor, inverse_scale: Tensor | None = None) -> None:
    values = x.reshape(-1).float()
    if inverse_scale is not None:
        values = values * inverse_scale
    bits = values.contiguous().view(torch.int32) & 0x7FFFFFFF
    exponent = (bits >> 23).clamp_(min=1)
    exponent = torch.where(bits == 0, 0, exponent)
    some, apart = exponent, choose_sample_stride(exponent.numel())
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
    bad = tl.zeros([BLOCK], tl.int32)  # low half: non-finite values, high half: NaN
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if inverse_ptr is not None:
            x = x * tl.load(inverse_ptr)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if block % every == 0:
            histogram += tl.histogram(tl.where(bits == 0, 0, tl.maximum(bits >> 23, 1)), 256)
            beyond = BLOCK - tl.sum(mask.to(tl.int32))  # masked values of the last block were counted as zeros
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
