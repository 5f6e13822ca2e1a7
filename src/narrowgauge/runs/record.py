"""The record of a run: ``run.json`` (what was asked for) and ``events.jsonl`` (what happened, the truth of the run).

Each line of ``events.jsonl`` is one JSON object with ``kind`` and ``step`` (how many updates were tried by then):

    step        loss, lr, grad_norm, loss_scale, applied, tokens_per_s, time (seconds of training so far)
    eval        loss, and the task's own metrics
    checkpoint  path            resume      from the checkpoint of this step
    capture     path of a step that can be replayed
    look        readings of tensors (``gauges.watch.readings``), applied
    prediction  format, survives, recipe, loss_scale, breaks (``foretelling`` in older records)
    finding     rule, severity, where, detail, fix, why (``consequence`` in older records)
    sample      text            end         interrupted, and the summary

JSON has no word for NaN and infinity: they are written as "nan", "inf" and "-inf", and read back as floats in the
kinds that are made of numbers. A last line that a crash cut short is passed over.
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
from narrowgauge.runs.json_lines import decode, encode, plain

EVENTS = "events.jsonl"
CONFIGURATION = "run.json"
_NUMERIC = ("step", "eval")
_AT_END = ("end", "sample", "prediction", "foretelling")
"""Written after the last checkpoint of a run, and written again when it ends again."""
_CHUNK = 1 << 20
"""Bytes of lines that are read and parsed in one call of the JSON parser."""


class Record:
    """The events of a run, open for appending; a line is handed to the system before ``append`` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        with atomic_files.writing(self.path):
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)

    def append(self, kind: str, step: int, **fields: Any) -> None:
        """Add one event."""
        line = encode({"kind": kind, "step": step, **fields})
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            raise atomic_files.refuse(self.path, error) from error

    def sync(self) -> None:
        """Wait until the events are on the disk."""
        with atomic_files.writing(self.path):
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


class Silent(Record):
    """The record of a rank that is not the first: nothing is written, as the first speaks for all."""

    def __init__(self) -> None:
        self._descriptor = -1

    def append(self, kind: str, step: int, **fields: Any) -> None:
        pass

    def sync(self) -> None:
        pass


def _chunks(folder: Path) -> Iterator[tuple[list[bytes], list[dict[str, Any]]]]:
    """Lines of the record with what they say, so many at a time that a long record takes little memory."""
    path = folder / EVENTS
    if not path.is_file():
        return
    number = 1
    with path.open("rb") as file:
        whole = True
        while whole and (lines := file.readlines(_CHUNK)):
            whole = lines[-1].endswith(b"\n")
            if not whole:  # cut short, or being written
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
        raise UsageError(f"{path} is damaged: not one event a line; restore it")
    for number, event in enumerate(events, first):
        if type(event) is not dict or type(event.get("step")) is not int or type(event.get("kind")) is not str:
            raise UsageError(f"{path} is damaged in line {number}: no event of a run (kind, step); remove that line")
    return events


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, in order."""
    for lines, events in _chunks(folder):
        for line, event in zip(lines, events, strict=True):
            if (b'nan"' in line or b'inf"' in line) and event["kind"] in _NUMERIC:
                event = {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in event.items()}
            yield event


def cut_after(folder: Path, step: int, findings: int | None = None) -> None:
    """Forget, atomically, what happened after ``step``, and that the run ended: it goes on from there.

    ``findings``: how many of them the checkpoint of that step knows; those after it came of how the run ended, such as
    bad data, and come again where the reason for them is still there.
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
    """Save what the run was asked to do."""
    atomic_files.replace(
        folder / CONFIGURATION, json.dumps(plain(configuration), indent=2, allow_nan=False).encode() + b"\n"
    )


def read_configuration(folder: Path) -> dict[str, Any]:
    """What the run was asked to do."""
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
        raise UsageError(f"{path} is not JSON: it was changed by something else; restore it, or train anew") from None
    if not isinstance(configuration, dict):
        raise UsageError(f"{path} is not the configuration of a run; restore it, or train anew with another --out")
    return configuration


def holds_run(folder: Path) -> bool:
    return files.exists(folder / CONFIGURATION)
