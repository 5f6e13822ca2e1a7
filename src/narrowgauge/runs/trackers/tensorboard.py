"""TensorBoard beside the record: the same numbers, for who likes to watch them there. Nothing depends on it.

Written with TensorBoard's own record format rather than its SummaryWriter, whose thread prints a traceback of its own
when the disk is full. All numbers of a step are one event.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any


class Board:
    """Writes scalars for TensorBoard; where it is missing or fails, says so in one line and goes on without."""

    def __init__(self, folder: Path, first_step: int, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._file: FileIO | None = None
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            tell("TensorBoard is not installed: its files are not written (events.jsonl holds the same numbers)")
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
            # What an earlier life wrote after the checkpoint that is taken up is purged when TensorBoard reads this.
            self._write(first_step, session_log=self._session(status=self._session.START))

    def add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers of a step."""
        if self._file is not None:
            scalars = [self._summary.Value(tag=f"{group}/{name}", simple_value=v) for name, v in values.items()]
            self._write(step, summary=self._summary(value=scalars))

    def _write(self, step: int = 0, **fields: Any) -> None:
        try:
            self._writer.write(self._event(wall_time=time.time(), step=step, **fields).SerializeToString())
        except OSError as error:
            self._give_up(error)

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        """TensorBoard shows numbers: the words are in the record and the report."""

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._tell(f"TensorBoard's files cannot be written ({error.strerror or error}); going on without them")
