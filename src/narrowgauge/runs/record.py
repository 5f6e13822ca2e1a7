"""The record of a run: ``run.json`` (what was asked for) and ``events.jsonl`` (what happened, the truth of the run).

Each line of ``events.jsonl`` is one JSON object with ``kind`` and ``step`` (how many updates were tried by then):

    step        loss, lr, grad_norm, loss_scale, applied, tokens_per_s, time (seconds of training so far)
    eval        loss, and the task's own metrics
    checkpoint  path            resume      from the checkpoint of this step
    capture     path of a step that can be replayed
    look        readings of tensors (``gauges.readings``), applied
    foretelling format, survives, recipe, loss_scale, breaks
    finding     rule, severity, where, detail, fix
    sample      text            end         interrupted, and the summary

JSON has no word for NaN and infinity: they are written as "nan", "inf" and "-inf", and read back as floats in the
kinds that are made of numbers. A last line that a crash cut short is passed over.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from narrowgauge.errors import UsageError
from narrowgauge.runs import disk

EVENTS = "events.jsonl"
CONFIGURATION = "run.json"
_NUMERIC = ("step", "eval")
_CHUNK = 8192
"""Lines parsed in one call of the JSON parser: half the time of one call a line."""


def plain(value: Any) -> Any:
    """The value with every NaN and infinity as text, so that it is valid JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class Record:
    """The events of a run, open for appending; a line is handed to the system before ``append`` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        with disk.writing(self.path):
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, kind: str, step: int, **fields: Any) -> None:
        """Add one event."""
        event = {"kind": kind, "step": step, **fields}
        try:
            text = _encode(event)
        except (TypeError, ValueError):  # not finite, or not of JSON's kinds
            text = _encode(plain(event))
        line = memoryview(text.encode() + b"\n")
        with disk.writing(self.path):
            while line:
                line = line[os.write(self._descriptor, line) :]

    def sync(self) -> None:
        """Wait until the events are on the disk."""
        with disk.writing(self.path):
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


def _lines(folder: Path) -> list[bytes]:
    path = folder / EVENTS
    if not path.is_file():
        return []
    return path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is nothing, or a line cut short


def _parse(lines: list[bytes], first: int, path: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads(b"[" + b",".join(lines) + b"]"))
    except ValueError:
        for number, line in enumerate(lines, first):
            try:
                json.loads(line)
            except ValueError:
                raise UsageError(f"{path} is damaged in line {number}: not JSON; remove that line") from None
        raise


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, in order."""
    lines = _lines(folder)
    for start in range(0, len(lines), _CHUNK):
        chunk = lines[start : start + _CHUNK]
        events = _parse(chunk, start + 1, folder / EVENTS)
        for line, event in zip(chunk, events, strict=True):
            if (b'nan"' in line or b'inf"' in line) and event["kind"] in _NUMERIC:
                event = {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in event.items()}
            yield event


def cut_after(folder: Path, step: int) -> None:
    """Forget, atomically, what happened after ``step``, and that the run ended: it goes on from there."""
    lines = _lines(folder)
    kept = []
    for start in range(0, len(lines), _CHUNK):
        chunk = lines[start : start + _CHUNK]
        events = _parse(chunk, start + 1, folder / EVENTS)
        kept += [
            line for line, event in zip(chunk, events, strict=True) if event["step"] <= step and event["kind"] != "end"
        ]
    disk.replace(folder / EVENTS, b"".join(line + b"\n" for line in kept))


def write_configuration(folder: Path, configuration: Mapping[str, Any]) -> None:
    """Save what the run was asked to do."""
    disk.replace(folder / CONFIGURATION, json.dumps(plain(configuration), indent=2, allow_nan=False).encode() + b"\n")


def read_configuration(folder: Path) -> dict[str, Any]:
    """What the run was asked to do."""
    path = folder / CONFIGURATION
    try:
        configuration = json.loads(path.read_text())
    except OSError:
        raise UsageError(
            f"{folder} holds no run: there is no {path.name} in it; start one with --out {folder}"
        ) from None
    except ValueError:
        raise UsageError(f"{path} is not JSON: it was changed by something else; restore it, or train anew") from None
    if not isinstance(configuration, dict):
        raise UsageError(f"{path} is not the configuration of a run; restore it, or train anew with another --out")
    return configuration


def holds_run(folder: Path) -> bool:
    return (folder / CONFIGURATION).exists()
