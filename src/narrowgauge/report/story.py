"""What one run's record tells, ready for the page: its numbers as thin curves, its tensors, and what was found.

Events are taken one by one, so that a live run costs what is new in it. Nothing here trusts the record: what cannot be
understood is counted, and said on the page.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.errors import printable
from narrowgauge.report import thin
from narrowgauge.report.tail import Tail
from narrowgauge.report.tensors import Tensors
from narrowgauge.runs import record

NUMBERS = ("loss", "grad_norm", "loss_scale", "lr", "tokens_per_s")
"""Of a step event, the curves; the last value of a column stands for those that change in jumps."""
_JUMPS = ("loss_scale", "lr")
_MARKS = 200
"""Checkpoints, resumptions and captures shown; of more, the last."""
_FINDINGS = 500
_QUIET_S = 120.0
"""A record without an end that was not written to for longer is of a run that was killed, as far as anyone can say."""


class Story:
    """One run folder, read as far as it was written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = record.read_configuration(folder)
        self._tail = Tail(folder)
        self._clear()

    def _clear(self) -> None:
        self.steps = array("d")
        self.numbers = {name: array("d") for name in NUMBERS}
        self.applied = array("b")
        self.evals: dict[str, list[tuple[float, float]]] = {}
        self.marks: list[dict[str, Any]] = []
        self.findings: list[dict[str, Any]] = []
        self.predictions: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None
        self.sample: str | None = None
        self.seconds: float | None = None
        self.tensors = Tensors()
        self.misread = 0
        self.events = 0

    def update(self) -> bool:
        """Take in what is new in the record; whether there was anything."""
        replaced = self._tail.was_replaced()
        if replaced:
            self._clear()
        before = self.events
        take: dict[str, Callable[[dict[str, Any]], None]] = {
            "step": self._step,
            "eval": self._eval,
            "look": self._look,
            "finding": self._finding,
            "prediction": self.predictions.append,
            "foretelling": self.predictions.append,  # in older records
            "end": self._end,
            "sample": self._sample,
            "checkpoint": self._mark,
            "resume": self._mark,
            "capture": self._mark,
        }
        for event in self._tail.read():
            self.events += 1
            known = take.get(str(event.get("kind")))
            if known is not None:
                try:
                    known(event)
                except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                    self.misread += 1
        return replaced or self.events > before

    def _step(self, event: dict[str, Any]) -> None:
        step, _ = float(event["step"]), float(event["loss"])
        if not math.isfinite(step):
            raise ValueError(event["step"])
        values = [math.nan if (value := event.get(name)) is None else float(value) for name in NUMBERS]
        if event.get("time") is not None:
            self.seconds = float(event["time"])
        self.steps.append(step)
        self.applied.append(event.get("applied") is not False)
        for column, value in zip(self.numbers.values(), values, strict=True):
            column.append(value)

    def _eval(self, event: dict[str, Any]) -> None:
        for name, value in event.items():
            if name not in ("kind", "step") and isinstance(value, int | float | str):
                self.evals.setdefault(name, []).append((float(event["step"]), float(value)))

    def _look(self, event: dict[str, Any]) -> None:
        self.misread += self.tensors.add(int(event["step"]), event["readings"])

    def _finding(self, event: dict[str, Any]) -> None:
        names = ("rule", "severity", "where", "detail", "fix")
        found = {name: str(event.get(name) or "") for name in names}
        found["consequence"] = str(event.get("why") or event.get("consequence") or "")  # the latter in older records
        self.findings.append({"step": int(event["step"]), **found})

    def _end(self, event: dict[str, Any]) -> None:
        self.end = event
        if not self.findings:
            for finding in event.get("findings") or ():
                self._finding({"step": event["step"], **finding})

    def _sample(self, event: dict[str, Any]) -> None:
        self.sample = printable(str(event["text"]))

    def _mark(self, event: dict[str, Any]) -> None:
        self.marks.append({"kind": event["kind"], "step": int(event["step"]), "path": str(event.get("path") or "")})

    @property
    def recipe(self) -> str:
        return str(_mapping(self.configuration.get("settings")).get("recipe") or "unknown recipe")

    @property
    def task(self) -> str:
        return str(self.configuration.get("task") or "own task")

    @property
    def damaged(self) -> int:
        """Lines of the record that say nothing that can be understood."""
        return self._tail.damaged + self.misread

    @property
    def twin_key(self) -> str:
        """Equal for runs that differ in nothing but their seed."""
        settings = {k: v for k, v in _mapping(self.configuration.get("settings")).items() if k not in ("seed", "keep")}
        options = {k: v for k, v in _mapping(self.configuration.get("options")).items() if k != "seed"}
        return json.dumps([self.task, options, settings], sort_keys=True, default=str)

    @property
    def state(self) -> str:
        """finished, interrupted, ended (short of its steps), running, or unfinished: killed, as far as one can say."""
        if self.end is not None:
            if self.end.get("interrupted"):
                return "interrupted"
            planned = self.planned
            return "finished" if planned is None or self.step >= planned else "ended"
        try:
            age = time.time() - (self.folder / record.EVENTS).stat().st_mtime
        except OSError:
            return "unfinished"
        return "running" if age < _QUIET_S else "unfinished"

    @property
    def step(self) -> int:
        last = int(self.steps[-1]) if self.steps else 0
        end = _number((self.end or {}).get("step"), 0)
        return max(last, int(end) if math.isfinite(end) else 0)

    @property
    def planned(self) -> int | None:
        steps = _mapping(self.configuration.get("settings")).get("steps")
        return steps if isinstance(steps, int) else None

    def curve(self, name: str, columns: int) -> dict[str, Any]:
        return thin.thin(np.array(self.steps), np.array(self.numbers[name]), columns, last=name in _JUMPS)

    def describe(self, columns: int, cells: int, looks: int) -> dict[str, Any]:
        """The run as the page has it. ``cells``: of heat maps; ``looks``: times tensors, of histograms."""
        steps, applied = np.array(self.steps), np.array(self.applied, dtype=np.bool_)
        curves = {}
        for name in NUMBERS:
            values = np.array(self.numbers[name])
            if np.isfinite(values).any():
                curves[name] = self.curve(name, columns)
        broken = {
            name: thin.rug(steps, ~np.isfinite(np.array(self.numbers[name])), columns) for name in ("loss", "grad_norm")
        }
        settings, facts = _mapping(self.configuration.get("settings")), _mapping(self.configuration.get("facts"))
        return {
            "folder": str(self.folder),
            "task": self.task,
            "recipe": self.recipe,
            "state": self.state,
            "step": self.step,
            "planned": self.planned,
            "began": str(self.configuration.get("began") or ""),
            "device": str(settings.get("device") or ""),
            "seed": settings.get("seed"),
            "watched": settings.get("watch_every") != 0,
            "seconds": thin.short(_number((self.end or {}).get("seconds"), self.seconds or 0.0)),
            "summary": self._summary(),
            "settings": _plain(settings),
            "facts": _plain(facts),
            "versions": _plain(_mapping(self.configuration.get("versions"))),
            "curves": curves,
            "evals": {n: [[thin.short(x), thin.short(y)] for x, y in points] for n, points in self.evals.items()},
            "skips": thin.rug(steps, ~applied, columns),
            "skipped": int((~applied).sum()),
            "broken": {name: where for name, where in broken.items() if where},
            "marks": self.marks[-_MARKS:],
            "findings": self.findings[:_FINDINGS],
            "predictions": [_describe_prediction(one) for one in self.predictions[-2:]],
            "sample": self.sample,
            "damaged": self.damaged,
            **self.tensors.describe(cells, looks),
        }

    def _summary(self) -> dict[str, Any]:
        """The numbers of the summary; of a run without an end, what its steps give."""
        end, losses = self.end or {}, self.numbers["loss"]
        rates = [rate for rate in self.numbers["tokens_per_s"][-200:] if math.isfinite(rate)]
        evals = self.evals.get("loss") or [(0.0, math.nan)]
        unit = end.get("unit") or ("token" if "vocab" in _mapping(self.configuration.get("facts")) else "item")
        parameters = end.get("parameters") or _mapping(self.configuration.get("facts")).get("parameters")
        return {
            "loss_first": thin.short(losses[0]) if losses else None,
            "loss_last": thin.short(losses[-1]) if losses else None,
            "loss_last_text": f"{losses[-1]:.4f}" if losses else "",
            "loss_eval": thin.short(_number(end.get("loss_eval"), evals[-1][1])),
            "tokens_per_s": thin.short(_number(end.get("tokens_per_s"), float(np.mean(rates)) if rates else math.nan)),
            "unit": str(unit),
            "parameters": thin.short(_number(parameters)),
        }


def _describe_prediction(told: dict[str, Any]) -> dict[str, Any]:
    breaks = [one for one in told.get("breaks") or () if isinstance(one, dict)]
    return {
        "format": str(told.get("format")),
        "survives": bool(told.get("survives")),
        "recipe": str(told.get("recipe") or ""),
        "loss_scale": thin.short(_number(told.get("loss_scale"))),
        "breaks": [{name: str(one.get(name) or "") for name in ("module", "kind", "detail")} for one in breaks[:20]],
        "more": max(0, len(breaks) - 20),
    }


def _number(value: Any, otherwise: float = math.nan) -> float:
    """The number a record means, as a number or as "nan" and the like; ``otherwise`` for anything else."""
    if value is None or isinstance(value, bool):
        return otherwise
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _plain(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings and facts as texts: whatever a task has put there."""
    return {
        str(name): value if isinstance(value, str) else json.dumps(value, default=str) for name, value in values.items()
    }
