"""Reads what Weights & Biases leaves on disk: the CSV export of a chart, and the .wandb file of an offline run.

CSV export    one column of steps, then NAME - METRIC, NAME - METRIC__MIN and NAME - METRIC__MAX for each run
.wandb        seven bytes, then a LevelDB log: blocks of 32 KiB with records of checksum (4 bytes), length (2), type (1)
              and data; a record that does not fit into its block continues in the next one. The data are protobuf
              messages, of which three fields are read: the history, its step, and the name of the run

The W&B package is not needed, and nothing in a file is executed. A file of a run that was killed ends inside a record:
what comes before is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.errors import UsageError

MAGIC = b":W&B"
_HEADER_BYTES, _BLOCK_BYTES, _RECORD_HEADER_BYTES = 7, 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_BOUNDS = ("__MIN", "__MAX")
_SEPARATOR = " - "
_HISTORY, _RUN = 2, 17
"""Fields of a record."""
_ITEM, _STEP, _KEY, _NESTED_KEY, _VALUE_JSON, _DISPLAY_NAME = 1, 2, 1, 2, 16, 8


def is_export(header: Sequence[str]) -> bool:
    """Whether the first line of a CSV file is that of a W&B chart."""
    named = [_SEPARATOR in column for column in header[1:]]
    return len(header) > 1 and _SEPARATOR not in header[0] and all(named)


def split_export(header: Sequence[str], cells: Sequence[str]) -> dict[str, dict[str, str]]:
    """The values of one line of an export, by run; the bounds of averaged steps are left out."""
    runs: dict[str, dict[str, str]] = {}
    for column, cell in zip(header[1:], cells[1:], strict=False):
        if cell and not column.endswith(_BOUNDS):
            run, _, metric = column.rpartition(_SEPARATOR)
            runs.setdefault(run, {header[0]: cells[0]})[metric] = cell
    return runs


def read_offline_run(path: Path) -> Iterator[Mapping[str, Any] | str]:
    """Yield the rows of the history, and the name of the run as text.

    Raises:
        UsageError: The file is not a W&B file.
    """
    with path.open("rb") as file:
        data = file.read()
    if not data.startswith(MAGIC):
        raise UsageError(f"{path} is not a log of Weights & Biases: it does not begin with {MAGIC.decode()}")
    for message in _split_records(data):
        try:
            yield from _read_record(message)
        except (ValueError, IndexError):
            return


def _split_records(data: bytes) -> Iterator[bytes]:
    place, parts = _HEADER_BYTES, bytearray()
    while place + _RECORD_HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if left < _RECORD_HEADER_BYTES or kind == 0:  # the end of a block is padded with zeros
            place += left
            continue
        start = place + _RECORD_HEADER_BYTES
        if kind > _LAST or start + length > len(data):
            return
        if kind in (_FULL, _FIRST):
            parts.clear()
        parts += data[start : start + length]
        place = start + length
        if kind in (_FULL, _LAST):
            yield bytes(parts)


def _read_record(message: bytes) -> Iterator[Mapping[str, Any] | str]:
    for field, value in _read_fields(message):
        if field == _HISTORY and isinstance(value, bytes):
            yield _read_history(value)
        elif field == _RUN and isinstance(value, bytes):
            names = [text for number, text in _read_fields(value) if number == _DISPLAY_NAME]
            if names and isinstance(names[-1], bytes):
                yield names[-1].decode(errors="replace")


def _read_history(message: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for field, value in _read_fields(message):
        if not isinstance(value, bytes):
            continue
        if field == _STEP:
            row.setdefault("_step", next((number for one, number in _read_fields(value) if one == 1), 0))
        elif field == _ITEM:
            parts = [one for one in _read_fields(value) if isinstance(one[1], bytes)]
            names = [bytes(text).decode(errors="replace") for one, text in parts if one in (_KEY, _NESTED_KEY)]
            texts = [bytes(text) for one, text in parts if one == _VALUE_JSON]
            if names and texts:
                row["/".join(filter(None, names))] = _parse_number(texts[-1])
    return row


def _parse_number(text: bytes) -> float | None:
    """A number; None for everything else that can be logged. W&B writes NaN as text."""
    try:
        return float(json.loads(text))
    except (ValueError, TypeError, RecursionError, OverflowError):
        return None


def _read_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: numbers, and bytes for texts and messages.

    Raises:
        ValueError, IndexError: It is not a message.
    """
    place = 0
    while place < len(message):
        tag, place = _read_varint(message, place)
        kind = tag & 7
        if kind == 0:
            value, place = _read_varint(message, place)
            yield tag >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, place = _read_varint(message, place)
        if size is None or place + size > len(message):
            raise ValueError(f"wire type {kind}")
        yield tag >> 3, message[place : place + size]
        place += size


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("varint")
