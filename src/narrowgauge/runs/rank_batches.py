"""Divides the batches of a step among the ranks, so that all ranks together train like one process.

A batch is a function of its number, so a run has the same batches on any number of ranks. If the microbatches of an
update divide evenly among N ranks, each rank takes every N-th. Otherwise every batch is split by rows. A loss that is a
mean over rows is the same up to rounding. A loss that masks rows is not: each rank's mean counts equally.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from narrowgauge.errors import UsageError


@dataclass(frozen=True)
class RankBatches:
    """The part of every step's batches that one rank trains on."""

    rank: int = 0
    size: int = 1
    """How many ranks there are."""
    accumulate: int = 1
    """Batches per update, over all ranks."""

    @property
    def takes_whole_batches(self) -> bool:
        """Whether each rank takes whole batches. Otherwise it takes rows of every batch."""
        return self.accumulate % self.size == 0

    @property
    def microbatches(self) -> int:
        """How many microbatches the rank has per update."""
        return self.accumulate // self.size if self.takes_whole_batches else self.accumulate

    def batch_numbers(self, step: int) -> range:
        """Return the numbers of the batches that the rank reads for a step."""
        first, last = step * self.accumulate, (step + 1) * self.accumulate
        return range(first + self.rank, last, self.size) if self.takes_whole_batches else range(first, last)

    def select_rows(self, batch: Any) -> Any:
        """Select the rank's rows of a batch; all rows if ranks take whole batches."""
        return batch if self.takes_whole_batches else slice_rows(batch, self.rank, self.size)


def slice_rows(batch: Any, rank: int, size: int) -> Any:
    """Return part ``rank`` of ``size`` equal parts of a batch, by rows."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, collect)
    lengths = {len(tensor) if tensor.dim() else None for tensor in found}
    (length,) = lengths if len(lengths) == 1 else (None,)
    if length is None or length % size:
        shown = ", ".join(str(n) if n is not None else "a scalar" for n in sorted(lengths, key=str)) or "no tensor"
        raise UsageError(
            f"a batch of {shown} rows cannot be split into {size} equal parts, one per rank; choose a --batch or an "
            f"--accumulate that is a multiple of {size}"
        )
    part = length // size
    return map_tensors(batch, lambda tensor: tensor[rank * part : (rank + 1) * part])


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to each tensor of a batch: a tensor, or a nest of dictionaries, lists and tuples."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(item, change) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, change) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(item, change) for item in batch)
    return batch
