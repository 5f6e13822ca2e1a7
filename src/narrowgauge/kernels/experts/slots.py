"""Which slot each pair of a token and an expert gets. Experts begin at multiples of 128 slots (``TILE``).

The number of slots in use depends on data, and the host does not wait for it: buffers have as many slots as there can
be at most, P + 127 for each expert that can have a pair. Tiles behind the last expert have no expert (-1).

Pairs of an expert are in the order of tokens: a sort by expert that is stable. As there are few experts, it is done by
counting, in three kernels: each block of pairs counts its pairs by expert; one program adds up the blocks before each
block, and places experts and tiles; each block gives its pairs their slots. torch's sort with all that follows takes 20
kernels, 0.6 ms for 131,072 pairs on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, define_op, jit, jit_unspecialized, rehearsal, use_triton
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON:
    import triton.language as tl

TILE = 128
"""Slots in a tile of the products."""
LARGEST_TABLE = 8192
"""Entries of the table of pairs and experts that a program has in registers."""


class Slots(NamedTuple):
    """The slots of P = N * k pairs. All tensors are int32 on the tokens' device."""

    of_pairs: Tensor
    """[N, k]: the slot of each pair."""
    pairs: Tensor
    """[S]: the pair n * k + j in each slot; -1 if a slot is empty."""
    starts: Tensor
    """[E + 1]: the first slot of each expert, and the end of the last one."""
    experts: Tensor
    """[S / 128]: the expert of each tile; -1 behind the last one."""

    @property
    def size(self) -> int:
        """The number of slots, S."""
        return len(self.pairs)

    @property
    def choices(self) -> int:
        """The number of experts of each token, k."""
        return self.of_pairs.shape[1]


def count_tiles(pairs: int, experts: int) -> int:
    """Return the largest number of tiles that pairs can take; at least one."""
    return max((pairs + (TILE - 1) * min(experts, pairs)) // TILE, 1)


def assign_slots(index: Tensor, experts: int) -> Slots:
    """Give each pair a slot.

    Args:
        index: [N, k]: the experts of each token, from 0 to experts - 1.
        experts: The number of experts.
    """
    return Slots(*_assign_op(index.detach(), experts))


def assign_reference(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, device = index.numel(), index.device
    tiles = count_tiles(pairs, experts)
    chosen, order = torch.sort(index.reshape(-1), stable=True)
    every = torch.arange(experts + 1, device=device, dtype=chosen.dtype)
    firsts = torch.searchsorted(chosen, every)  # of the pairs in their order; the last entry is the number of pairs
    padded = (firsts.diff() + (TILE - 1)) & -TILE
    starts = torch.cat([firsts.new_zeros(1), padded.cumsum(0)])
    slots = torch.arange(pairs, device=device) + (starts - firsts)[chosen]
    held = torch.full((tiles * TILE,), -1, dtype=torch.int32, device=device)
    held[slots] = order.to(torch.int32)
    of_pairs = torch.empty(pairs, dtype=torch.int32, device=device)
    of_pairs[order] = slots.to(torch.int32)
    owners = torch.searchsorted(starts, torch.arange(0, tiles * TILE, TILE, device=device), right=True) - 1
    owners = torch.where(owners < experts, owners, -1)
    return of_pairs.view(index.shape), held, starts.to(torch.int32), owners.to(torch.int32)


@jit
def _load_choices(index_ptr, pairs, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers of a block's pairs, and a table that has 1 where a pair's expert is: [BLOCK, EXPERTS]."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(index_ptr + number, mask=number < pairs, other=-1).to(tl.int32)
    return number, (chosen[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@jit_unspecialized("pairs")
def _count_kernel(  # type: ignore[no-untyped-def]
    index_ptr, counts_ptr, pairs, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):
    _, table = _load_choices(index_ptr, pairs, BLOCK, EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.sum(table, 0))


@jit_unspecialized("blocks", "tiles")
def _place_kernel(  # type: ignore[no-untyped-def]
    counts_ptr, starts_ptr, experts_ptr, blocks, tiles, count,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Replace the counts of each block by those of the blocks before, and place experts and tiles."""
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, blocks, BLOCK):
        rows = (first + tl.arange(0, BLOCK))[:, None]
        counts = tl.load(counts_ptr + rows * EXPERTS + expert[None, :], mask=rows < blocks, other=0)
        before = tl.cumsum(counts, 0) - counts + total[None, :]
        tl.store(counts_ptr + rows * EXPERTS + expert[None, :], before, mask=rows < blocks)
        total += tl.sum(counts, 0)
    padded = (total + (TILE - 1)) & -TILE
    ends = tl.cumsum(padded, 0)
    tl.store(starts_ptr + expert, ends - padded, mask=expert < count)
    tl.store(starts_ptr + 1 + expert, ends, mask=expert == count - 1)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        past = (ends[None, :] <= tile[:, None] * TILE) & (expert < count)[None, :]
        owner = tl.sum(past.to(tl.int32), 1)
        tl.store(experts_ptr + tile, tl.where(owner < count, owner, -1), mask=tile < tiles)


@jit_unspecialized("pairs")
def _assign_kernel(  # type: ignore[no-untyped-def]
    index_ptr, before_ptr, starts_ptr, of_pairs_ptr, held_ptr, pairs, count,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    number, table = _load_choices(index_ptr, pairs, BLOCK, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    before = tl.load(before_ptr + tl.program_id(0) * EXPERTS + expert)
    first = tl.load(starts_ptr + expert, mask=expert < count, other=0) + before
    slot = tl.sum(table * (first[None, :] + tl.cumsum(table, 0) - 1), 1)
    tl.store(of_pairs_ptr + number, slot, mask=number < pairs)
    tl.store(held_ptr + slot, number, mask=number < pairs)


def _assign(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, device = index.numel(), index.device
    if not use_triton(index) or not pairs:
        return assign_reference(index, experts)
    index, tiles = index.contiguous(), count_tiles(pairs, experts)
    padded = 1 << max(experts - 1, 1).bit_length()
    block = max(LARGEST_TABLE // padded, 16)
    blocks = -(-pairs // block)
    counts = torch.empty((blocks, padded), dtype=torch.int32, device=device)
    # Torch reads results at these places, also in a rehearsal, where no kernel writes them.
    make = torch.empty if rehearsal.noted is None else torch.zeros
    of_pairs = make(index.shape, dtype=torch.int32, device=device)
    held = torch.full((tiles * TILE,), -1, dtype=torch.int32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    owners = torch.empty(tiles, dtype=torch.int32, device=device)
    sizes = {"BLOCK": block, "EXPERTS": padded}
    launch_kernel(_count_kernel, (blocks,), index, counts, pairs, **sizes, num_warps=4)
    launch_kernel(
        _place_kernel, (1,), counts, starts, owners, blocks, tiles, experts, **sizes, TILE=TILE, num_warps=8
    )  # fmt: skip
    launch_kernel(
        _assign_kernel, (blocks,), index, counts, starts, of_pairs, held, pairs, experts, **sizes, num_warps=4
    )  # fmt: skip
    return of_pairs, held, starts, owners


def _fake_slots(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tiles = count_tiles(index.numel(), experts)
    shapes = index.shape, (tiles * TILE,), (experts + 1,), (tiles,)
    first, second, third, fourth = (index.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return first, second, third, fourth


_assign_op = define_op("assign_slots", _assign, _fake_slots)
