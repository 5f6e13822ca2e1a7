"""Parameters that are stored in parts: the matrices of experts, one tensor in the model and one for each in the file.

transformers describes this as operations on tensors: stack the experts, then put gate and up below each other. In
memory both mean that one part follows the other, so a parameter can be read piece by piece like any other. Parameters
that need other operations are left to transformers (``Match.conversion``).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from narrowgauge.pretrained.folder import StoredTensor


@dataclass(frozen=True, kw_only=True)
class StackedTensor:
    """A parameter whose values are those of several stored tensors, one after the other."""

    name: str
    parts: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    scale: None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def locate(self, start: int, stop: int) -> Iterator[tuple[Path, int, int]]:
        """Yield file, position of the first byte and number of bytes of each part of values ``start`` to ``stop``."""
        while start < stop:
            index = bisect.bisect_right(self._ends, start)
            begin, end = self._ends[index] - self.parts[index].numel, min(self._ends[index], stop)
            yield from self.parts[index].locate(start - begin, end - begin)
            start = end

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(part.numel for part in self.parts))


AnyTensor = StoredTensor | StackedTensor


def find_stacking(converters: Iterable[Any], pattern: str) -> Sequence[str] | None:
    """Return the patterns of the tensors that are put below each other for each expert, in their order.

    Args:
        converters: ``WeightConverter`` objects of transformers.
        pattern: One of their source patterns.

    Returns:
        None if the converter does anything else than stack experts and concatenate their rows.
    """
    for converter in [one for one in converters if pattern in one.source_patterns][-1:]:
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
        stacks, joins = [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]
        one = len(converter.source_patterns) == 1
        known = steps == joins or (steps == stacks and one)
        return list(converter.source_patterns) if known and len(converter.target_patterns) == 1 else None
    return None


def stack(name: str, order: Sequence[str], found: Mapping[str, Sequence[StoredTensor]]) -> StackedTensor | None:
    """Stack the stored tensors of a parameter, or return None if some are missing or do not fit together.

    Args:
        name: The parameter's name in the model.
        order: The patterns, from ``find_stacking``.
        found: The tensors of each pattern, in the order of the experts.
    """
    columns = [found.get(pattern, ()) for pattern in order]
    if not columns[0] or len({len(column) for column in columns}) > 1:
        return None
    parts = tuple(part for row in zip(*columns, strict=True) for part in row)
    shapes = [column[0].shape for column in columns]
    same = all(part.shape == shape for column, shape in zip(columns, shapes, strict=True) for part in column)
    fits = len({len(shape) for shape in shapes}) == 1 and len({shape[1:] for shape in shapes}) == 1 and shapes[0]
    if not same or not fits or len({part.dtype for part in parts}) > 1:
        return None
    return StackedTensor(
        name=name, parts=parts, shape=(len(columns[0]), sum(shape[0] for shape in shapes), *shapes[0][1:])
    )
