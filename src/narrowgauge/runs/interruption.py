"""Turns Ctrl-C, SIGTERM or SIGHUP into a wish to stop after the step, and the same once more into an end at once.

a signal that was ignored when the process began (nohup; a job in the background of a script)    stays ignored
the first SIGINT, SIGTERM or SIGHUP              wanted: the loop finishes its step, saves, and ends
SIGINT or SIGTERM for the second time            KeyboardInterrupt, where the process is
another of them, or SIGHUP again                 nothing more: who shuts a machine down sends several at once
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """While entered, ``wanted`` tells whether someone asked the run to stop."""

    def __init__(self) -> None:
        self.name = ""
        """The signal that came first."""
        self._seen: set[int] = set()
        self._earlier: dict[signal.Signals, Any] = {}

    @property
    def wanted(self) -> bool:
        return bool(self._seen)

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python does not let handlers be set
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler that is not Python's
                    self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._seen and number != signal.SIGHUP:
            raise KeyboardInterrupt
        # Nothing is printed here: the signal may have come in the middle of another print to the same stream.
        self.name = self.name or signal.Signals(number).name
        self._seen.add(number)
