"""A saved benchmark: what ``bench --save`` writes, and what a gate reads again to hold another run against it.

It keeps the time of every round, so that intervals can be computed again, and everything that a ratio of times depends
on beside the code: a base of another task, device or batch is refused, not compared.
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
from narrowgauge.bench.contest import Row, Settings
from narrowgauge.errors import UsageError
from narrowgauge.hardware import Device
from narrowgauge.task import Task

FORMAT = "narrowgauge bench 1"
SAME = {
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
}
"""What must be as it was in the base, with what helps where it is not."""

KINDS = {
    "task": str,
    "peers": list,
    "batch": int | None,
    "context": int | None,
    "compile": bool,
    "steps": int,
    "options": dict,
}
"""What is taken from a base where the command line does not say it."""


def describe(
    spec: str,
    task: Task,
    device: Device,
    settings: Settings,
    peers: Sequence[str],
    batch: int | None = None,
    context: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What was measured, for the JSON of a benchmark."""
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
        "unit": task.unit,
        "items_per_step": task.items_per_batch,
    }


def save(path: Path, data: Mapping[str, Any]) -> None:
    files.save_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n", "--save")


def twin_of(recipe: str, rows: Sequence[Row]) -> Row | None:
    """The row of the plain-torch loop that took turns with a recipe."""
    return next((row for row in rows if row.recipe == recipe and row.name.startswith("torch-")), None)


@dataclass(frozen=True)
class Base:
    """A benchmark that was saved."""

    path: Path
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, path: Path) -> Base:
        try:
            data = files.parse_json(files.read(path))
        except UsageError as error:
            raise UsageError(f"the base: {error}") from None
        except ValueError:
            raise UsageError(f"the base {path} is not JSON: save it again with bench --save") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UsageError(f"{path} is not a base of this version: save it again with bench --save")
        try:
            data.setdefault("options", {})  # which bases of earlier versions have not
            rows = tuple(_row(row) for row in data.pop("rows"))
            facts = {key: data[key] for key in (*SAME, "torch")}
            wrong = [key for key, kind in KINDS.items() if not isinstance(facts[key], kind)]
            if wrong:
                raise ValueError(f"its {wrong[0]}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"the base {path} is damaged ({error}): save it again with bench --save") from None
        return cls(path, facts, rows)

    @property
    def recipes(self) -> list[str]:
        return [row.name for row in self.rows if row.name == row.recipe]

    def row(self, recipe: str) -> Row:
        found = next((row for row in self.rows if row.name == row.recipe == recipe), None)
        if found is None:
            raise UsageError(f"the base {self.path} has no {recipe}: it has {', '.join(self.recipes)}")
        return found

    def pair(self, recipe: str) -> tuple[Row, Row]:
        """The rows of a recipe and of its twin."""
        row, twin = self.row(recipe), twin_of(recipe, self.rows)
        if twin is None:
            others = [name for name in self.recipes if twin_of(name, self.rows)]
            raise UsageError(
                f"the base {self.path} has no plain-torch twin of {recipe} to hold it against: "
                + (f"leave it out with --recipes {','.join(others)}" if others else "save it with --peers torch")
                + "; a format that this device only emulates has none"
            )
        if (len(row.times_ms), len(row.cpu_ms)) != (len(twin.times_ms), len(twin.cpu_ms)):
            raise UsageError(f"the base {self.path} is damaged (the rounds of {recipe}): save it again")
        return row, twin

    def refuse_other(self, now: Mapping[str, Any]) -> None:
        """Refuse to compare with a measurement that differs in any of these facts."""
        for key, help in SAME.items():
            if key in now and now[key] != self.facts[key]:
                raise UsageError(
                    f"the base {self.path} was measured with {key} {_text(self.facts[key])}, not "
                    f"{_text(now[key])}{help}; only like can be compared: measure as it did, or save another base"
                )


def _row(data: dict[str, Any]) -> Row:
    times = {clock: tuple(float(time) for time in data[clock]) for clock in ("times_ms", "cpu_ms")}
    row = Row(**{**data, **times})
    if not row.times_ms or not all(0 < time < math.inf for time in (*row.times_ms, *row.cpu_ms)):
        raise ValueError(f"the rounds of {row.name}")
    return row


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as a base has them; a loss that is not finite is null."""
    found = [dataclasses.asdict(row) for row in rows]
    for row in found:
        row["times_ms"], row["cpu_ms"] = list(row["times_ms"]), list(row["cpu_ms"])
        if row["loss"] is not None and not math.isfinite(row["loss"]):
            row["loss"] = None
    return found


def joined(path: Path, facts: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The base to save where rows join those of other recipes in a file; a file of other facts is replaced."""
    kept: list[Row] = []
    with contextlib.suppress(UsageError):
        old = Base.read(path)
        old.refuse_other(facts)
        kept = [row for row in old.rows if row.recipe not in {new.recipe for new in rows}]
    return {**facts, "rows": as_json([*kept, *rows])}


def _text(value: Any) -> str:
    return ",".join(value) or "none" if isinstance(value, list) else "unset" if value is None else str(value)
