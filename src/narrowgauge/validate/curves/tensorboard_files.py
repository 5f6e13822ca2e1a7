"""Reads TensorBoard's event files: the numbers of every step.

The files are parsed here, because TensorBoard's own reader computes checksums in Python and takes ten times as long.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.errors import UsageError


def read_events(path: Path) -> Iterator[tuple[int, dict[str, float] | None]]:
    """Yield steps with their values; None where the run was resumed and repeats the steps from there on.

    Raises:
        UsageError: TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise UsageError(f"{path} cannot be read: TensorBoard is not installed (pip install tensorboard)") from None
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12 and (length := struct.unpack("<Q", head[:8])[0]) <= size:
            try:
                event = Event.FromString(file.read(length + 4)[:length])
            except Exception:  # protobuf's own type: the bytes are not an event, or an incomplete one
                return
            if event.session_log.status == SessionLog.START:
                yield event.step, None
            row = {}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    row[value.tag] = value.simple_value
                elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
                    with contextlib.suppress(TypeError, ValueError):
                        row[value.tag] = make_ndarray(value.tensor).item()
            if row:
                yield event.step, row
