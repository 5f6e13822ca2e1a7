"""A table of layers for each task: time saved, SQNR in dB, underflow, and one sentence that sums them up.

Time comes from a roofline, dB from a validation, and underflow from the readings of a run. They are joined by module
path, for results of the same task only. A roofline may group equal layers (``blocks.*.qkv``); its time is then divided
equally among them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.report.downsample import round_number
from narrowgauge.report.inputs import Inputs
from narrowgauge.report.run_data import RunData

_UNDERFLOW = (
    ("fp16 gradient", "gradient", "fp16 flushed"),
    ("fp8 forward", "activation", "fp8_e4m3 flushed"),
    ("fp8 gradient", "gradient", "fp8_e5m2 flushed"),
)
"""The shares shown: FP16 loses gradients; FP8 uses E4M3 in the forward pass and E5M2 for gradients."""
_WIDE = ("bf16", "fp16", "tf32", "fp32")
"""Recipes that time savings are relative to: the first one available."""
_PRODUCTS = ("product", "convolution")
"""Kinds of work whose FLOPs do not depend on the recipe."""


def build_tables(inputs: Inputs) -> list[dict[str, Any]]:
    """One table per task with per-layer data; the table with the most columns comes first."""
    runs = [(_shorten_task(run.task), run) for run in inputs.runs if run.tensors.columns]
    saved = [(_shorten_task(one["task"]), one) for kind in ("validation", "roofline") for one in inputs.of(kind)]
    tasks = dict.fromkeys(task for task, _ in (*runs, *saved))
    tables = []
    for task in tasks:
        table = _LayerTable()
        for one in (one for other, one in saved if other == task and "candidates" in one):
            table.add_decibels(one)
        watched = next((run for other, run in runs if other == task), None)
        if watched is not None:
            table.add_underflow(watched)
            table.add_rounding(watched)
        for one in [one for other, one in saved if other == task and "gpu" in one][:1]:
            table.add_times(one)
        described = table.describe()
        if described["rows"]:
            watched_run = f"{_shorten_task(watched.task)} {watched.recipe}" if watched else None
            tables.append({"task": task, "watched": watched_run, **described})
    return sorted(tables, key=lambda one: -len(one["columns"]))


def _shorten_task(spec: str) -> str:
    """The task without its folder, so that a task file matches from every working directory."""
    return spec.rpartition("/")[2]


@dataclass
class _LayerTable:
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    columns: list[dict[str, str]] = field(default_factory=list)

    def add_decibels(self, saved: dict[str, Any]) -> None:
        for name, one in saved["candidates"].items():
            for row in one["layers"]["rows"] if one["layers"] else ():
                self._set(row["module"], "class", row["class"])
                self._set(row["module"], f"own {name}", row["own"])
                self._set(row["module"], f"end_to_end {name}", row["end_to_end"])
            self._add_column(f"own {name}", f"{name}: own dB", "dB")
            self._add_column(f"end_to_end {name}", f"{name}: end-to-end dB", "dB")

    def add_underflow(self, run: RunData) -> None:
        for title, kind, plane in _UNDERFLOW:
            self._add_column(title, f"{title}: flushed", "%")
            for module, share in run.tensors.find_worst(kind, plane).items():
                self._set(module, title, round_number(share))

    def add_rounding(self, run: RunData) -> None:
        """Adds what block formats do to the operands of each layer: as emulated in the run, or as predicted from it."""
        found = {f"{name.upper()} predicted": layers for name, layers in run.rounding.predicted.items()}
        if run.emulated is not None:
            found[f"{run.emulated} emulated"] = run.rounding.emulated
        for title, layers in found.items():
            self._add_column(f"dB {title}", f"{title}: lowest dB of an operand", "dB")
            self._add_column(f"flushed {title}", f"{title}: most flushed", "%")
            for module, (decibels, flushed) in layers.items():
                self._set(module, f"dB {title}", round_number(decibels))
                self._set(module, f"flushed {title}", round_number(flushed))

    def add_times(self, saved: dict[str, Any]) -> None:
        """Adds each layer's total time per recipe, and the time that a narrow recipe saves."""
        times: dict[str, dict[str, float]] = {}
        saved_ms: dict[str, float] = {}
        bounds: dict[str, Counter[str]] = {}
        work: dict[str, dict[str, float]] = {}
        for layer in saved["layers"]:
            modules = self._match_modules(layer["name"])
            for name in modules:
                if layer["ms"] is not None:
                    own = times.setdefault(name, {})
                    own[layer["recipe"]] = own.get(layer["recipe"], 0.0) + layer["ms"] / len(modules)
                if layer["saved_ms"] is not None:
                    saved_ms[name] = saved_ms.get(name, 0.0) + layer["saved_ms"] / len(modules)
                if layer["kind"] in _PRODUCTS and layer["flops"]:
                    done = work.setdefault(name, {})
                    done[layer["recipe"]] = done.get(layer["recipe"], 0.0) + layer["flops"] / len(modules)
                if layer["bound"]:
                    bounds.setdefault(name, Counter())[layer["bound"]] += layer["ms"] or 1
        recipes = list(dict.fromkeys(recipe for own in times.values() for recipe in own))
        reference = next((recipe for recipe in _WIDE if recipe in recipes), None)
        for recipe in recipes:
            self._add_column(f"ms {recipe}", f"{recipe}: ms" if recipe else "time, ms", "ms")
            if reference and recipe not in _WIDE:
                self._add_column(f"saved {recipe}", f"{recipe}: ms saved", "ms")
        self._add_column("saved_ms", "ms saved", "ms")
        self._add_column("bound", "bound by", "")
        for name, own in times.items():
            for recipe, ms in own.items():
                self._set(name, f"ms {recipe}", round_number(ms))
                if reference in own and recipe not in _WIDE and _is_same_work(work.get(name, {}), reference, recipe):
                    self._set(name, f"saved {recipe}", round_number(own[reference] - ms))
        for name, ms in saved_ms.items():
            self._set(name, "saved_ms", round_number(ms))
        for name, bound in bounds.items():
            self._set(name, "bound", bound.most_common(1)[0][0])

    def _match_modules(self, name: str) -> list[str]:
        """The modules that a layer's name refers to: the module itself, or all that match its pattern."""
        if "*" not in name:
            return [_strip_parameter(name)]
        pattern = re.compile(r"[^.]+".join(map(re.escape, _strip_parameter(name).split("*"))))
        return [module for module in self.rows if pattern.fullmatch(module)] or [_strip_parameter(name)]

    def _set(self, module: str, key: str, value: Any) -> None:
        if value is not None:
            self.rows.setdefault(_strip_parameter(module), {})[key] = value

    def _add_column(self, key: str, title: str, unit: str) -> None:
        self.columns.append({"key": key, "title": title, "unit": unit})

    def describe(self) -> dict[str, Any]:
        """The columns that have values, and the rows."""
        order = ("ms", "", "dB", "%")  # savings first, then costs
        columns = sorted(self.columns, key=lambda column: order.index(column["unit"]))
        known = [column for column in columns if any(column["key"] in row for row in self.rows.values())]
        rows = [{"module": module, **row} for module, row in self.rows.items() if len(row) > ("class" in row)]
        for row in rows:
            row["summary"] = _summarize(row)
        return {"columns": known, "rows": rows}


