"""Makes batches: the next one is made, checked and pinned by a thread while the current one is trained on.

A batch is a pure function of its number, so a thread changes nothing about what is trained. Some tasks make it pure by
seeding torch's global generator, which would disturb the dropout of the step that runs meanwhile: a feed looks whether
the first batch touched a global generator, and if so makes all of them in the foreground and puts the generators back.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from narrowgauge import random_state
from narrowgauge.errors import UsageError
from narrowgauge.runs.share import Share, transform
from narrowgauge.task import Task


class BadData(UsageError):
    """The task gave a batch that cannot be trained on."""


class Feed:
    """The batches of each training step from ``first`` up to ``last``, in order, on the CPU.

    A step's batches come together and checked, so that bad data stops a run between two steps and never inside one.
    """

    def __init__(self, task: Task, first: int, last: int, share: Share | None = None, pin: bool = False) -> None:
        self._task, self._share, self._pin = task, share or Share(), pin
        self._step, self._last = first, last
        self._thread: ThreadPoolExecutor | None = None
        self._next: Future[list[Any]] | None = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self) -> list[Any]:
        """The microbatches of the next step."""
        batches = self._make_guarded(self._step) if self._next is None else self._next.result()
        self._step += 1
        self._next = None
        if self._thread is not None and self._step < self._last:
            self._next = self._thread.submit(self._make, self._step)
        return batches

    def _make_guarded(self, step: int) -> list[Any]:
        before = random_state.capture()
        batches = self._make(step)
        if random_state.same(before, random_state.capture()):
            self._thread = self._thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="narrowgauge-feed")
        else:
            random_state.restore(before)
        return batches

    def _make(self, step: int) -> list[Any]:
        batches = []
        for number in self._share.numbers(step):
            batch = self._share.cut(make_batch(self._task, number, "train", f"step {step + 1}"))
            batches.append(transform(batch, _pin) if self._pin else batch)
        return batches


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
