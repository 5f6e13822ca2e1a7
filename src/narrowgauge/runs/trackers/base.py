"""The base class of all trackers, and what they share.

``events.jsonl`` is the source of truth of a run, and a tracker holds a copy of its numbers. When a run resumes, a
tracker first sends the events that it did not receive before the previous process ended (``read_history``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from narrowgauge.runs import record

Notify = Callable[[str], None]
"""Prints one line for the user."""


class Unavailable(Exception):
    """A tracker cannot be used. The text gives the reason and continues a sentence that starts with the label."""


class Tracker(ABC):
    """Copies the metrics and findings of one run to an experiment tracker.

    A tracker that fails must not stop training. One that runs in the background may raise: the thread reports the
    error in one line and drops the tracker. One that does not must handle its own errors.
    """

    label: ClassVar[str]
    """The name that users see."""
    in_background: ClassVar[bool] = True
    """Whether a thread calls the constructor and all methods, because they may wait for imports or a network."""

    @abstractmethod
    def __init__(self, folder: Path, configuration: Mapping[str, Any], first_step: int, notify: Notify) -> None:
        """Start tracking.

        Args:
            folder: The run folder.
            configuration: The content of run.json.
            first_step: The number of the next step. It is above 1 when a run resumes.
            notify: Prints a line for the user.

        Raises:
            Unavailable: The package is missing, or the tracker cannot be used.
        """

    @abstractmethod
    def log_metrics(self, group: str, step: int, values: Mapping[str, float]) -> None:
        """Add the metrics of a step.

        Args:
            group: ``train`` or ``eval``.
            step: The number of updates so far.
            values: The metrics by name.
        """

    @abstractmethod
    def log_finding(self, step: int, finding: Mapping[str, Any]) -> None:
        """Add a finding: rule, severity, where, detail, fix."""

    def flush(self) -> None:  # noqa: B027
        """Send what was collected. Called every few seconds."""

    @abstractmethod
    def close(self, result: Mapping[str, Any] | None = None) -> None:
        """End tracking. A second call does nothing.

        Args:
            result: The summary of the run, or None if the run failed.
        """


def read_history(folder: Path, first_step: int) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Read the metrics that were recorded before ``first_step``.

    Yields:
        The arguments of ``Tracker.log_metrics``: group, step, values.
    """
    groups = {"step": "train", "eval": "eval"}
    for event in record.read(folder):
        if event["step"] >= first_step:
            return
        if event["kind"] in groups:
            left_out = ("kind", "step", "applied", "time")
            values = {name: value for name, value in event.items() if name not in left_out and value is not None}
            yield groups[event["kind"]], event["step"], values