def _is_same_work(flops: dict[str, float], reference: str, recipe: str) -> bool:
    """Whether a layer computes the same products under both recipes.

    If not, its products were merged with, or attributed to, another layer under one of them, and a difference of times
    is not a saving.
    """
    one, other = flops.get(reference, 0.0), flops.get(recipe, 0.0)
    return abs(one - other) <= 0.01 * max(one, other)


def _strip_parameter(name: str) -> str:
    """The module's path without the name of its parameter."""
    return name.removesuffix(".weight").removesuffix(".bias") or name


def _summarize(row: dict[str, Any]) -> str:
    """What FP8 saves and costs in this layer; empty if less than two numbers are known."""
    parts = []
    saved = row.get("saved fp8", row.get("saved_ms"))
    if saved is not None:
        time = f"saves {saved:.3g} ms" if saved > 0 else f"takes {-saved:.3g} ms more"
        parts.append(time if saved else "saves no time")
    decibels = row.get("own fp8")
    if decibels is not None:
        parts.append("no error" if decibels >= 200 else f"SQNR {decibels:.1f} dB")
    underflow = row.get("fp8 forward", row.get("fp8 gradient"))
    if underflow is not None and parts:
        parts.append(f"underflow {100 * underflow:.2g}%" if underflow else "no underflow")
    return f"FP8 {', '.join(parts)}" if len(parts) > 1 else ""
