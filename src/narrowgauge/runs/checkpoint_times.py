"""When a run writes checkpoints."""

from __future__ import annotations

import time


class CheckpointTimes:
    """Every so many steps, but not more often than every so many seconds; and at the end, or only if interrupted."""

    def __init__(self, every: int, least_s: float = 0.0, at_end: bool = True) -> None:
        self.every, self.least_s, self.at_end = every, least_s, at_end
        self._last = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether to write a checkpoint after a step; the next interval then starts."""
        if self.every <= 0 or step % self.every or time.monotonic() - self._last < self.least_s:
            return False
        self._last = time.monotonic()
        return True
