"""Makes the batches of a run's steps, and keeps their random numbers apart from those of the steps.

torch, NumPy and Python each have one global random generator, which batches and dropout share. Code that seeds it while
making a batch also seeds the dropout. In a thread this happens at an unpredictable moment, and equal runs differ. The
task decides how batches are made:

    reads_ahead=False   Batches are made between two steps. The generators are seeded with the run's seed, the split and
                        the batch number, and restored afterwards. A batch that uses them depends only on its number,
                        in every run. A GPU computes meanwhile, so nothing waits.
    reads_ahead=True    The task promises not to use global generators (no built-in task does). A thread makes the next
                        batch during the step. The first batch is checked: if it used a global generator, batches are
                        made as above, and a line reports it.
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
from narrowgauge.data.loader import Batches
from narrowgauge.errors import UsageError
from narrowgauge.runs.finite_batches import BadData, check_finite
from narrowgauge.runs.rank_batches import RankBatches, map_tensors
from narrowgauge.task import Task


class BatchReader:
    """Makes the batches of the training steps from ``first`` to ``last`` (exclusive), in order, on the CPU.

    All batches of a step are made and checked before it starts, so that bad data stops a run between two steps.
    """

    def __init__(
        self,
        task: Task,
        first: int,
        last: int,
        rank_batches: RankBatches | None = None,
        pin: bool = False,
        seed: int = 0,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start with the batches of step ``first``.

        Args:
            task: Makes the batches.
            first: The first step, from 0.
            last: The step before which to stop.
            rank_batches: The part of this rank. None: everything.
            pin: Whether to pin the memory of the batches.
            seed: Seeds the global generators for a task that does not read ahead.
            notify: Prints a line for the user.
        """
        self._task, self._rank_batches, self._pin = task, rank_batches or RankBatches(), pin
        self._seed, self._notify = seed, notify
        self._step, self._last = first, last
        self._thread: _WorkerThread | None = None
        self._next: Future[list[Any]] | None = None
        self._checked_promise = False

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # On KeyboardInterrupt do not wait for a batch: the thread and a loader's workers end with the process.
        wait = kind is None or issubclass(kind, Exception)
        if self._thread is not None:
            self._thread.close(wait)
        if wait and isinstance(self._task.batch, Batches):
            self._task.batch.close()

    def read_step(self) -> list[Any]:
        """Return the microbatches of the next step.

        Raises:
            BadData: The task refuses to make a batch, or a batch holds NaN or infinity.
        """
        if self._next is not None:
            batches = self._next.result()
        elif self._task.reads_ahead and not self._checked_promise:
            batches = self._make_first(self._step)
        else:
            batches = self._make(self._step, isolated=True)
        self._step += 1
        self._next = None
        if self._thread is not None and self._step < self._last:
            self._next = self._thread.submit(self._make, self._step)
        return batches

    def _make_first(self, step: int) -> list[Any]:
        """Make the first batches, and check that the task keeps its promise. If it does, start the thread."""
        self._checked_promise = True
        before = random_state.capture()
        batches = self._make(step)
        if random_state.are_equal(before, random_state.capture()):
            self._thread = _WorkerThread()
            return batches
        random_state.restore(before)
        self._notify("the task reads ahead, but uses a global random generator: its batches are made between steps")
        return self._make(step, isolated=True)

    def _make(self, step: int, isolated: bool = False) -> list[Any]:
        batches = []
        for number in self._rank_batches.batch_numbers(step):
            where = f"step {step + 1}"
            if isolated:
                whole = make_isolated_batch(self._task, number, "train", where, self._seed)
            else:
                whole = make_batch(self._task, number, "train", where)
            batch = self._rank_batches.select_rows(whole)
            batches.append(map_tensors(batch, _pin) if self._pin else batch)
        return batches


class _WorkerThread:
    """A thread that runs one call after the other. It is a daemon: the interpreter does not wait for it at exit."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="narrowgauge-batches", daemon=True)
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
            del job, future, do  # or this batch would stay in memory until the next one is made

    def close(self, wait: bool) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join()


def _pin(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()


def make_batch(task: Task, number: int, split: str, where: str) -> Any:
    """Make a batch and check that it is finite (``finite_batches``).

    Args:
        task: Makes the batch.
        number: The number of the batch.
        split: ``train`` or ``eval``.
        where: What the batch is for, for the error message.

    Raises:
        BadData: The task refuses to make the batch, or it holds NaN or infinity.
    """
    try:
        batch = task.batch(number, split)
    except UsageError as error:
        raise BadData(f"data of {where}: {error}") from error
    try:
        check_finite(batch, where, f"{split} batch {number}")
    except BadData as error:
        error.batch = batch if split == "train" else None
        raise
    return batch


def make_isolated_batch(task: Task, number: int, split: str, where: str, seed: int = 0) -> Any:
    """Make a batch between two steps, with the global generators seeded by seed, split and number, then restored."""
    with random_state.seed_temporarily(seed, split, number):
        return make_batch(task, number, split, where)


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch to a device, without waiting for the copy."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
