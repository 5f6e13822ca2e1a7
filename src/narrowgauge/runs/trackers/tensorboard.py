"""TensorBoard: writes the metrics of a run as TensorBoard event files. Nothing depends on them.

The files are written with TensorBoard's own record format and not with SummaryWriter, whose thread prints a traceback
when the disk is full. All metrics of a step are one event, and each event is one write to a file: no thread is needed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from narrowgauge.runs.trackers.base import Notify, Tracker


class TensorBoardTracker(Tracker):
    """Writes scalars for TensorBoard. If it is missing or fails, notifies in one line and continues without it."""

    label = "TensorBoard"
    in_background = False

    def __init__(self, folder: Path, configuration: Mapping[str, Any], first_step: int, notify: Notify) -> None:
        self._notify = notify
        self._file: FileIO | None = None
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            notify("TensorBoard is not installed: its files are not written (events.jsonl holds the same numbers)")
            return
        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        path = folder / "tensorboard" / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("wb", buffering=0)  # a killed run loses nothing, and closing writes nothing
        except OSError as error:
            self._give_up(error)
            return
        self._writer = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if first_step > 1:
            # TensorBoard reads this event and purges what an earlier process wrote after the resumed checkpoint.
            self._write(first_step, session_log=self._session(status=self._session.START))

    def log_metrics(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._file is not None:
            scalars = [self._summary.Value(tag=f"{group}/{name}", simple_value=v) for name, v in values.items()]
            self._write(step, summary=self._summary(value=scalars))

    def log_finding(self, step: int, finding: Mapping[str, Any]) -> None:
        """Do nothing: TensorBoard shows numbers. Findings are in the record and the report."""

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, step: int = 0, **fields: Any) -> None:
        try:
            self._writer.write(self._event(wall_time=time.time(), step=step, **fields).SerializeToString())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._notify(f"TensorBoard's files cannot be written ({error.strerror or error}); continuing without them")
