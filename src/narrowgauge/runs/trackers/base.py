"""Trackers: the numbers of a run for TensorBoard, Weights & Biases and MLflow, beside the record, never in its place.

    begin(names, folder, configuration, first_step, tell)   add(group, step, values)   finding(...)   close(result)

One that is not installed, cannot be reached or fails costs a line, and the training goes on without it. TensorBoard's
numbers are one write to a file, done at once. The others may import for seconds and wait for a network, so each has a
thread of its own and a queue: a step costs them what it takes to put a dictionary in a queue.

``events.jsonl`` is the truth. A resumed run first sends from it what a tracker did not get before the last life was
killed, so that afterwards all hold the same numbers.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.errors import UsageError
from narrowgauge.runs import record
from narrowgauge.runs.trackers.tensorboard import Board

NAMES = ("tensorboard", "wandb", "mlflow")
DEFAULT = "tensorboard"
LABELS = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
NONE = "none"
PATIENCE_S = 60.0
"""How long the end of a run waits for a tracker that is still sending."""
MOST_WAITING = 1_000_000
"""Numbers that may wait for a tracker that does not take them: some hundred MB."""
SEND_EVERY_S = 2.0
"""How long numbers are collected before they are sent."""
Tell = Callable[[str], None]


class Tracker(Protocol):
    """Takes the numbers of a run to where someone looks at them."""

    def add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step: ``group`` is train or eval."""

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        """Take what was found to be wrong."""

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        """The run is over, or this life of it; without a result it failed. A second call does nothing."""


class Sender(Tracker, Protocol):
    """A tracker that is used by a thread of its own, and may therefore be slow."""

    def flush(self) -> None:
        """Send what was collected."""


class Unavailable(Exception):
    """A tracker cannot be used; says why in words that follow its name."""


def parse(text: str) -> tuple[str, ...]:
    """The trackers of ``--log``: names with commas between them, or ``none``."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if names == (NONE,):
        return ()
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        given = unknown[0] if unknown else text
        raise UsageError(f"--log {given}: there are {', '.join(NAMES)} (with commas between them), and {NONE}")
    return names


def begin(
    names: Sequence[str], folder: Path, configuration: Mapping[str, Any], first_step: int, tell: Tell
) -> Trackers:
    """Start the trackers of a run whose next step is ``first_step``."""
    return Trackers([_start(name, folder, configuration, first_step, tell) for name in names])


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.add(group, step, values)

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.finding(step, finding)

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        for tracker in self._trackers:
            tracker.close(result)


class Posted:
    """Hands everything to a tracker that lives in a thread; says in a line when that gave up."""

    def __init__(self, label: str, make: Callable[[Tell], Sender], tell: Tell) -> None:
        self._label, self._tell = label, tell
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._lines: deque[str] = deque()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, args=(make,), name=label, daemon=True)
        self._thread.start()

    def add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self._post("add", group, step, dict(values))

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._post("finding", step, dict(finding))

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        if self._is_over:
            return
        self._post("close", None if result is None else dict(result))
        self._is_over = True
        self._thread.join(PATIENCE_S)
        self._pass_on()
        if self._thread.is_alive():
            self._tell(f"{self._label} is still sending after {PATIENCE_S:.0f} s: it is left behind; {_KEPT}")

    def _post(self, method: str, *arguments: Any) -> None:
        self._pass_on()
        if self._is_over:
            return
        self._queue.put((method, arguments))
        if self._queue.qsize() > MOST_WAITING:
            self._is_over = True
            self._tell(f"{self._label} takes no numbers: {MOST_WAITING} are waiting; going on without it; {_KEPT}")

    def _pass_on(self) -> None:
        """Lines from the thread are told by the one that trains: whoever listens need not expect two at once."""
        while self._lines:
            self._tell(self._lines.popleft())
        if not self._thread.is_alive():
            self._is_over = True

    def _work(self, make: Callable[[Tell], Sender]) -> None:
        try:
            tracker = make(self._lines.append)
            sent = time.monotonic()
            while True:
                with contextlib.suppress(queue.Empty):
                    method, arguments = self._queue.get(timeout=SEND_EVERY_S)
                    getattr(tracker, method)(*arguments)
                    if method == "close":
                        return
                if time.monotonic() - sent >= SEND_EVERY_S:
                    tracker.flush()
                    sent = time.monotonic()
        except Unavailable as error:
            self._lines.append(f"{self._label} {error}; {_KEPT}")
        except BaseException as error:  # a thread of another's library: whatever it raises is no reason to stop
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self._lines.append(f"{self._label} failed ({reason}); going on without it; {_KEPT}")


_KEPT = f"{record.EVENTS} holds the same numbers"


def history(folder: Path, first_step: int) -> Iterator[tuple[str, int, dict[str, float]]]:
    """What earlier lives of a run have recorded before ``first_step``, as it was given to ``add``."""
    groups = {"step": "train", "eval": "eval"}
    for event in record.read(folder):
        if event["step"] >= first_step:
            return
        if event["kind"] in groups:
            left_out = ("kind", "step", "applied", "time")
            values = {name: value for name, value in event.items() if name not in left_out and value is not None}
            yield groups[event["kind"]], event["step"], values


def _start(name: str, folder: Path, configuration: Mapping[str, Any], first_step: int, tell: Tell) -> Tracker:
    if name == "tensorboard":
        return Board(folder, first_step, tell)

    def make(note: Tell) -> Sender:
        # Imported by the thread: the libraries behind take a second or two.
        from narrowgauge.runs.trackers.mlflow import MLflow
        from narrowgauge.runs.trackers.wandb import WandB

        if name == "wandb":
            return WandB(folder, configuration, first_step, note)
        return MLflow(folder, configuration, first_step)

    return Posted(LABELS[name], make, tell)
