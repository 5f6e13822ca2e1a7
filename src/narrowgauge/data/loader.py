"""Numbered batches from a torch DataLoader, or from any other iterable that can be iterated again.

A run needs batch number N, but a loader only gives the next one. So each batch has a position in its epoch, and a seed:

    batch(number, split):
        epoch, position = where number is (by the loader's length, or by counting if it has none)
        unless the iterator is there:  iter(loader) with the seed of the epoch; next() until position
        next(iterator) with the seed of (epoch, position)

Shuffling, samplers, augmentation and the seeds of workers then depend only on the number, so a resumed run has the same
batches as an uninterrupted one. The cost: on resume, the batches of the epoch before the position are read again. If no
worker has a random state that depends on them, only their indices are.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from narrowgauge.data import cache
from narrowgauge.errors import UsageError

MANY = 1000
"""From this many skipped batches on, a line reports them."""


class Batches:
    """The function ``batch(number, split)`` of a task, made from loaders."""

    def __init__(self, data: Any, seed: int = 0) -> None:
        """Make the function.

        Args:
            data: A loader, a mapping of splits to loaders, or a function that returns the loader of a split.
            seed: Seeds shuffling and augmentation, besides the seed of the loader's own generator.
        """
        self.data, self.seed = data, seed
        self._readers: dict[str, _Reader] = {}

    def __call__(self, number: int, split: str) -> Any:
        if split not in self._readers:
            self._readers[split] = _Reader(self.loader(split), split, self.seed)
        return self._readers[split].take(number)

    def loader(self, split: str) -> Iterable[Any]:
        """Return the loader of a split. If there is none for evaluation, return that of training."""
        found = self.data
        if isinstance(found, Mapping):
            found = found[split] if split in found else found.get("train")
        elif callable(found):
            found = found(split)
        check_loader(found, split)
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the workers of the loaders. The next batch starts them again."""
        for reader in self._readers.values():
            reader.close()

    def known_size(self, split: str) -> int | None:
        """Return how many batches a split has, or None if that is not known without making its loader."""
        return None if callable(self.data) else count_batches(self.loader(split))

    def items_per_batch(self) -> int | None:
        """Return the batch size of the training loader, or None if that is not known without making it."""
        loader = None if callable(self.data) else self.loader("train")
        if not isinstance(loader, DataLoader):
            return None
        size = getattr(loader.batch_sampler, "batch_size", None) if loader.batch_size is None else loader.batch_size
        return size if isinstance(size, int) else None


def check_loader(loader: Any, split: str) -> None:
    """Raise UsageError if the loader cannot give the batches of a run."""
    if loader is None:
        raise UsageError(f"the task's data has no {split}; give a loader for it")
    if isinstance(loader, Dataset) or not isinstance(loader, Iterable):
        raise UsageError(f"the task's data for {split} is a {type(loader).__name__}; give a DataLoader over it")
    if isinstance(loader, Iterator):
        raise UsageError(
            f"the task's data for {split} is a {type(loader).__name__}, which can be read only once; "
            "give a DataLoader, or a class whose __iter__ starts again"
        )
    for sampler in _samplers(loader):
        if getattr(sampler, "num_replicas", 1) > 1:
            raise UsageError(
                f"the task's data for {split} has a {type(sampler).__name__}; leave it out: batches are for all "
                "ranks together, and each rank takes its part of them"
            )


def count_batches(loader: Iterable[Any]) -> int | None:
    """Return how many batches an epoch has, or None if the loader's length is not reliable."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # with workers, the length of such a dataset may be wrong
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


class _Reader:
    """Reads the batches of one split, with an iterator that is at some position."""

    def __init__(self, loader: Iterable[Any], split: str, seed: int) -> None:
        self._loader, self._split = loader, split
        self._length = count_batches(loader)
        if self._length == 0:
            raise UsageError(f"the loader for {split} has no batches; give it data, or a smaller batch")
        generator = getattr(loader, "generator", None)
        own = None if generator is None else generator.initial_seed()  # the user's own seed counts, too
        self._seed = (seed, split, own)
        self._starts = [0]
        """The number of the first batch of every epoch that is known."""
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._position = 0, 0
        """The position of the iterator: the next batch that it gives."""

    def take(self, number: int) -> Any:
        epoch = self._epoch_of(number)
        position = number - self._start(epoch)
        if (
            self._iterator is None
            or (self._epoch, self._position) > (epoch, position)
            or (self._length and self._epoch != epoch)
        ):
            self._start_epoch(epoch)
        skipped = number - self._start(self._epoch) - self._position
        if skipped >= MANY:
            cache.print_status(f"skipping {skipped:,} batches of {self._split} that were used before")
        while self._start(self._epoch) + self._position < number:
            self._next(skip=True)
        return self._next()

    def close(self) -> None:
        """Give up the iterator, whose workers end. Persistent ones would keep the random states of their epoch."""
        self._iterator = None
        if isinstance(self._loader, DataLoader):
            self._loader._iterator = None

    def _start(self, epoch: int) -> int:
        return epoch * self._length if self._length else self._starts[epoch]

    def _epoch_of(self, number: int) -> int:
        if self._length:
            return number // self._length
        return bisect.bisect_right(self._starts, number) - 1

    def _start_epoch(self, epoch: int) -> None:
        loader = self._loader
        self.close()
        with _seeded(self._seed, epoch) as seed:
            for part in (loader, *_samplers(loader), getattr(loader, "dataset", None)):
                if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                    generator.manual_seed(seed)
                if callable(set_epoch := getattr(part, "set_epoch", None)):
                    set_epoch(epoch)
            self._iterator = iter(loader)
        self._epoch, self._position = epoch, 0

    def _next(self, skip: bool = False) -> Any:
        """Read the next batch; the first of the next epoch if this one is over."""
        assert self._iterator is not None
        try:
            with _seeded(self._seed, self._epoch, self._position):
                batch = self._skip(self._iterator) if skip else next(self._iterator)
        except StopIteration:
            if not self._position:
                raise UsageError(f"the loader for {self._split} gives no batches; give it data") from None
            if self._length:
                raise UsageError(
                    f"the loader for {self._split} has {self._position} batches, but its length is {self._length}"
                ) from None
            if len(self._starts) == self._epoch + 1:
                self._starts.append(self._starts[-1] + self._position)
            self._start_epoch(self._epoch + 1)
            return self._next(skip)
        self._position += 1
        return batch

    def _skip(self, iterator: Iterator[Any]) -> Any:
        """Skip a batch, without loading it if the next ones do not depend on it."""
        loader = self._loader
        next_index: Callable[[], Any] | None = getattr(iterator, "_next_index", None)
        if isinstance(loader, DataLoader) and loader.num_workers == 0 and self._length and next_index is not None:
            return next_index()
        return next(iterator)


def _samplers(loader: Any) -> list[Any]:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return []
    found = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return [one for index, one in enumerate(found) if one is not None and one not in found[:index]]


_LOCK = threading.RLock()
"""A run may read training batches in a thread while it evaluates, and both use the global generators."""


@contextlib.contextmanager
def _seeded(*what: Any) -> Iterator[int]:
    """Seed the global generators of the CPU by ``what`` for the block, then restore them. Data does not use GPUs."""
    value = int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "little")
    with _LOCK:
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            torch.default_generator.manual_seed(value)
            random.seed(value)
            np.random.seed(value % 2**32)
            yield value
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])
