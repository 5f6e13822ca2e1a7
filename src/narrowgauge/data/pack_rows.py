"""Packs documents into rows of ``context`` tokens, so that little of a row is unused.

    for each document, from the longest to the shortest:
        put it into the row with the least free space that is enough for it; if there is none, into a new row

This is best-fit decreasing: it needs at most 11/9 of the fewest rows possible, plus 4 (Johnson et al., 1974). No
document is divided. Documents of the same length come in an order that depends on the seed, and so do the documents of
a row. Each document has position_ids from 0, by which attention keeps it apart from the others; so has the unused end
of a row, as one document of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_LABEL = -100
"""The label of a token without loss: torch's default for ``ignore_index``."""


@dataclass(frozen=True)
class PackedRows:
    """Which documents are in which row."""

    documents: NDArray[np.int64]
    """The documents of all rows, one row after the other."""
    ends: NDArray[np.int64]
    """Where each row ends in ``documents``."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        """Return the documents of a row, in their order."""
        start = self.ends[row - 1] if row else 0
        return self.documents[start : self.ends[row]]


def make_generator(*seed: object) -> np.random.Generator:
    """Make a generator of random numbers from anything that has a repr."""
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def pack_rows(lengths: Sequence[int] | NDArray[np.int64], context: int, seed: int) -> PackedRows:
    """Pack documents into rows.

    Args:
        lengths: Number of tokens of each document: at least 1, at most ``context``.
        context: Tokens in a row.
        seed: Decides the order of documents that fit equally well.

    Returns:
        The rows. Every document is in exactly one of them.
    """
    sizes = np.asarray(lengths, np.int64)
    generator = make_generator("rows", seed)
    shuffled = generator.permutation(len(sizes))
    decreasing = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    rows: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(context + 1)]
    """The rows by the number of tokens that are free."""
    some_have = 0
    """Bit n: there is a row with n free tokens. The lowest bit from a length on is then the best fit."""
    for document, size in zip(decreasing.tolist(), sizes[decreasing].tolist(), strict=True):
        fitting = some_have >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            row = with_space[free].pop()
            if not with_space[free]:
                some_have ^= 1 << free
        else:
            free, row = context, len(rows)
            rows.append([])
        rows[row].append(document)
        left = free - size
        if not with_space[left]:
            some_have |= 1 << left
        with_space[left].append(row)
    for documents in rows:
        generator.shuffle(documents)
    flat = np.fromiter((document for documents in rows for document in documents), np.int64, len(sizes))
    return PackedRows(flat, np.cumsum([len(documents) for documents in rows], dtype=np.int64))


@dataclass(frozen=True)
class RowArrays:
    """The tokens of one row, or of several: each array has one more dimension then."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]


def fill_row(documents: Sequence[tuple[NDArray[np.int32], NDArray[np.uint8]]], context: int, pad: int) -> RowArrays:
    """Lay documents out in a row.

    Args:
        documents: The tokens of each document, and which of them carry loss.
        context: Tokens in the row.
        pad: The token for the unused end.
    """
    input_ids = np.full(context, pad, np.int64)
    labels = np.full(context, NO_LABEL, np.int64)
    position_ids = np.empty(context, np.int64)
    place = 0
    for tokens, has_loss in documents:
        end = place + len(tokens)
        input_ids[place:end] = tokens
        labels[place:end] = np.where(has_loss != 0, tokens, NO_LABEL)
        labels[place] = NO_LABEL  # the last token of the document before must not predict it
        position_ids[place:end] = np.arange(len(tokens))
        place = end
    position_ids[place:] = np.arange(context - place)
    return RowArrays(input_ids, labels, position_ids)
