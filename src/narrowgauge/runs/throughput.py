"""Measures the throughput of a run in steady steps: without the first (compilation), evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Throughput:
    """Counts steps and seconds. A step is counted when its metrics have arrived, so that its GPU time is included."""

    def __init__(self, items_per_step: int) -> None:
        self._items = items_per_step
        self._earlier_s = 0.0
        self._started = self._ticked = time.perf_counter()
        self._since: float | None = None
        self._pending = self._counted = 0
        self._counted_s = 0.0
        self._all = 0

    def start(self, earlier_s: float) -> None:
        """Start the clock of this process, after ``earlier_s`` seconds of training in earlier processes of the run."""
        self._earlier_s = earlier_s
        self._started = self._ticked = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds of training so far, earlier processes of the run included."""
        return self._earlier_s + time.perf_counter() - self._started

    def count(self, steps: int) -> float:
        """Count steps whose metrics have arrived. Returns their items per second."""
        now = time.perf_counter()
        rate = steps * self._items / max(now - self._ticked, 1e-9)
        self._ticked = now
        self._all += steps
        self._pending += steps
        if self._since is None:  # the first step is over
            self._since, self._pending = now, 0
        return rate

    @property
    def is_steady(self) -> bool:
        """Whether the first step of this process is over."""
        return self._since is not None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the count. The metrics of all steps must have arrived."""
        self._close()
        yield
        self._since = self._ticked = time.perf_counter()

    def _close(self) -> None:
        if self._since is not None:
            self._counted_s += time.perf_counter() - self._since
            self._counted += self._pending
            self._pending = 0

    def rate(self) -> float | None:
        """Return items per second of the steady steps, or of the first step if it is the only one; None before it."""
        if self._counted:
            return self._counted * self._items / max(self._counted_s, 1e-9)
        whole_s = time.perf_counter() - self._started
        return self._all * self._items / max(whole_s, 1e-9) if self._all else None
