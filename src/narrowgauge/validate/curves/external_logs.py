"""Reads logs: JSON lines, CSV, Hugging Face's trainer_state.json, TensorBoard, W&B, and narrowgauge's own runs.

Every tool has its own name for the loss. Known names are tried in order, and the output says which was used.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import reprlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.runs import record
from narrowgauge.validate.curves import tensorboard_files, wandb_files

Names = tuple[str, ...]
STEP: Names = ("step", "global_step", "iteration", "iter", "_step", "num_updates", "current_steps")
STEP += ("trainer/global_step", "train/global_step", "epoch")
LOSS: Names = ("loss", "train_loss", "train/loss", "training_loss", "loss/train", "train_loss_step", "train_loss_epoch")
LOSS += ("epoch_loss",)
EVAL: Names = ("eval_loss", "val_loss", "validation_loss", "eval/loss", "val/loss", "loss_eval", "valid_loss")
EVAL += ("validation/loss", "valid/loss", "dev/loss", "loss/eval", "loss/val", "loss/validation")
EVAL += ("validation/epoch_loss", "test_loss", "test/loss", "loss/test")
NORM: Names = ("grad_norm", "gradient_norm", "train/grad_norm", "train/gradient_norm", "grad-norm", "gnorm")
SKIP: Names = ("skipped", "skipped_steps", "skipped_iterations")
"""Known names in logs, in lower case; the first match is used."""
_SPLITS = {name: f"{name}/" for name in ("eval", "val", "valid", "validation", "dev", "test")}
_SPLITS |= {"train": "", "training": ""}
_SPLIT_KEYS = ("kind", "split", "mode", "phase")
_CHUNK, _MAX_DEPTH, _MOST_NAMES = 512, 4, 1000
_Parts = list[tuple[str, Path]]
"""The files of one run, each with a prefix for its names."""


@dataclass(frozen=True, eq=False)
class Series:
    """A value for each step; steps are unique and ascending."""

    tag: str
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    by: str = "step"
    """The name of the steps in the log."""

    def between(self, first: float, last: float) -> Series:
        """The finite values in a range of steps."""
        kept = (self.steps >= first) & (self.steps <= last) & np.isfinite(self.values)
        return Series(self.tag, self.steps[kept], self.values[kept], self.by)


@dataclass(frozen=True, eq=False)
class Curves:
    """The curves of one run that are compared."""

    name: str
    loss: Series
    eval: Series | None = None
    grad_norm: Series | None = None
    skipped: int | None = None
    diverged: bool = False
    """Whether its last loss is not finite, or the run stalled."""
    source: str = ""
    """The path, and the names of the values that were used."""


def read_run(path: Path, tag: str | None = None) -> Curves:
    """Reads the only run of a file or folder.

    Args:
        path: A log file or a folder.
        tag: The name of the value to compare, if it is not a known name of the loss.

    Raises:
        UsageError: If there is not exactly one run, or it cannot be read.
    """
    first, *more = read_runs(path, tag)
    if more:
        names = ", ".join(run.name for run in (first, *more))
        raise UsageError(f"{path} contains several runs, but one was expected: {names}")
    return first


def read_runs(path: Path, tag: str | None = None) -> list[Curves]:
    """Reads every run of a file or folder.

    Raises:
        UsageError: If there is no run, or one cannot be read.
    """
    if not files.exists(path):
        raise UsageError(f"{path} does not exist: expected a log (.jsonl, .json, .csv, TensorBoard, W&B) or a folder")
    if not path.is_dir() and (why := files.explain_unreadable(path)):
        raise UsageError(f"{path} cannot be read: {why}")
    if path.name == record.EVENTS and record.holds_run(path.parent):
        path = path.parent
    runs, exports = [], dict[str, _Log]()
    default_name = path.resolve().name if path.is_dir() else path.stem
    try:
        for name, parts in (_find_runs(path, _MAX_DEPTH) if path.is_dir() else {"": [("", path)]}).items():
            if all(_fill_from_export(exports, part, tag) for _, part in parts):
                continue
            log = _Log(tag)
            for prefix, part in parts:
                _fill(log, part, prefix)
            source = parts[0][1] if len(parts) == 1 else parts[0][1].parent
            runs.append(log.finish(log.name or name or default_name, source))
        runs += [log.finish(name, path) for name, log in exports.items()]
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    if not runs:
        raise UsageError(
            f"{path} contains no run: no .jsonl or .csv file, no trainer_state.json, no TensorBoard or W&B files"
        )
    return runs


def _find_runs(folder: Path, depth: int) -> dict[str, _Parts]:
    """The runs of a folder, by name."""
    if record.holds_run(folder) and (folder / record.EVENTS).exists():
        return {"": [("", folder)]}
    inside = sorted((one for one in folder.iterdir() if one.name[0] != "."), key=lambda one: natural_sort_key(one.name))
    files, folders = [one for one in inside if one.is_file()], [one for one in inside if one.is_dir()]
    boards = [("", one) for one in files if "tfevents" in one.name]
    boards = boards or [("", one) for one in files if one.suffix == ".wandb"][:1]
    if boards:
        return {"": boards}
    states = [one / "trainer_state.json" for one in (*folders, folder) if one == folder or "checkpoint" in one.name]
    for state in reversed(states):  # each contains the history up to it
        if state.exists():
            return {"": [("", state)]}
    for suffix in (".jsonl", ".ndjson", ".csv", ".tsv"):  # another kind would be a second log of the same runs
        runs: dict[str, _Parts] = {one.stem: [("", one)] for one in files if one.suffix.lower() == suffix}
        if runs:
            return _join_splits(runs)
    # wandb/latest-run is a link to one of its neighbours; a resumed run of narrowgauge supersedes its older files
    folders = [one for one in folders if not one.is_symlink() and not one.name.startswith("superseded-")]
    for one in folders if depth else ():
        below = _find_runs(one, depth - 1)
        runs |= {one.name if len(below) == 1 else f"{one.name}/{name}": parts for name, parts in below.items()}
    return _join_splits(runs)


def _join_splits(runs: dict[str, _Parts]) -> dict[str, _Parts]:
    """Joins logs whose names only differ in "train" and "validation": they are one run, not two seeds."""
    halves: dict[str, dict[str, str]] = {}
    for name in runs:
        split = next((word for word in re.split("[^a-z]+", name.lower()) if word in _SPLITS), None)
        if split is not None:
            halves.setdefault(name.lower().replace(split, "", 1), {})[split] = name
    for rest, of in halves.items():
        if len(of) > 1 and not {"train", "training"}.isdisjoint(of):
            parts = [(_SPLITS[split], part) for split, name in of.items() for _, part in runs.pop(name)]
            runs[rest.strip("_-. /")] = parts
    return runs


def _fill(log: _Log, path: Path, prefix: str) -> None:
    if path.is_dir():
        _fill_from_run(log, path)
    elif "tfevents" in path.name:
        _fill_from_board(log, path, prefix)
    elif path.suffix == ".wandb":
        for row in wandb_files.read_offline_run(path):
            if isinstance(row, str):
                log.name = row
            else:
                log.add(row)
    elif _is_binary(path):
        raise UsageError(f"{path} is not a log: it is a binary file")
    elif path.suffix.lower() in (".csv", ".tsv"):
        lines = _csv_lines(path)
        header = [name.strip() for name in next(lines, [])]
        for cells in lines:
            log.add({key: cell for key, cell in zip(header, cells, strict=False) if cell}, prefix=prefix)
    else:
        for row in itertools.chain.from_iterable(_json_rows(path)):
            if isinstance(row, dict):
                log.add(row, prefix=prefix)
            else:
                log.unread += 1


def _csv_lines(path: Path) -> Iterator[list[str]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        start = text.readline()
        lines = csv.reader(itertools.chain([start], text), delimiter=max(",;\t", key=start.count))
        try:
            yield from lines
        except csv.Error as error:
            raise UsageError(f"{path} is not CSV: {error} in line {lines.line_num}") from None


def _fill_from_export(exports: dict[str, _Log], path: Path, tag: str | None) -> bool:
    """Add the runs of a chart that W&B exported as CSV; False for other files. Charts of the same runs are joined."""
    if path.suffix.lower() != ".csv" or path.is_dir():
        return False
    lines = _csv_lines(path)
    header = next(lines, [])
    if not wandb_files.is_export(header):
        return False
    for cells in lines:
        for run, row in wandb_files.split_export(header, cells).items():
            exports.setdefault(run, _Log(tag)).add(row)
    return True


def _fill_from_run(log: _Log, folder: Path) -> None:
    try:
        log.skipped = 0
        for event in record.read(folder):
            if event["kind"] in ("step", "eval"):
                log.add(event)
                log.skipped += not event.get("applied", True)
            elif event["kind"] == "end":
                log.stalled = not event["interrupted"] and event["step"] < event["steps"]
    except (KeyError, TypeError):
        raise UsageError(f"{folder / record.EVENTS} was not written by narrowgauge: its lines are not events") from None


def _json_rows(path: Path) -> Iterator[list[Any]]:
    """Yields the rows of JSON lines, of a JSON list, or of the log history of Hugging Face's Trainer."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
        whole = _parse(first)
        file.seek(0)
        if whole is None and first.lstrip()[:1] in (b"{", b"["):
            whole = _parse(file.read())
            file.seek(0)
        history = whole.get("log_history") if isinstance(whole, dict) else whole
        if isinstance(history, list):
            yield history
            return
        while chunk := list(itertools.islice(file, _CHUNK)):
            lines = [line for line in chunk if line.strip()]
            rows = _parse(b"[" + b",".join(lines) + b"]")  # takes half the time of one call per line
            yield rows if rows is not None and len(rows) == len(lines) else [_parse(line) for line in lines]


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(4096)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _fill_from_board(log: _Log, path: Path, prefix: str) -> None:
    for step, row in tensorboard_files.read_events(path):
        if row is None:
            log.drop_from(step)
        else:
            log.add(row, step, prefix)


