"""Reads a run's events while they are written: each call yields the events since the last call.

A report must work for a run that crashed, is being written, or has a damaged record. A line that is not JSON is counted
and skipped, where ``runs.record.read`` raises an error. A record that was truncated (``train --resume``) is a new file,
and is read again from its start. NaN and infinity stay strings as in the record ("nan", "inf", "-inf"); ``float``
converts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.runs.record import EVENTS

_BLOCK = 1 << 23
"""Bytes read at a time, so that long records need little memory."""


@dataclass
class EventReader:
    """Yields the events of one run folder, starting where the last read ended."""

    folder: Path
    damaged: int = 0
    """Lines that could not be read."""
    _offset: int = 0
    _file: int | None = None
    _rest: bytes = field(default=b"", repr=False)

    def was_replaced(self) -> bool:
        """Whether the record has been replaced since the last read. The next ``read`` then starts at its beginning."""
        try:
            status = (self.folder / EVENTS).stat()
        except OSError:
            return False
        replaced = self._file is not None and (status.st_ino != self._file or status.st_size < self._offset)
        if replaced:
            self.damaged, self._offset, self._rest = 0, 0, b""
        self._file = status.st_ino
        return replaced

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields the new events. An incomplete last line is left for the next call."""
        if files.explain_unreadable(self.folder / EVENTS) is not None:
            return
        try:
            file = (self.folder / EVENTS).open("rb")
        except OSError:
            return
        with file:
            file.seek(self._offset)
            while block := file.read(_BLOCK):
                self._offset += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                yield from self._parse(lines)

    def _parse(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        try:
            found = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            found = [self._parse_line(line) for line in lines]
        for event in found:
            if not isinstance(event, dict):
                self.damaged += event is not None
            else:
                yield event

    def _parse_line(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            self.damaged += 1
            return None
