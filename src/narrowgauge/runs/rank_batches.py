"""Which part of a step's batches a rank trains on, so that all ranks together do what one process would.

A batch is a function of its number, and a run means the same on any number of ranks: where the microbatches of an
update can be dealt out evenly, each rank takes every N-th; else every batch is cut by rows. A loss that is a mean over
rows comes out the same, but for rounding (one that leaves rows out, by a mask, weighs them by their part).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from narrowgauge.errors import UsageError


@dataclass(frozen=True)
class Share:
    """A rank's part of every step."""

    rank: int = 0
    size: int = 1
    accumulate: int = 1
    """Batches that make an update, over all ranks."""

    @property
    def dealt(self) -> bool:
        """Whether ranks take whole batches."""
        return self.accumulate % self.size == 0

    @property
    def microbatches(self) -> int:
        """How many a rank has in an update."""
        return self.accumulate // self.size if self.dealt else self.accumulate

    def numbers(self, step: int) -> range:
        """The numbers of the batches that the rank takes part in."""
        first, last = step * self.accumulate, (step + 1) * self.accumulate
        return range(first + self.rank, last, self.size) if self.dealt else range(first, last)

    def cut(self, batch: Any) -> Any:
        """The rank's rows of a batch; all of them where it takes whole batches."""
        return batch if self.dealt else rows_of(batch, self.rank, self.size)


def rows_of(batch: Any, rank: int, size: int) -> Any:
    """One of ``size`` equal parts of a batch, by rows."""
    found: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    transform(batch, see)
    lengths = {len(tensor) if tensor.dim() else None for tensor in found}
    (length,) = lengths if len(lengths) == 1 else (None,)
    if length is None or length % size:
        shown = ", ".join(str(n) if n is not None else "a scalar" for n in sorted(lengths, key=str)) or "no tensor"
        raise UsageError(
            f"a batch of {shown} rows cannot be cut into {size} equal parts, one for each rank; take a --batch that is "
            f"a multiple of {size}, or such an --accumulate"
        )
    part = length // size
    return transform(batch, lambda tensor: tensor[rank * part : (rank + 1) * part])


def transform(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with each of its tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: transform(item, change) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(transform(item, change) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(transform(item, change) for item in batch)
    return batch
