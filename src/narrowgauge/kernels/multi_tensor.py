"""Many tensors in one launch: a table of their addresses, and which program takes which piece of which tensor.

A program is given one block of one tensor. Sizes seldom change, so that part is kept; addresses of gradients change
with every backward, so the table is sent anew each time, from pinned memory and without waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """How tensors of given sizes are cut into blocks."""

    owner: Tensor
    """Of each program: which tensor."""
    place: Tensor
    """Of each program: which block of it."""
    sizes: Tensor
    first: Tensor
    """Of each tensor: its first program; and one more, the number of programs."""
    count: int


@lru_cache(maxsize=64)
def pieces(sizes: tuple[int, ...], block: int, device: torch.device) -> Pieces:
    blocks = torch.tensor([-(-size // block) for size in sizes], dtype=torch.int64)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), blocks.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    place = torch.arange(int(first[-1])) - first[owner]
    return Pieces(
        owner.int().to(device),
        place.int().to(device),
        torch.tensor(sizes).to(device),
        first.int().to(device),
        int(first[-1]),
    )


def is_whole(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether every tensor begins on 16 bytes and has a multiple of 16 values: then accesses of 16 bytes are."""
    return all(tensor.data_ptr() % 16 == 0 for column in columns for tensor in column) and all(
        tensor.numel() % 16 == 0 for tensor in columns[0]
    )


def places(columns: Sequence[Sequence[Tensor]], whole: bool) -> Tensor:
    """Where each tensor lies, [tensors, columns]: its distance from the first of its column.

    In 16 bytes where ``whole``, else in values. A kernel is handed the first tensor as a pointer and adds the distance;
    it then knows the format, and that the sum lies on 16 bytes, which it could not know of an address.
    """
    rows = []
    for column in columns:
        unit = 16 if whole else column[0].element_size()
        base = column[0].data_ptr()
        rows.append([(tensor.data_ptr() - base) // unit for tensor in column])
    table = torch.tensor(rows, dtype=torch.int64).t().contiguous()
    device = columns[0][0].device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
