"""Saved benchmarks: written by ``bench --save``, read by the gate of ``bench --against``.

A file has the time of every round, so that intervals can be computed again, and everything except the code that affects
the ratios. A benchmark with another task, device or batch is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge import files
from narrowgauge.bench.compare import Row, Settings
from narrowgauge.errors import UsageError
from narrowgauge.hardware import Device
from narrowgauge.task import Task

FORMAT = "narrowgauge bench 1"
MUST_MATCH = {
    "task": "",
    "device": "",
    "threads": "; set OMP_NUM_THREADS",
    "batch": "",
    "context": "",
    "items_per_step": "",
    "compile": "",
    "steps": "",
    "peers": "",
    "options": "",
    "optimizer": "",
    "fit": "",
}
"""Facts that must equal those of the saved benchmark, with a hint for the error message."""

TYPES = {
    "task": str,
    "peers": list,
    "batch": int | None,
    "context": int | None,
    "compile": bool,
    "steps": int,
    "options": dict,
    "optimizer": str,
    "model": str | None,
    "fit": str | None,
}
"""Facts that are taken from a saved benchmark if the command line does not set them, with their types."""


def describe_setup(
    spec: str,
    task: Task,
    device: Device,
    settings: Settings,
    peers: Sequence[str],
    batch: int | None = None,
    context: int | None = None,
    options: Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
) -> dict[str, Any]:
    """The facts about a measurement, for the JSON of a benchmark."""
    return {
        "format": FORMAT,
        "task": spec,
        "device": device.name,
        "threads": torch.get_num_threads() if device.kind == "cpu" else None,
        "torch": torch.__version__,
        "compile": settings.compile,
        "batch": batch,
        "context": context,
        "steps": settings.steps,
        "peers": list(peers),
        "options": dict(options or {}),
        "optimizer": optimizer,
        "fit": settings.fit,
        "unit": task.unit,
        "items_per_step": task.items_per_batch,
    }


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a benchmark as JSON, for ``--against``."""
    files.save_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n", "--save")


def find_baseline(recipe: str, rows: Sequence[Row]) -> Row | None:
    """The row of a recipe's plain-torch baseline."""
    return next((row for row in rows if row.recipe == recipe and row.name.startswith("torch-")), None)


@dataclass(frozen=True)
class SavedBenchmark:
    """A benchmark read from a file."""

    path: Path
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, path: Path) -> SavedBenchmark:
        """Reads a saved benchmark.

        Raises:
            UsageError: If the file cannot be read, is damaged, or was saved by another version.
        """
        try:
            data = files.parse_json(files.read(path))
        except UsageError as error:
            raise UsageError(f"saved benchmark: {error}") from None
        except ValueError:
            raise UsageError(f"{path} is not JSON: save it again with bench --save") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UsageError(f"{path} is not a benchmark saved by this version: save it again with bench --save")
        try:
            data.setdefault("options", {})  # missing in files of earlier versions
            data.setdefault("fit", None)
            data.setdefault("optimizer", "adamw")
            rows = tuple(_parse_row(row) for row in data.pop("rows"))
            facts = {key: data[key] for key in (*MUST_MATCH, "torch")} | {"model": data.get("model")}
            wrong = [key for key, kind in TYPES.items() if not isinstance(facts[key], kind)]
            if wrong:
                raise ValueError(f"its {wrong[0]}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{path} is damaged ({error}): save it again with bench --save") from None
        return cls(path, facts, rows)

    @property
    def recipes(self) -> list[str]:
        """The names of the measured recipes."""
        return [row.name for row in self.rows if row.name == row.recipe]

    def row(self, recipe: str) -> Row:
        """The row of a recipe."""
        found = next((row for row in self.rows if row.name == row.recipe == recipe), None)
        if found is None:
            raise UsageError(f"{self.path} has no {recipe}: it has {', '.join(self.recipes)}")
        return found

    def pair(self, recipe: str) -> tuple[Row, Row]:
        """The rows of a recipe and of its plain-torch baseline."""
        row, baseline = self.row(recipe), find_baseline(recipe, self.rows)
        if baseline is None:
            others = [name for name in self.recipes if find_baseline(name, self.rows)]
            raise UsageError(
                f"{self.path} has no plain-torch baseline of {recipe}: "
                + (f"leave it out with --recipes {','.join(others)}" if others else "save it with --peers torch")
                + "; a format that this device only emulates has no baseline"
            )
        if (len(row.times_ms), len(row.cpu_ms)) != (len(baseline.times_ms), len(baseline.cpu_ms)):
            raise UsageError(f"{self.path} is damaged (the rounds of {recipe}): save it again with bench --save")
        return row, baseline

    def check_same_setup(self, now: Mapping[str, Any]) -> None:
        """Raises UsageError if a new measurement differs from this one in any fact that affects the ratios."""
        for key, help in MUST_MATCH.items():
            if key in now and now[key] != self.facts[key]:
                raise UsageError(
                    f"{self.path} was measured with {key} {_text(self.facts[key])}, not {_text(now[key])}{help}; "
                    "use the same settings, or save a new benchmark"
                )


def _parse_row(data: dict[str, Any]) -> Row:
    times = {clock: tuple(float(time) for time in data[clock]) for clock in ("times_ms", "cpu_ms")}
    row = Row(**{**data, **times})
    if not row.times_ms or not all(0 < time < math.inf for time in (*row.times_ms, *row.cpu_ms)):
        raise ValueError(f"the rounds of {row.name}")
    return row


def rows_to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as JSON data; a loss that is not finite becomes null."""
    found = [dataclasses.asdict(row) for row in rows]
    for row in found:
        row["times_ms"], row["cpu_ms"] = list(row["times_ms"]), list(row["cpu_ms"])
        for name in ("loss", "loss_first"):
            if row[name] is not None and not math.isfinite(row[name]):
                row[name] = None
    return found


def merge_rows(path: Path, facts: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Merges new rows with those of other recipes in a file; a file with other facts is replaced."""
    kept: list[Row] = []
    with contextlib.suppress(UsageError):
        old = SavedBenchmark.read(path)
        old.check_same_setup(facts)
        kept = [row for row in old.rows if row.recipe not in {new.recipe for new in rows}]
    return {**facts, "rows": rows_to_json([*kept, *rows])}


def _text(value: Any) -> str:
    return ",".join(value) or "none" if isinstance(value, list) else "unset" if value is None else str(value)
