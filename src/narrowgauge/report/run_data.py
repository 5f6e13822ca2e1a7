"""Reads one run's record into the data of the page: downsampled curves, tensor readings and findings.

Events are processed one by one, so that updating a live run only costs its new events. Nothing here trusts the record:
events that cannot be parsed are counted, and the page shows the count.
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
from narrowgauge.gauges.rules.predict_block_formats import describe_measured
from narrowgauge.recipe import find_emulation
from narrowgauge.report.downsample import bin_marks, downsample, round_number
from narrowgauge.report.event_reader import EventReader
from narrowgauge.report.expert_history import ExpertHistory
from narrowgauge.report.rounding_history import RoundingHistory
from narrowgauge.report.tensor_history import TensorHistory
from narrowgauge.runs import record

CURVES = ("loss", "grad_norm", "loss_scale", "lr", "tokens_per_s")
"""Fields of a step event that are drawn as curves."""
_STEPPED = ("loss_scale", "lr")
"""Curves that change in jumps: a downsampled column keeps its last value instead of the mean."""
_MOST_MARKS = 200
"""Checkpoints, resumes and captures shown; if there are more, the last ones."""
_MOST_FINDINGS = 500
_MOST_GROUPS = 8
"""Parameter groups whose settings are shown."""
_STALE_S = 120.0
"""A record without an end event that has not been written to for this long belongs to a run that was killed."""


class RunData:
    """The contents of one run folder, as far as it has been written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = record.read_configuration(folder)
        self._reader = EventReader(folder)
        self._clear()

    def _clear(self) -> None:
        self.steps = array("d")
        self.numbers = {name: array("d") for name in CURVES}
        self.applied = array("b")
        self.evals: dict[str, list[tuple[float, float]]] = {}
        self.marks: list[dict[str, Any]] = []
        self.findings: list[dict[str, Any]] = []
        self.predictions: dict[str, dict[str, Any]] = {}
        """By format, the last prediction."""
        self.rounding = RoundingHistory()
        self.experts = ExpertHistory()
        self.end: dict[str, Any] | None = None
        self.sample: str | None = None
        self.seconds: float | None = None
        self.tensors = TensorHistory()
        self.misread = 0
        self.events = 0

    def update(self) -> bool:
        """Read the new events of the record. Returns whether there were any."""
        replaced = self._reader.was_replaced()
        if replaced:
            self._clear()
        before = self.events
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "step": self._add_step,
            "eval": self._add_eval,
            "look": self._add_readings,
            "finding": self._add_finding,
            "prediction": self._add_prediction,
            "foretelling": self._add_prediction,  # its name in records of earlier versions
            "end": self._add_end,
            "sample": self._add_sample,
            "checkpoint": self._add_mark,
            "resume": self._add_mark,
            "capture": self._add_mark,
        }
        for event in self._reader.read():
            self.events += 1
            handler = handlers.get(str(event.get("kind")))
            if handler is not None:
                try:
                    handler(event)
                except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                    self.misread += 1
        return replaced or self.events > before

    def _add_step(self, event: dict[str, Any]) -> None:
        step, _ = float(event["step"]), float(event["loss"])
        if not math.isfinite(step):
            raise ValueError(event["step"])
        values = [math.nan if (value := event.get(name)) is None else float(value) for name in CURVES]
        if event.get("time") is not None:
            self.seconds = float(event["time"])
        self.steps.append(step)
        self.applied.append(event.get("applied") is not False)
        for column, value in zip(self.numbers.values(), values, strict=True):
            column.append(value)

    def _add_eval(self, event: dict[str, Any]) -> None:
        for name, value in event.items():
            if name not in ("kind", "step") and isinstance(value, int | float | str):
                self.evals.setdefault(name, []).append((float(event["step"]), float(value)))

    def _add_readings(self, event: dict[str, Any]) -> None:
        self.misread += self.tensors.add(int(event["step"]), event["readings"])
        self.misread += self.experts.add(int(event["step"]), event.get("experts") or ())
        if self.emulated is not None:  # otherwise they are for predictions, which sum them up
            self.misread += self.rounding.add(event.get("rounding") or ())

    def _add_finding(self, event: dict[str, Any]) -> None:
        names = ("rule", "severity", "where", "detail", "fix")
        found = {name: str(event.get(name) or "") for name in names}
        found["consequence"] = str(event.get("why") or event.get("consequence") or "")  # the latter in older records
        self.findings.append({"step": int(event["step"]), **found})

    def _add_end(self, event: dict[str, Any]) -> None:
        self.end = event
        if not self.findings:
            for finding in event.get("findings") or ():
                self._add_finding({"step": event["step"], **finding})

    def _add_prediction(self, event: dict[str, Any]) -> None:
        described = _describe_prediction(event)
        self.predictions[described["format"]] = described
        self.rounding.add_prediction(described["format"], event.get("tensors") or ())

    def _add_sample(self, event: dict[str, Any]) -> None:
        self.sample = printable(str(event["text"]))

    def _add_mark(self, event: dict[str, Any]) -> None:
        self.marks.append({"kind": event["kind"], "step": int(event["step"]), "path": str(event.get("path") or "")})

    @property
    def recipe(self) -> str:
        return str(_mapping(self.configuration.get("settings")).get("recipe") or "unknown recipe")

    @property
    def emulated(self) -> str | None:
        """The format that the run emulates, such as NVFP4; None if it emulates none."""
        return find_emulation(self.recipe)

    @property
    def task(self) -> str:
        return str(self.configuration.get("task") or "own task")

    @property
    def damaged(self) -> int:
        """Lines and readings of the record that could not be parsed."""
        return self._reader.damaged + self.misread

    @property
    def seedless_key(self) -> str:
        """Equal for runs that differ only in their seed."""
        settings = {k: v for k, v in _mapping(self.configuration.get("settings")).items() if k not in ("seed", "keep")}
        options = {k: v for k, v in _mapping(self.configuration.get("options")).items() if k != "seed"}
        return json.dumps([self.task, options, settings], sort_keys=True, default=str)

    @property
    def state(self) -> str:
        """finished, interrupted, ended (before its last step), running, or unfinished (probably killed)."""
        if self.end is not None:
            if self.end.get("interrupted"):
                return "interrupted"
            planned = self.planned
            return "finished" if planned is None or self.step >= planned else "ended"
        try:
            age = time.time() - (self.folder / record.EVENTS).stat().st_mtime
        except OSError:
            return "unfinished"
        return "running" if age < _STALE_S else "unfinished"

    @property
    def step(self) -> int:
        last = int(self.steps[-1]) if self.steps else 0
        end = _number((self.end or {}).get("step"), 0)
        return max(last, int(end) if math.isfinite(end) else 0)

    @property
    def planned(self) -> int | None:
        steps = _mapping(self.configuration.get("settings")).get("steps")
        return steps if isinstance(steps, int) else None

    def make_curve(self, name: str, columns: int) -> dict[str, Any]:
        """One curve, downsampled to at most ``columns`` points."""
        return downsample(np.array(self.steps), np.array(self.numbers[name]), columns, last=name in _STEPPED)

    def describe(self, columns: int, cells: int, histograms: int) -> dict[str, Any]:
        """The run's part of the page data.

        Args:
            columns: Points of each curve, at most.
            cells: Cells of all heat maps together, at most.
            histograms: Exponent histograms, at most.
        """
        steps, applied = np.array(self.steps), np.array(self.applied, dtype=np.bool_)
        curves = {}
        for name in CURVES:
            values = np.array(self.numbers[name])
            if np.isfinite(values).any() and (name != "tokens_per_s" or self.emulated is None):
                curves[name] = self.make_curve(name, columns)
        nonfinite = {
            name: bin_marks(steps, ~np.isfinite(np.array(self.numbers[name])), columns)
            for name in ("loss", "grad_norm")
        }
        settings, facts = _mapping(self.configuration.get("settings")), _mapping(self.configuration.get("facts"))
        return {
            "folder": str(self.folder),
            "task": self.task,
            "recipe": self.recipe,
            "emulated": self.emulated,
            "state": self.state,
            "step": self.step,
            "planned": self.planned,
            "began": str(self.configuration.get("began") or ""),
            "device": str(settings.get("device") or ""),
            "seed": settings.get("seed"),
            "watched": settings.get("watch_every") != 0,
            "seconds": round_number(_number((self.end or {}).get("seconds"), self.seconds or 0.0)),
            "summary": self._summarize(),
            "settings": _to_texts(settings) | self._describe_optimizers(),
            "facts": _to_texts(facts),
            "versions": _to_texts(_mapping(self.configuration.get("versions"))),
            "curves": curves,
            "evals": {n: [[round_number(x), round_number(y)] for x, y in points] for n, points in self.evals.items()},
            "skips": bin_marks(steps, ~applied, columns),
            "skipped": int((~applied).sum()),
            "nonfinite": {name: where for name, where in nonfinite.items() if where},
            "marks": self.marks[-_MOST_MARKS:],
            "findings": self.findings[:_MOST_FINDINGS],
            "predictions": list(self.predictions.values()),
            "sample": self.sample,
            "damaged": self.damaged,
            **self.tensors.describe(cells, histograms),
            **self.experts.describe(),
        }

    def _describe_optimizers(self) -> dict[str, str]:
        """The settings of each group of parameters; records of older versions have none."""
        lines = self.configuration.get("optimizers")
        lines = lines if isinstance(lines, list) else []
        return {f"optimizer, group {number}": str(line) for number, line in enumerate(lines[:_MOST_GROUPS], 1)}

    def _summarize(self) -> dict[str, Any]:
        """The numbers of the summary. For a run without an end event they come from its steps.

        An emulation has no speed: its time says nothing about hardware that has the format.
        """
        end, losses = self.end or {}, self.numbers["loss"]
        rates = [rate for rate in self.numbers["tokens_per_s"][-200:] if math.isfinite(rate)]
        evals = self.evals.get("loss") or [(0.0, math.nan)]
        unit = end.get("unit") or ("token" if "vocab" in _mapping(self.configuration.get("facts")) else "item")
        parameters = end.get("parameters") or _mapping(self.configuration.get("facts")).get("parameters")
        return {
            "loss_first": round_number(losses[0]) if losses else None,
            "loss_last": round_number(losses[-1]) if losses else None,
            "loss_last_text": f"{losses[-1]:.4f}" if losses else "",
            "loss_eval": round_number(_number(end.get("loss_eval"), evals[-1][1])),
            "tokens_per_s": None
            if self.emulated is not None
            else round_number(_number(end.get("tokens_per_s"), float(np.mean(rates)) if rates else math.nan)),
            "unit": str(unit),
            "parameters": round_number(_number(parameters)),
        }


def _describe_prediction(event: dict[str, Any]) -> dict[str, Any]:
    breaks = [one for one in event.get("breaks") or () if isinstance(one, dict)]
    measured = event.get("measured")
    return {
        "measured": "; ".join(describe_measured(measured, bool(event.get("survives")))) if measured else "",
        "format": str(event.get("format")),
        "survives": bool(event.get("survives")),
        "unused": str(event.get("unused") or ""),
        "recipe": str(event.get("recipe") or ""),
        "loss_scale": round_number(_number(event.get("loss_scale"))),
        "breaks": [{name: str(one.get(name) or "") for name in ("module", "kind", "detail")} for one in breaks[:20]],
        "more": max(0, len(breaks) - 20),
    }


def _number(value: Any, default: float = math.nan) -> float:
    """A number from the record, where NaN and infinity are texts ("nan"); ``default`` for anything else."""
    if value is None or isinstance(value, bool):
        return default
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return default


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _to_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings and facts as strings, whatever types a task has used."""
    return {
        str(name): value if isinstance(value, str) else json.dumps(value, default=str) for name, value in values.items()
    }
