"""Numbered batches out of a torch DataLoader, or of anything else that can be iterated over again and again.

A run asks for batch number N, a loader gives the next one. Between the two stands a place, and a seed for each place:

    batch(number, split):
        epoch, place = where number lies (by the loader's length, or by counting where it has none)
        unless the iterator stands there:  iter(loader) under the seed of the epoch; next() until place
        next(iterator) under the seed of (epoch, place)

So shuffling, samplers, augmentation and the seeds of workers depend on the number alone. A resumed run sees what the
undisturbed one would have seen. What that costs: batches before the place are read again, or only their indices are
drawn where no worker has a random state that depends on them.
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
"""Batches to pass over before a line says so."""


class Batches:
    """``batch(number, split)`` of a task, out of loaders."""

    def __init__(self, data: Any, seed: int = 0) -> None:
        """``data``: a loader, a mapping of splits to loaders, or a function that makes the loader of a split."""
        self.data, self.seed = data, seed
        self._readers: dict[str, _Reader] = {}

    def __call__(self, number: int, split: str) -> Any:
        if split not in self._readers:
            self._readers[split] = _Reader(self.loader(split), split, self.seed)
        return self._readers[split].take(number)

    def loader(self, split: str) -> Iterable[Any]:
        """The loader of a split; where there is none for evaluation, that of training."""
        found = self.data
        if isinstance(found, Mapping):
            found = found[split] if split in found else found.get("train")
        elif callable(found):
            found = found(split)
        check(found, split)
        return found  # type: ignore[no-any-return]

    def known_size(self, split: str) -> int | None:
        """How many batches a split has, where that is known without making its loader."""
        return None if callable(self.data) else length(self.loader(split))

    def items_per_batch(self) -> int | None:
        """The batch size of the training loader, where that is known without making it."""
        loader = None if callable(self.data) else self.loader("train")
        if not isinstance(loader, DataLoader):
            return None
        size = getattr(loader.batch_sampler, "batch_size", None) if loader.batch_size is None else loader.batch_size
        return size if isinstance(size, int) else None


def check(loader: Any, split: str) -> None:
    """Refuse what cannot give the batches of a run."""
    if loader is None:
        raise UsageError(f"the task's data has no {split}; give a loader for it")
    if isinstance(loader, Dataset) or not isinstance(loader, Iterable):
        raise UsageError(f"the task's data for {split} is a {type(loader).__name__}; give a DataLoader over it")
    if isinstance(loader, Iterator):
        raise UsageError(
            f"the task's data for {split} is a {type(loader).__name__}, which can be read only once; "
            "give a DataLoader, or a class whose __iter__ starts anew"
        )
    for sampler in _samplers(loader):
        if getattr(sampler, "num_replicas", 1) > 1:
            raise UsageError(
                f"the task's data for {split} has a {type(sampler).__name__}; leave it out: batches are those of all "
                "ranks together, and each rank takes its part of them"
            )


def length(loader: Iterable[Any]) -> int | None:
    """How many batches an epoch has, where that can be relied on."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # what such a dataset says of its length need not be true with workers
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


class _Reader:
    """The batches of one split, with an iterator that stands somewhere in them."""

    def __init__(self, loader: Iterable[Any], split: str, seed: int) -> None:
        self._loader, self._split = loader, split
        self._length = length(loader)
        if self._length == 0:
            raise UsageError(f"the loader for {split} has no batches; give it data, or a smaller batch")
        generator = getattr(loader, "generator", None)
        own = None if generator is None else generator.initial_seed()  # what the user seeded it with counts, too
        self._seed = (seed, split, own)
        self._starts = [0]
        """The number of the first batch of every epoch that is known."""
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._place = 0, 0
        """Where the iterator stands: the next batch that it gives."""

    def take(self, number: int) -> Any:
        epoch = self._epoch_of(number)
        place = number - self._start(epoch)
        if (
            self._iterator is None
            or (self._epoch, self._place) > (epoch, place)
            or (self._length and self._epoch != epoch)
        ):
            self._begin(epoch)
        passed = number - self._start(self._epoch) - self._place
        if passed >= MANY:
            cache.say(f"passing over {passed:,} batches of {self._split} that were trained on before")
        while self._start(self._epoch) + self._place < number:
            self._next(only_pass=True)
        return self._next()

    def _start(self, epoch: int) -> int:
        return epoch * self._length if self._length else self._starts[epoch]

    def _epoch_of(self, number: int) -> int:
        if self._length:
            return number // self._length
        return bisect.bisect_right(self._starts, number) - 1

    def _begin(self, epoch: int) -> None:
        loader = self._loader
        self._iterator = None
        with _seeded(self._seed, epoch) as seed:
            for part in (loader, *_samplers(loader), getattr(loader, "dataset", None)):
                if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                    generator.manual_seed(seed)
                if callable(set_epoch := getattr(part, "set_epoch", None)):
                    set_epoch(epoch)
            if isinstance(loader, DataLoader):
                loader._iterator = None  # persistent workers would keep the random states of the epoch before
            self._iterator = iter(loader)
        self._epoch, self._place = epoch, 0

    def _next(self, only_pass: bool = False) -> Any:
        """The next batch, of the next epoch where this one is over."""
        assert self._iterator is not None
        try:
            with _seeded(self._seed, self._epoch, self._place):
                batch = self._pass(self._iterator) if only_pass else next(self._iterator)
        except StopIteration:
            if not self._place:
                raise UsageError(f"the loader for {self._split} gives no batches; give it data") from None
            if self._length:
                raise UsageError(
                    f"the loader for {self._split} has {self._place} batches, where its length is {self._length}"
                ) from None
            if len(self._starts) == self._epoch + 1:
                self._starts.append(self._starts[-1] + self._place)
            self._begin(self._epoch + 1)
            return self._next(only_pass)
        self._place += 1
        return batch

    def _pass(self, iterator: Iterator[Any]) -> Any:
        """Pass over a batch: without loading it, where the next ones do not depend on that."""
        loader = self._loader
        draw: Callable[[], Any] | None = getattr(iterator, "_next_index", None)
        if isinstance(loader, DataLoader) and loader.num_workers == 0 and self._length and draw is not None:
            return draw()
        return next(iterator)


def _samplers(loader: Any) -> list[Any]:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return []
    found = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return [one for index, one in enumerate(found) if one is not None and one not in found[:index]]


_LOCK = threading.RLock()
"""A run may read training batches in a thread while it evaluates: there is one set of global generators for both."""


@contextlib.contextmanager
def _seeded(*what: Any) -> Iterator[int]:
    """Global generators of the CPU seeded by ``what``, and put back afterwards. GPUs have no part in data."""
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
