"""The tensor readings of a run, as heat maps over modules and steps and as histograms of exponents.

A heat map has, for each tensor and each sample, the share of its values that a format would flush to zero, store as
subnormals or overflow (``format_shares.py``). A share is one byte on a logarithmic scale from 0.001% to 100%, so that
200 samples of 600 tensors in four formats take 1.5 MB instead of 10. If there are more samples than columns, a column
keeps the worst of its samples.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.report.downsample import round_number
from narrowgauge.report.format_shares import RecordedReading, compute_shares, has_training_scale

MISSING = 255
LOWEST = 1e-5
"""The smallest share that differs from zero."""
COLUMNS = 200
_SAMPLES = 16
_PLANES = 8
"""Planes per tensor that usually have data; empty ones take no space."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


def encode(shares: Floats) -> Bytes:
    """Shares as bytes: 0 for zero, 1 for 0.001%, 254 for 100%."""
    place = 1 + np.rint(253 * (1 - np.log10(np.clip(shares, LOWEST, 1.0)) / math.log10(LOWEST)))
    return np.where(shares < LOWEST, 0, place).astype(np.uint8)


def decode(codes: Bytes) -> Floats:
    """The inverse of ``encode``; NaN for missing readings."""
    exponent = (1 - (codes.astype(np.float64) - 1) / 253) * math.log10(LOWEST)
    return np.where(codes == 0, 0.0, np.where(codes == MISSING, np.nan, 10.0**exponent))


@dataclass
class _Column:
    """The worst shares of one sample or of several consecutive ones."""

    first: int
    last: int
    planes: dict[str, dict[str, Bytes]]
    """By kind and plane, one byte for each tensor known so far."""
    samples: int = 1


