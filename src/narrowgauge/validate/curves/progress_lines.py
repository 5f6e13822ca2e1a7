"""Lines about the progress of a run in a validation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from narrowgauge.runs.trainer import Observer


class ProgressLines(Observer):
    """Prints a line every 20 seconds during long runs."""

    EVERY_S = 20.0

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self._name, self._tell = name, tell
        self._next, self._steps = time.monotonic() + self.EVERY_S, 0

    def on_start(self, step: int, steps: int) -> None:
        self._steps = steps

    def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
        if event["kind"] == "step" and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.EVERY_S
            self._tell(f"{self._name}: step {event['step']} of {self._steps}, loss {event['loss']:.4f}")
