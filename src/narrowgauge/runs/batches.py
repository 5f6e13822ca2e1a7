"""Makes the batches of a run's steps, so that what they draw never meets what a step draws.

torch, NumPy and Python have one global generator each, for a batch and for the dropout of the step beside it alike. Who
seeds them in a batch seeds the dropout; who does so in a thread seeds it at a moment that nobody can tell, and equal
runs differ. So it is decided by what the task says of itself:

    reads_ahead=False   batches are made between two steps. The generators are seeded by the run's seed, the split and
                        the batch's number, and put back afterwards: a batch that draws from them, seeded or not, at any
                        step, is the same for its number in every run. A GPU computes meanwhile: nothing waits for it.
    reads_ahead=True    the task promises to leave global generators alone (all built-in tasks do): the next batch is
                        made by a thread during the step. The first is looked at: where it touched one, batches are made
                        as above, and a line says so.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from narrowgauge import random_state
from narrowgauge.errors import UsageError
from narrowgauge.runs.rank_batches import Share, transform
from narrowgauge.task import Task


class BadData(UsageError):
    """The task gave a batch that cannot be trained on."""


class Feed:
    """The batches of each training step from ``first`` up to ``last``, in order, on the CPU.

    A step's batches come together and checked, so that bad data stops a run between two steps and never inside one.
    """

    def __init__(
        self,
        task: Task,
        first: int,
        last: int,
        share: Share | None = None,
        pin: bool = False,
        seed: int = 0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._task, self._share, self._pin, self._seed, self._tell = task, share or Share(), pin, seed, tell
        self._step, self._last = first, last
        self._ahead: _Ahead | None = None
        self._next: Future[list[Any]] | None = None
        self._looked = False

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ahead is not None:
            # Who quits at once does not wait for a batch: the thread ends with the process.
            self._ahead.close(wait=kind is None or issubclass(kind, Exception))

    def take(self) -> list[Any]:
        """The microbatches of the next step."""
        if self._next is not None:
            batches = self._next.result()
        elif self._task.reads_ahead and not self._looked:
            batches = self._look(self._step)
        else:
            batches = self._make(self._step, alone=True)
        self._step += 1
        self._next = None
        if self._ahead is not None and self._step < self._last:
            self._next = self._ahead.submit(self._make, self._step)
        return batches

    def _look(self, step: int) -> list[Any]:
        """The first batches, and whether the task keeps its promise."""
        self._looked = True
        before = random_state.capture()
        batches = self._make(step)
        if random_state.are_equal(before, random_state.capture()):
            self._ahead = _Ahead()
            return batches
        random_state.restore(before)
        self._tell("the task reads ahead, but draws from a global generator: its batches are made between steps")
        return self._make(step, alone=True)

    def _make(self, step: int, alone: bool = False) -> list[Any]:
        batches = []
        for number in self._share.numbers(step):
            where = f"step {step + 1}"
            made = make_alone(self._task, number, "train", where, self._seed) if alone else None
            batch = self._share.cut(made if alone else make_batch(self._task, number, "train", where))
            batches.append(transform(batch, _pin) if self._pin else batch)
        return batches


class _Ahead:
    """One thread that does one thing after the other; the interpreter does not wait for it when it ends."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="narrowgauge-feed", daemon=True)
        self._thread.start()

    def submit(self, do: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.put((future, lambda: do(*arguments)))
        return future

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            future, do = job
            try:
                future.set_result(do())
            except BaseException as error:
                future.set_exception(error)
            del job, future, do  # a batch must not be held until the next one is there

    def close(self, wait: bool) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join()


def _pin(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()


def make_batch(task: Task, number: int, split: str, where: str) -> Any:
    """A batch of the task, checked; what is wrong with it is said with ``where`` it was needed."""
    try:
        batch = task.batch(number, split)
    except UsageError as error:
        raise BadData(f"the data of {where}: {error}") from error
    check_finite(batch, where, f"{split} batch {number}")
    return batch


def make_alone(task: Task, number: int, split: str, where: str, seed: int = 0) -> Any:
    """The same between two steps: what it draws from global generators depends on seed, split and number alone."""
    with random_state.seed_temporarily(seed, split, number):
        return make_batch(task, number, split, where)


def to_device(batch: Any, device: torch.device) -> Any:
    return transform(batch, lambda tensor: tensor.to(device, non_blocking=True))


def check_finite(batch: Any, where: str, name: str) -> None:
    """Refuse NaN and infinity in the data, which no precision could train on."""
    if isinstance(batch, Tensor):
        if batch.is_floating_point() and not bool(torch.isfinite(batch).all()):
            broken = int((~torch.isfinite(batch)).sum())
            raise BadData(
                f"the data of {where} is not finite: {name} (shape {tuple(batch.shape)}) holds {broken} NaN or "
                "infinite values; mend the data, then train again or go on with --resume"
            )
    elif isinstance(batch, dict):
        for key, item in batch.items():
            check_finite(item, where, f"{name}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for index, item in enumerate(batch):
            check_finite(item, where, f"{name}[{index}]")