class _Log:
    """Collects the known values from rows. A row without a step belongs to the last step."""

    def __init__(self, tag: str | None) -> None:
        self.tag, self.unread, self.duplicates, self.name = tag, 0, 0, ""
        self.points: dict[str, tuple[int, array[float], array[float]]] = {}
        self.not_numbers: tuple[str, str] | None = None
        """A name of the loss, and a value of it that is not a number."""
        self.skipped: int | None = None
        self.stalled = False
        self._names: dict[str, str | int] = {}
        self._rank, self._at = len(STEP), math.nan

    def add(self, row: Mapping[str, Any], step: float | None = None, prefix: str = "") -> None:
        if dict in map(type, row.values()):
            row = _flatten(row)
        for key in _SPLIT_KEYS:
            if key in row:
                prefix = _SPLITS.get(str(row[key]).lower()) or prefix
        rank, found = len(STEP) if step is None else 0, []
        for key, value in row.items():
            name = self._names.get(prefix + key)
            if name is None:
                name = self._classify(prefix, key)
            if name == "":
                continue
            if (number := _number(value)) is None:
                if self.not_numbers is None and name in (self.tag, *LOSS, *EVAL) and value not in (None, ""):
                    self.not_numbers = (str(name), reprlib.repr(value)[:60])
                continue
            if isinstance(name, str):
                found.append((name, number))
            elif name < rank:
                rank, step = name, number
        if step is not None and rank <= self._rank:
            self._rank, self._at = rank, step
        for name, number in found:
            points = self.points.get(name)
            if points is None or points[0] > self._rank:  # values by epoch are not a curve over steps
                self.points[name] = points = (self._rank, array("d"), array("d"))
            points[1].append(self._at)
            points[2].append(number)

    def _classify(self, prefix: str, key: str) -> str | int:
        """Classifies a name: a value to keep (its name), a step (its rank in STEP), or ignored (empty)."""
        name: str | int = prefix + key
        if name != self.tag and str(name).lower() not in (*LOSS, *EVAL, *NORM, *SKIP):
            name = key if key.lower() in EVAL else STEP.index(key.lower()) if key.lower() in STEP else ""
        if len(self._names) < _MOST_NAMES:
            self._names[prefix + key] = name
        return name

    def drop_from(self, step: float) -> None:
        """Drops all points from a step on, because the run was resumed there."""
        for name, (rank, *points) in self.points.items():
            kept = np.array(points[0]) < step
            self.points[name] = (rank, *(array("d", np.array(part)[kept]) for part in points))  # type: ignore[assignment]

    def series(self, *names: str) -> tuple[Series | None, list[str]]:
        """The series of the first of these names that was found, and the other names found."""
        there = {name: name if name in names else name.lower() for name in self.points}
        ranked = sorted((n for n in there if there[n] in names), key=lambda n: (names.index(there[n]), n not in names))
        if not ranked:
            return None, []
        rank, *points = self.points[ranked[0]]
        steps, values = (np.array(part) for part in points)
        steps = np.arange(1.0, len(steps) + 1) if np.isnan(steps).all() else steps
        order = np.argsort(steps, kind="stable")
        order = order[np.isfinite(steps[order])]
        last = np.append(np.diff(steps[order]) > 0, True)[: len(order)]  # the last line of a step is used
        self.duplicates = max(self.duplicates, len(last) - int(last.sum()))
        by = STEP[rank] if rank < len(STEP) else "line"
        order = order[last]
        return (Series(ranked[0], steps[order], values[order], by) if len(order) else None), ranked[1:]

    def finish(self, name: str, path: Path) -> Curves:
        """Creates the curves of the run. Raises UsageError if the log has no loss."""
        cleaned = (" ".join(re.sub(r"[^ -~]+", " ", one).split())[:60] for one in self._names)
        seen = ", ".join(itertools.islice((one for one in cleaned if one), 30))
        if not seen:
            raise UsageError(f"{path} is not a log: it is neither JSON lines nor CSV nor TensorBoard events")
        loss, others = self.series(*((self.tag,) if self.tag else LOSS))
        evaluation = not self.tag or not _SPLITS.keys().isdisjoint(re.split("[^a-z]+|train", self.tag.lower()))
        evaluated = self.series(*EVAL)[0] if not self.tag else loss if evaluation else None
        loss = loss or evaluated
        if loss is None:
            what = f"no value named {self.tag!r}" if self.tag else "no loss under any known name"
            if self.not_numbers:
                what = "no loss: {!r} is {}, which is not a number".format(*self.not_numbers)
            raise UsageError(f"{path} has {what}; choose one with --tag: {seen}")
        skips = self.series(*SKIP)[0]
        if self.skipped is None and skips is not None and np.isfinite(skips.values).all():
            counted = bool((np.diff(skips.values) >= 0).all())
            self.skipped = int(skips.values[-1] if counted else skips.values.sum())
        source = f"{path}: {loss.tag!r} by {loss.by} {loss.steps[0]:g} to {loss.steps[-1]:g}"
        source += f" (not {', '.join(others)})" if others else ""
        source += f", {evaluated.tag!r}" if evaluated not in (None, loss) else ""
        source += f"; {self.unread} lines are not JSON" if self.unread else ""
        source += f"; {self.duplicates} duplicate lines" if self.duplicates else ""
        finite = all(math.isfinite(one.values[-1]) for one in (loss, evaluated) if one is not None)
        return Curves(name, loss, evaluated, self.series(*NORM)[0], self.skipped, self.stalled or not finite, source)


def _flatten(row: Mapping[str, Any], depth: int = _MAX_DEPTH) -> dict[str, Any]:
    """Flattens nested rows; names are joined with a slash."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if type(value) is not dict:
            flat[key] = value
        elif depth:
            inner = _flatten(value, depth - 1) if dict in map(type, value.values()) else value
            for name, deep in inner.items():
                flat[f"{key}/{name}"] = deep
    return flat


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def natural_sort_key(name: str) -> list[tuple[str, int]]:
    """A sort key that puts seed10 after seed2."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
