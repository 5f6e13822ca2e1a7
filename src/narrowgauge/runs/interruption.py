"""Turns SIGINT (Ctrl-C), SIGTERM and SIGHUP into a request to stop; a second SIGINT or SIGTERM ends the process.

SIGINT or SIGHUP that was ignored when the process started    stays ignored: `command &` in a script, and nohup
SIGTERM that was ignored when the process started             is handled all the same
the first SIGINT, SIGTERM or SIGHUP                           ``wanted``: the loop finishes its step, saves and ends
the same SIGINT or SIGTERM again                              KeyboardInterrupt
a different one of the three, or SIGHUP again                 nothing more: a shutdown sends several of them at once
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
"""Shells and nohup ignore these on purpose. SIGTERM is the request to stop that must always work."""


class Interruption:
    """While entered, ``wanted`` says whether a signal has asked the process to stop."""

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
                handler = signal.getsignal(number)
                if handler is None or (handler == signal.SIG_IGN and number in MAY_BE_IGNORED):
                    continue  # None: a handler that is not Python's
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
