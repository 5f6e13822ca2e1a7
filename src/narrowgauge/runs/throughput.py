"""How fast a run goes: steady steps alone, without the first one (which compiles), evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Pace:
    """Counts steps and seconds. A count is closed when the numbers of all its steps are here, so GPU time is in it."""

    def __init__(self, items_per_step: int) -> None:
        self._items = items_per_step
        self._earlier_s = 0.0
        self._began = self._ticked = time.perf_counter()
        self._since: float | None = None
        self._pending = self._counted = 0
        self._counted_s = 0.0
        self._all = 0

    def begin(self, earlier_s: float) -> None:
        """A life of the run begins, after ``earlier_s`` seconds of training in earlier ones."""
        self._earlier_s = earlier_s
        self._began = self._ticked = time.perf_counter()

    def seconds(self) -> float:
        """Seconds of training so far, earlier lives included."""
        return self._earlier_s + time.perf_counter() - self._began

    def tick(self, steps: int) -> float:
        """Numbers of some steps arrived: their items a second."""
        now = time.perf_counter()
        rate = steps * self._items / max(now - self._ticked, 1e-9)
        self._ticked = now
        self._all += steps
        self._pending += steps
        if self._since is None:  # the first step is over
            self._since, self._pending = now, 0
        return rate

    @property
    def began(self) -> bool:
        """Whether the first step of this life is over."""
        return self._since is not None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the count. All numbers must have arrived."""
        self._close()
        yield
        self._since = self._ticked = time.perf_counter()

    def _close(self) -> None:
        if self._since is not None:
            self._counted_s += time.perf_counter() - self._since
            self._counted += self._pending
            self._pending = 0

    def rate(self) -> float | None:
        """Items a second in steady steps; of the first step, where there was no other; None without any."""
        if self._counted:
            return self._counted * self._items / max(self._counted_s, 1e-9)
        whole_s = time.perf_counter() - self._began
        return self._all * self._items / max(whole_s, 1e-9) if self._all else None
