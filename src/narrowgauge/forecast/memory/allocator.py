"""Simulates PyTorch's caching allocator for CUDA: how much is allocated and reserved as blocks come and go.

    size      rounded up to 512 bytes
    pool      small for up to 1 MiB, else large
    reuse     the smallest free piece of the pool that is large enough; of equal ones the lowest address
    segment   if there is none: 2 MiB for small, 20 MiB for less than 10 MiB, else the size rounded up to 2 MiB
    split     the rest of a piece becomes a free piece if it has at least 512 bytes (small) or more than 1 MiB (large);
              otherwise it is allocated too, which is why torch's figure exceeds the sum of the tensors
    free      a piece merges with its free neighbors in the segment

``allocated`` is what ``torch.cuda.max_memory_allocated`` counts. ``reserved`` is what the process takes from the GPU,
without CUDA's own context.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

UNIT = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
MIDDLE = 10 << 20
MIDDLE_SEGMENT = 20 << 20
ROUND = 2 << 20


@dataclass(slots=True, eq=False)
class _Piece:
    start: int
    size: int
    small: bool
    free: bool = True
    before: _Piece | None = None
    after: _Piece | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.start


class CachingAllocator:
    """Allocates addresses without memory."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._end = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._at: dict[int, _Piece] = {}

    def allocate(self, size: int) -> int:
        """Allocate a block and return its address."""
        size = -(-max(size, 1) // UNIT) * UNIT
        small = size <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, -1))
        if place < len(free):
            piece = self._at[free.pop(place)[1]]
        else:
            piece = self._segment(size, small)
        rest = piece.size - size
        if rest >= UNIT if small else rest > SMALL:
            self._split(piece, size)
        piece.free = False
        self.allocated += piece.size
        return piece.start

    def release(self, address: int) -> None:
        """Free a block."""
        piece = self._at[address]
        self.allocated -= piece.size
        piece.free = True
        for other in (piece.before, piece.after):
            if other is not None and other.free:
                self._unlist(other)
                piece = self._join(*((other, piece) if other.start < piece.start else (piece, other)))
        bisect.insort(self._free[piece.small], piece.key)

    def _segment(self, size: int, small: bool) -> _Piece:
        whole = SMALL_SEGMENT if small else MIDDLE_SEGMENT if size < MIDDLE else -(-size // ROUND) * ROUND
        piece = self._at[self._end] = _Piece(self._end, whole, small)
        self._end += whole
        self.reserved += whole
        return piece

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(piece.start + size, piece.size - size, piece.small, True, piece, piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.after, piece.size = rest, size
        self._at[rest.start] = rest
        bisect.insort(self._free[rest.small], rest.key)

    def _join(self, left: _Piece, right: _Piece) -> _Piece:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        del self._at[right.start]
        return left

    def _unlist(self, piece: _Piece) -> None:
        free = self._free[piece.small]
        del free[bisect.bisect_left(free, piece.key)]
