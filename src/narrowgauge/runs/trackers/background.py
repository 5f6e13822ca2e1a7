"""Runs a tracker in a thread, so that training never waits for it.

A tracker may import for seconds and wait for a network. A step only puts a dictionary in the queue of the thread. A
tracker that is not installed, cannot be reached or fails costs one line, and training continues without it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from narrowgauge.runs import record
from narrowgauge.runs.trackers.base import Notify, Tracker, Unavailable

CLOSE_TIMEOUT_S = 60.0
"""How long the end of a run waits for a tracker that is still sending."""
MAX_QUEUED = 1_000_000
"""Entries that may wait in the queue of a tracker: some hundred MB."""
FLUSH_EVERY_S = 2.0
"""How long metrics are collected before they are sent."""

_RECORD_HAS_ALL = f"{record.EVENTS} holds the same numbers"


class BackgroundTracker:
    """Passes every call to a tracker that lives in a thread. Notifies the user in one line if the tracker fails."""

    def __init__(self, label: str, make: Callable[[Notify], Tracker], notify: Notify) -> None:
        self._label, self._notify = label, notify
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._lines: deque[str] = deque()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, args=(make,), name=label, daemon=True)
        self._thread.start()

    def log_metrics(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self._enqueue("log_metrics", group, step, dict(values))

    def log_finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._enqueue("log_finding", step, dict(finding))

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        if self._is_over:
            return
        self._enqueue("close", None if result is None else dict(result))
        self._is_over = True
        self._thread.join(CLOSE_TIMEOUT_S)
        self._pass_on_lines()
        if self._thread.is_alive():
            self._notify(
                f"{self._label} is still sending after {CLOSE_TIMEOUT_S:.0f} s; not waiting for it; {_RECORD_HAS_ALL}"
            )

    def _enqueue(self, method: str, *arguments: Any) -> None:
        self._pass_on_lines()
        if self._is_over:
            return
        self._queue.put((method, arguments))
        if self._queue.qsize() > MAX_QUEUED:
            self._is_over = True
            self._notify(
                f"{self._label} does not accept metrics: {MAX_QUEUED} are queued; continuing without it; "
                f"{_RECORD_HAS_ALL}"
            )

    def _pass_on_lines(self) -> None:
        """Print the thread's lines from the thread that trains, so that ``notify`` need not be thread-safe."""
        while self._lines:
            self._notify(self._lines.popleft())
        if not self._thread.is_alive():
            self._is_over = True

    def _work(self, make: Callable[[Notify], Tracker]) -> None:
        try:
            tracker = make(self._lines.append)
            sent = time.monotonic()
            while True:
                with contextlib.suppress(queue.Empty):
                    method, arguments = self._queue.get(timeout=FLUSH_EVERY_S)
                    getattr(tracker, method)(*arguments)
                    if method == "close":
                        return
                if time.monotonic() - sent >= FLUSH_EVERY_S:
                    tracker.flush()
                    sent = time.monotonic()
        except Unavailable as error:
            self._lines.append(f"{self._label} {error}; {_RECORD_HAS_ALL}")
        except BaseException as error:  # another library's code: whatever it raises must not stop training
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self._lines.append(f"{self._label} failed ({reason}); continuing without it; {_RECORD_HAS_ALL}")
