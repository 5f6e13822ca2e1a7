"""The record of a run: ``run.json`` (its configuration) and ``events.jsonl`` (its events, the source of truth).

Each line of ``events.jsonl`` is one JSON object with ``kind`` and ``step`` (the number of updates so far, skipped ones
included):

    step        loss, lr, grad_norm, loss_scale, applied, tokens_per_s, time (seconds of training so far)
    eval        loss, and the task's own metrics
    checkpoint  path
    resume      the run was resumed from the checkpoint of this step
    capture     path of a step that can be replayed
    look        a reading of the tensors (``gauges.watch.readings``), applied, extra (readings for predictions),
                rounding (of operands to block formats, ``gauges.watch.rounding_readings``)
    prediction  for another format: format, survives, recipe, loss_scale, breaks (``foretelling`` in older records);
                measured and tensors for block formats
    finding     rule, severity, where, detail, fix, why (``consequence`` in older records)
    sample      text
    end         interrupted, and the summary

JSON cannot express NaN and infinity. They are written as "nan", "inf" and "-inf", and read back as floats in the events
``step`` and ``eval``. An incomplete last line, left by a crash, is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.runs import atomic_files
from narrowgauge.runs.json_lines import decode, encode, replace_nonfinite

EVENTS = "events.jsonl"
CONFIGURATION = "run.json"
_NUMERIC = ("step", "eval")
_AT_END = ("end", "sample", "prediction", "foretelling")
"""Events after the last checkpoint of a run. A resumed run writes them again when it ends."""
_CHUNK = 1 << 20
"""Bytes of lines that are read and parsed by one call of the JSON parser."""


class Record:
    """The events of a run, open for appending. A line is written to the file before ``append`` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        with atomic_files.explain_errors(self.path):
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)

    def append(self, kind: str, step: int, **fields: Any) -> None:
        """Add one event."""
        line = encode({"kind": kind, "step": step, **fields})
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            raise atomic_files.explain_error(self.path, error) from error

    def sync(self) -> None:
        """Wait until the events are on disk."""
        with atomic_files.explain_errors(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NullRecord(Record):
    """The record of every rank but rank 0: it writes nothing, since rank 0 writes for all."""

    def __init__(self) -> None:
        self._descriptor = -1

    def append(self, kind: str, step: int, **fields: Any) -> None:
        pass

    def sync(self) -> None:
        pass


def _chunks(folder: Path) -> Iterator[tuple[list[bytes], list[dict[str, Any]]]]:
    """Yield lines of the record with their events, in chunks, so that a long record takes little memory."""
    path = folder / EVENTS
    if not path.is_file():
        return
    number = 1
    with path.open("rb") as file:
        whole = True
        while whole and (lines := file.readlines(_CHUNK)):
            whole = lines[-1].endswith(b"\n")
            if not whole:  # incomplete after a crash, or being written
                lines.pop()
            yield lines, _parse(lines, number, path)
            number += len(lines)


def _parse(lines: list[bytes], first: int, path: Path) -> list[dict[str, Any]]:
    try:
        events = list(decode(b"[" + b",".join(lines) + b"]"))
    except ValueError:
        events = []
    if len(events) != len(lines):
        for number, line in enumerate(lines, first):
            try:
                decode(line)
            except ValueError:
                raise UsageError(f"{path} is damaged in line {number}: not JSON; remove that line") from None
        raise UsageError(f"{path} is damaged: expected one event per line; restore it")
    for number, event in enumerate(events, first):
        if type(event) is not dict or type(event.get("step")) is not int or type(event.get("kind")) is not str:
            raise UsageError(f"{path} is damaged in line {number}: not an event (kind, step); remove that line")
    return events


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the events of a run, in order.

    Args:
        folder: The run folder.

    Yields:
        Each event as a dictionary.

    Raises:
        UsageError: A line is not an event.
    """
    for lines, events in _chunks(folder):
        for line, event in zip(lines, events, strict=True):
            if (b'nan"' in line or b'inf"' in line) and event["kind"] in _NUMERIC:
                event = {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in event.items()}
            yield event


def truncate_after(folder: Path, step: int, findings: int | None = None) -> None:
    """Remove the events after ``step`` and the events of the run's end, atomically, before the run resumes there.

    Args:
        folder: The run folder.
        step: The step of the checkpoint from which the run resumes.
        findings: How many findings that checkpoint holds. Later findings are removed: they belong to the end of the
            run (bad data, for example), and are found again if their cause is still there.
    """
    kept, found = [], 0
    for lines, events in _chunks(folder):
        for line, event in zip(lines, events, strict=True):
            kind = event["kind"]
            found += kind == "finding"
            late = kind == "finding" and findings is not None and found > findings
            if event["step"] <= step and kind not in _AT_END and not late:
                kept.append(line)
    atomic_files.replace(folder / EVENTS, b"".join(kept))


def write_configuration(folder: Path, configuration: Mapping[str, Any]) -> None:
    """Write the configuration of a run to run.json."""
    text = json.dumps(replace_nonfinite(configuration), indent=2, allow_nan=False)
    atomic_files.replace(folder / CONFIGURATION, text.encode() + b"\n")


def read_configuration(folder: Path) -> dict[str, Any]:
    """Read the configuration of a run from run.json.

    Raises:
        UsageError: The folder holds no run, or run.json cannot be read.
    """
    path = folder / CONFIGURATION
    try:
        configuration = files.parse_json(files.read(path))
    except UsageError as error:
        if not path.exists():
            raise UsageError(
                f"{folder} holds no run: there is no {path.name} in it; start one with --out {folder}"
            ) from None
        raise UsageError(f"{folder} holds no run that can be read: {error}") from None
    except ValueError:
        raise UsageError(f"{path} is not JSON: another program changed it; restore it, or start a new run") from None
    if not isinstance(configuration, dict):
        raise UsageError(f"{path} is not the configuration of a run; restore it, or start a new run with another --out")
    return configuration


def holds_run(folder: Path) -> bool:
    """Whether a run was started in this folder."""
    return files.exists(folder / CONFIGURATION)
