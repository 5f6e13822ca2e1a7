"""Many tensors in one launch: a table of their addresses, and of which program handles which block of which tensor.

A program handles one block of one tensor. Sizes rarely change, so the table of blocks is cached. Addresses of gradients
change with every backward, so the table of offsets is sent each time, from pinned memory and without waiting. A CUDA
graph has fixed addresses: its tables are filled once, after it was recorded (``RecordedTables``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockTable:
    """Which program handles which block of which tensor, for tensors of given sizes."""

    tensor_index: Tensor
    """For each program, the index of its tensor."""
    block_index: Tensor
    """For each program, the index of its block within the tensor."""
    sizes: Tensor
    first: Tensor
    """For each tensor, its first program; the last entry is the number of programs."""
    count: int


@dataclass
class RecordedTables:
    """Context in which a CUDA graph is recorded: nothing can be copied from the host then.

    It keeps the tables that the graph reads whenever it runs. Keep it as long as the graph.
    """

    blocks: list[BlockTable] = field(default_factory=list)
    offsets: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Each table on the device, and what it is to contain."""
    current: ClassVar[RecordedTables | None] = None

    def __enter__(self) -> RecordedTables:
        RecordedTables.current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        RecordedTables.current = None
        for table, values in self.offsets if error is None else ():
            table.copy_(values)

    def add(self, values: Tensor, device: torch.device) -> Tensor:
        """Return a table that has these values once the graph was recorded.

        Its memory is not the graph's: another graph that shares that memory would overwrite it.
        """
        with torch.cuda.stream(torch.cuda.default_stream(device)):  # this one is not being recorded
            table = torch.empty(values.shape, dtype=values.dtype, device=device)
        self.offsets.append((table, values))
        return table


def make_block_table(sizes: tuple[int, ...], block: int, device: torch.device) -> BlockTable:
    """Return which program handles which block of which tensor, from a cache."""
    table = make_cached_table(sizes, block, device)
    if RecordedTables.current is not None:
        RecordedTables.current.blocks.append(table)
    return table


@lru_cache(maxsize=64)
def make_cached_table(sizes: tuple[int, ...], block: int, device: torch.device) -> BlockTable:
    blocks = torch.tensor([-(-size // block) for size in sizes], dtype=torch.int64)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), blocks.cumsum(0)])
    tensor_index = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    block_index = torch.arange(int(first[-1])) - first[tensor_index]
    return BlockTable(
        tensor_index.int().to(device),
        block_index.int().to(device),
        torch.tensor(sizes).to(device),
        first.int().to(device),
        int(first[-1]),
    )


def is_aligned(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether every tensor starts at a multiple of 16 bytes and has a multiple of 16 values, for 16-byte accesses."""
    return all(tensor.data_ptr() % 16 == 0 for column in columns for tensor in column) and all(
        tensor.numel() % 16 == 0 for tensor in columns[0]
    )


def make_offset_table(columns: Sequence[Sequence[Tensor]], whole: bool) -> Tensor:
    """Return the offset of each tensor from the first one of its column, as [tensors, columns].

    Offsets are in units of 16 bytes if ``whole``, else in values. A kernel gets the first tensor as a pointer and adds
    the offset, so the compiler knows the format and the 16-byte alignment. It would know neither of a plain address.
    """
    rows = []
    for column in columns:
        unit = 16 if whole else column[0].element_size()
        base = column[0].data_ptr()
        rows.append([(tensor.data_ptr() - base) // unit for tensor in column])
    table = torch.tensor(rows, dtype=torch.int64).t().contiguous()
    device = columns[0][0].device
    if RecordedTables.current is not None:
        return RecordedTables.current.add(table, device)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
