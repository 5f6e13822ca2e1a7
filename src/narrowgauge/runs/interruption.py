"""Turns the first Ctrl-C or SIGTERM into a wish to stop after the step, and a second one into an end at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While entered, ``wanted`` tells whether someone asked the run to stop."""

    def __init__(self) -> None:
        self.wanted = False
        self.name = ""
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python does not let handlers be set
            self._earlier = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        # Nothing is printed here: the signal may have come in the middle of another print to the same stream.
        self.wanted = True
        self.name = signal.Signals(number).name
