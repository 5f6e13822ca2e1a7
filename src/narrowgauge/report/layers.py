"""A table of layers for each task, joining what is known of each: time saved, dB lost, underflow; and in a sentence.

Time comes from a roofline, dB from a validation, underflow from the readings of a run: joined by the module's path, and
only where all speak of the same task. A roofline may speak of equal layers together (``blocks.*.qkv``): then each has
an equal part of the time.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.report.sources import Sources
from narrowgauge.report.story import Story
from narrowgauge.report.thin import short

_UNDERFLOW = (
    ("fp16 gradient", "gradient", "fp16 flushed"),
    ("fp8 forward", "activation", "fp8_e4m3 flushed"),
    ("fp8 gradient", "gradient", "fp8_e5m2 flushed"),
)
"""Which shares are shown: FP16 loses gradients; FP8 has E4M3 forward and E5M2 for gradients."""
_WIDE = ("bf16", "fp16", "tf32", "fp32")
"""What time is saved against, the first that is there."""


def join_all(sources: Sources) -> list[dict[str, Any]]:
    """A table for each task of which anything is known by layer, the one that most is known of first."""
    stories = [(_task(story.task), story) for story in sources.stories if story.tensors.columns]
    saved = [(_task(one["task"]), one) for kind in ("validation", "roofline") for one in sources.of(kind)]
    tasks = dict.fromkeys(task for task, _ in (*stories, *saved))
    tables = []
    for task in tasks:
        table = _Table()
        for one in (one for other, one in saved if other == task and "candidates" in one):
            table.add_decibels(one)
        watched = next((story for other, story in stories if other == task), None)
        if watched is not None:
            table.add_underflow(watched)
        for one in [one for other, one in saved if other == task and "gpu" in one][:1]:
            table.add_times(one)
        described = table.describe()
        if described["rows"]:
            whose = f"{_task(watched.task)} {watched.recipe}" if watched else None
            tables.append({"task": task, "watched": whose, **described})
    return sorted(tables, key=lambda one: -len(one["columns"]))


def _task(spec: str) -> str:
    """A task of a file is the same from wherever it was asked for."""
    return spec.rpartition("/")[2]


@dataclass
class _Table:
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    columns: list[dict[str, str]] = field(default_factory=list)

    def add_decibels(self, saved: dict[str, Any]) -> None:
        for name, one in saved["candidates"].items():
            for row in one["layers"]["rows"] if one["layers"] else ():
                self._put(row["module"], "class", row["class"])
                self._put(row["module"], f"own {name}", row["own"])
                self._put(row["module"], f"end_to_end {name}", row["end_to_end"])
            self._column(f"own {name}", f"{name}: own dB", "dB")
            self._column(f"end_to_end {name}", f"{name}: dB so far", "dB")

    def add_underflow(self, story: Story) -> None:
        for title, kind, plane in _UNDERFLOW:
            self._column(title, f"{title}: flushed", "%")
            for module, share in story.tensors.worst(kind, plane).items():
                self._put(module, title, short(share))

    def add_times(self, saved: dict[str, Any]) -> None:
        """The time of each layer by recipe, all its work together, and what a narrow recipe saves of it."""
        times: dict[str, dict[str, float]] = {}
        saved_ms: dict[str, float] = {}
        bounds: dict[str, Counter[str]] = {}
        for layer in saved["layers"]:
            modules = self._meant(layer["name"])
            for name in modules:
                if layer["ms"] is not None:
                    own = times.setdefault(name, {})
                    own[layer["recipe"]] = own.get(layer["recipe"], 0.0) + layer["ms"] / len(modules)
                if layer["saved_ms"] is not None:
                    saved_ms[name] = saved_ms.get(name, 0.0) + layer["saved_ms"] / len(modules)
                if layer["bound"]:
                    bounds.setdefault(name, Counter())[layer["bound"]] += layer["ms"] or 1
        recipes = list(dict.fromkeys(recipe for own in times.values() for recipe in own))
        base = next((recipe for recipe in _WIDE if recipe in recipes), None)
        for recipe in recipes:
            self._column(f"ms {recipe}", f"{recipe}: ms" if recipe else "time, ms", "ms")
            if base and recipe not in _WIDE:
                self._column(f"saved {recipe}", f"{recipe}: ms saved", "ms")
        self._column("saved_ms", "ms saved", "ms")
        self._column("bound", "bound by", "")
        for name, own in times.items():
            for recipe, ms in own.items():
                self._put(name, f"ms {recipe}", short(ms))
                if base in own and recipe not in _WIDE:
                    self._put(name, f"saved {recipe}", short(own[base] - ms))
        for name, ms in saved_ms.items():
            self._put(name, "saved_ms", short(ms))
        for name, bound in bounds.items():
            self._put(name, "bound", bound.most_common(1)[0][0])

    def _meant(self, name: str) -> list[str]:
        """The modules a layer's name stands for: itself, or those of the table that it is a pattern of."""
        if "*" not in name:
            return [_module(name)]
        pattern = re.compile(r"[^.]+".join(map(re.escape, _module(name).split("*"))))
        return [module for module in self.rows if pattern.fullmatch(module)] or [_module(name)]

    def _put(self, module: str, key: str, value: Any) -> None:
        if value is not None:
            self.rows.setdefault(_module(module), {})[key] = value

    def _column(self, key: str, title: str, unit: str) -> None:
        self.columns.append({"key": key, "title": title, "unit": unit})

    def describe(self) -> dict[str, Any]:
        order = ("ms", "", "dB", "%")  # what is saved, then what it costs
        columns = sorted(self.columns, key=lambda column: order.index(column["unit"]))
        known = [column for column in columns if any(column["key"] in row for row in self.rows.values())]
        rows = [{"module": module, **row} for module, row in self.rows.items() if len(row) > ("class" in row)]
        for row in rows:
            row["words"] = _words(row)
        return {"columns": known, "rows": rows}


def _module(name: str) -> str:
    """A parameter belongs to its module."""
    return name.removesuffix(".weight").removesuffix(".bias") or name


def _words(row: dict[str, Any]) -> str:
    """What FP8 saves and costs here, as far as it is known."""
    parts = []
    saved = row.get("saved fp8", row.get("saved_ms"))
    if saved is not None:
        time = f"saves {saved:.3g} ms" if saved > 0 else f"takes {-saved:.3g} ms more"
        parts.append(time if saved else "saves no time")
    decibels = row.get("own fp8")
    if decibels is not None:
        parts.append("loses nothing" if decibels >= 200 else f"keeps {decibels:.1f} dB")
    underflow = row.get("fp8 forward", row.get("fp8 gradient"))
    if underflow is not None and parts:
        parts.append(f"underflow {100 * underflow:.2g}%" if underflow else "no underflow")
    return f"FP8 {', '.join(parts)}" if len(parts) > 1 else ""
