"""The trackers that ``--log`` knows, and how a run starts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.errors import UsageError
from narrowgauge.runs.trackers.background import BackgroundTracker
from narrowgauge.runs.trackers.base import Notify, Tracker
from narrowgauge.runs.trackers.mlflow import MLflowTracker
from narrowgauge.runs.trackers.tensorboard import TensorBoardTracker
from narrowgauge.runs.trackers.wandb import WandbTracker

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
}
"""Every tracker by its name in ``--log``. The modules import their libraries only when a tracker starts."""
DEFAULT = "tensorboard"
NONE = "none"


def parse_names(text: str) -> tuple[str, ...]:
    """Parse ``--log``.

    Args:
        text: Names with commas between them, or ``none``.

    Returns:
        The names, each once.

    Raises:
        UsageError: A name is unknown, or there is none.
    """
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if names == (NONE,):
        return ()
    unknown = [name for name in names if name not in TRACKERS]
    if unknown or not names:
        given = unknown[0] if unknown else text
        raise UsageError(f"--log {given}: expected {', '.join(TRACKERS)} (separated by commas), or {NONE}")
    return names


def start_trackers(
    names: Sequence[str], folder: Path, configuration: Mapping[str, Any], first_step: int, notify: Notify
) -> TrackerGroup:
    """Start the trackers of a run whose next step is ``first_step``."""
    return TrackerGroup([_start(TRACKERS[name], folder, configuration, first_step, notify) for name in names])


class TrackerGroup:
    """Several trackers that are used as one."""

    def __init__(self, trackers: Sequence[Tracker | BackgroundTracker]) -> None:
        self._trackers = list(trackers)

    def log_metrics(self, group: str, step: int, values: Mapping[str, float]) -> None:
        """Add the metrics of a step to every tracker."""
        for tracker in self._trackers:
            tracker.log_metrics(group, step, values)

    def log_finding(self, step: int, finding: Mapping[str, Any]) -> None:
        """Add a finding to every tracker."""
        for tracker in self._trackers:
            tracker.log_finding(step, finding)

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        """Close every tracker."""
        for tracker in self._trackers:
            tracker.close(result)


def _start(
    tracker: type[Tracker], folder: Path, configuration: Mapping[str, Any], first_step: int, notify: Notify
) -> Tracker | BackgroundTracker:
    if not tracker.in_background:
        return tracker(folder, configuration, first_step, notify)
    return BackgroundTracker(tracker.label, lambda note: tracker(folder, configuration, first_step, note), notify)