@dataclass
class TensorHistory:
    """All tensor readings of a run, reduced to what a page can show."""

    modules: dict[str, dict[str, int]] = field(default_factory=dict)
    """By kind, the row of each module in the heat map."""
    columns: list[_Column] = field(default_factory=list)
    samples: list[tuple[int, list[RecordedReading]]] = field(default_factory=list)
    """Complete samples at even intervals over the run, for the histograms."""
    scaled: bool = False
    """Whether gradients were read at the run's own loss scale, which may be 1."""
    _width: int = 1
    """Samples per column."""
    _seen: int = 0
    _stride: int = 1
    """Keep every so many samples for the histograms."""
    _latest: tuple[int, list[RecordedReading]] | None = None

    def add(self, step: int, events: Sequence[Any]) -> int:
        """Adds a sample. Returns the number of readings that could not be parsed."""
        rows = []
        for event in events:
            try:
                rows.append(RecordedReading.parse(event))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                continue
        if rows:
            self.scaled = self.scaled or has_training_scale(rows)
            self._add_column(self._make_column(step, rows))
            if self._seen % self._stride == 0:
                self.samples.append((step, rows))
                if len(self.samples) > 2 * _SAMPLES:
                    self.samples, self._stride = self.samples[::2], self._stride * 2
            self._latest = (step, rows)
            self._seen += 1
        return len(events) - len(rows)

    def _make_column(self, step: int, rows: list[RecordedReading]) -> _Column:
        places: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            places.setdefault(row.kind, []).append(index)
        shares = compute_shares(rows)
        table = encode(np.stack(list(shares.values())))
        planes: dict[str, dict[str, Bytes]] = {}
        for kind, where in places.items():
            known = self.modules.setdefault(kind, {})
            targets = [known.setdefault(rows[index].module, len(known)) for index in where]
            found = np.full((len(shares), len(known)), MISSING, dtype=np.uint8)
            found[:, targets] = table[:, where]
            planes[kind] = {name: found[i] for i, name in enumerate(shares) if _applies(name, kind)}
        return _Column(step, step, planes)

    def _add_column(self, column: _Column) -> None:
        """All columns have equally many samples. If there are too many columns, each two are merged."""
        if self.columns and self.columns[-1].samples < self._width:
            self.columns[-1] = _merge_worst([self.columns[-1], column])
        else:
            self.columns.append(column)
        if len(self.columns) == 2 * COLUMNS and self.columns[-1].samples == self._width:
            self.columns, self._width = _reduce_columns(self.columns, COLUMNS), self._width * 2

    def find_worst(self, kind: str, plane: str) -> dict[str, float]:
        """By module, the largest share over all samples."""
        rows = self.modules.get(kind, {})
        if not rows:
            return {}
        table = decode(_make_table(self.columns, kind, plane, len(rows)))
        return dict(zip(rows, np.where(np.isnan(table), 0.0, table).max(axis=1).tolist(), strict=True))

    def describe(self, cells: int, histograms: int) -> dict[str, Any]:
        """The page data ``heat`` and ``histograms``; empty if no tensors were read.

        Args:
            cells: Bytes of all heat maps together, at most.
            histograms: Histograms of a single tensor, at most.
        """
        if not self.columns:
            return {}
        rows = sum(len(names) for names in self.modules.values())
        columns = _reduce_columns(self.columns, max(1, min(COLUMNS, cells // (rows * _PLANES), len(self.columns))))
        heat: dict[str, Any] = {"steps": [[c.first, c.last] for c in columns], "scaled": self.scaled, "kinds": {}}
        for kind, names in self.modules.items():
            found = dict.fromkeys(plane for column in columns for plane in column.planes.get(kind, {}))
            tables = {plane: _make_table(columns, kind, plane, len(names)) for plane in found}
            missing = next(iter(tables.values())) == MISSING
            heat["kinds"][kind] = {
                "modules": list(names),
                "planes": {plane: _pack(table, (table > 0) & ~missing) for plane, table in tables.items()},
                # A plane of its own, because planes without any loss are left out, and they have readings.
                "missing": _pack(missing.astype(np.uint8), missing),
            }
        return {"heat": heat, "histograms": self._make_histograms(max(1, min(_SAMPLES, histograms // rows)))}

    def _make_histograms(self, most: int) -> dict[str, Any]:
        samples = [*self.samples]
        if self._latest is not None and samples[-1][0] != self._latest[0]:
            samples.append(self._latest)
        # At even intervals over the run, always including the last sample.
        count = min(most, len(samples))
        kept = [samples[-1 - round(i * (len(samples) - 1) / max(count - 1, 1))] for i in reversed(range(count))]
        found: dict[tuple[str, str], list[Any]] = {}
        for index, (_, rows) in enumerate(kept):
            for row in rows:
                found.setdefault((row.kind, row.module), [None] * len(kept))[index] = _make_histogram(row)
        return {
            "steps": [step for step, _ in kept],
            "rows": [{"k": kind, "m": module, "samples": each} for (kind, module), each in found.items()],
        }


def _make_histogram(row: RecordedReading) -> list[Any]:
    """First exponent, counts (rounded to four digits), amax, scale, number of values, zeros, inf, NaN, format."""
    counts = [n if n < 10_000 else int(float(f"{n:.4g}")) for n in row.counts]
    return [
        row.first,
        counts,
        round_number(row.amax),
        round_number(row.scale),
        row.values,
        row.zeros,
        row.inf,
        row.nan,
        row.dtype,
    ]


def _applies(plane: str, kind: str) -> bool:
    """Whether a plane applies to a kind of tensor: updates have their own, and weight gradients are never FP8."""
    if plane in ("zeros", "not finite"):
        return True
    if kind == "update" or plane == "lost":
        return kind == "update" and plane == "lost"
    return not (kind == "weight_gradient" and plane.startswith("fp8"))


def _pack(table: Bytes, relevant: NDArray[np.bool_]) -> str:
    """A table as base64; empty if no cell is relevant."""
    return base64.b64encode(table.tobytes()).decode() if relevant.any() else ""


def _make_table(columns: list[_Column], kind: str, plane: str, rows: int) -> Bytes:
    """The bytes of a plane, with one row per tensor."""
    table = np.full((rows, len(columns)), MISSING, dtype=np.uint8)
    for index, column in enumerate(columns):
        values = column.planes.get(kind, {}).get(plane)
        if values is not None:
            table[: len(values), index] = values
    return table


def _reduce_columns(columns: list[_Column], most: int) -> list[_Column]:
    edges = [index * len(columns) // most for index in range(most + 1)]
    return [_merge_worst(columns[begin:end]) for begin, end in pairwise(edges) if end > begin]


def _merge_worst(columns: list[_Column]) -> _Column:
    """Merges consecutive columns: the largest share of each tensor."""
    if len(columns) == 1:
        return columns[0]
    planes: dict[str, dict[str, Bytes]] = {}
    for kind in dict.fromkeys(kind for column in columns for kind in column.planes):
        found = [column.planes[kind] for column in columns if kind in column.planes]
        rows = max(len(plane) for one in found for plane in one.values())
        names = list(dict.fromkeys(name for one in found for name in one))
        # Missing counts as less than zero, so that any reading replaces it.
        stack = np.full((len(found), len(names), rows), -1, dtype=np.int16)
        for index, one in enumerate(found):
            for place, name in enumerate(names):
                if name in one:
                    stack[index, place, : len(one[name])] = np.where(one[name] == MISSING, -1, one[name])
        worst = stack.max(axis=0)
        planes[kind] = dict(zip(names, np.where(worst < 0, MISSING, worst).astype(np.uint8), strict=True))
    return _Column(columns[0].first, columns[-1].last, planes, sum(column.samples for column in columns))
