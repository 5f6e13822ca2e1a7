"""The readings of a run's tensors, as heat maps over modules and steps and as histograms of exponents.

A heat map holds, for each tensor and each look, which share of its values a format would flush to zero, hold as
subnormals or lose as too large (``shares.py``). A share is one byte, on a logarithmic scale from 0.001% to all of it,
so that 200 looks at 600 tensors in four formats take 1.5 MB and not 10. Where there are more looks than columns, a
column keeps the worst of its looks.
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

from narrowgauge.report.shares import Row, all_shares, is_as_trained
from narrowgauge.report.thin import short

MISSING = 255
LOWEST = 1e-5
"""The smallest share that is told from none."""
COLUMNS = 200
_LOOKS = 16
_PLANES = 8
"""Of a tensor, as a rule: the others are empty and take no room."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


def encode(shares: Floats) -> Bytes:
    """Shares as bytes: 0 for none, 1 for 0.001%, 254 for all."""
    place = 1 + np.rint(253 * (1 - np.log10(np.clip(shares, LOWEST, 1.0)) / math.log10(LOWEST)))
    return np.where(shares < LOWEST, 0, place).astype(np.uint8)


def decode(codes: Bytes) -> Floats:
    """The shares that bytes stand for; NaN where nothing was read."""
    exponent = (1 - (codes.astype(np.float64) - 1) / 253) * math.log10(LOWEST)
    return np.where(codes == 0, 0.0, np.where(codes == MISSING, np.nan, 10.0**exponent))


@dataclass
class _Column:
    """One look, or several neighbouring ones: the worst of them."""

    first: int
    last: int
    planes: dict[str, dict[str, Bytes]]
    """By kind and plane, a byte for each tensor known by then."""
    looks: int = 1


@dataclass
class Tensors:
    """All readings of a run, as much as a page can show."""

    modules: dict[str, dict[str, int]] = field(default_factory=dict)
    """By kind: the rows of its heat map."""
    columns: list[_Column] = field(default_factory=list)
    looks: list[tuple[int, list[Row]]] = field(default_factory=list)
    """Some looks as they were read, evenly over the run, for the histograms."""
    scaled: bool = False
    """Whether FP16 sees gradients at a scale that the run chose, which may be 1."""
    _width: int = 1
    """Looks in a column."""
    _seen: int = 0
    _stride: int = 1
    """Looks between two that are kept for the histograms."""
    _latest: tuple[int, list[Row]] | None = None

    def add(self, step: int, events: Sequence[Any]) -> int:
        """Take in a look; how many of its readings could not be understood."""
        rows = []
        for event in events:
            try:
                rows.append(Row.read(event))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                continue
        if rows:
            self.scaled = self.scaled or is_as_trained(rows)
            self._add_column(self._column(step, rows))
            if self._seen % self._stride == 0:
                self.looks.append((step, rows))
                if len(self.looks) > 2 * _LOOKS:
                    self.looks, self._stride = self.looks[::2], self._stride * 2
            self._latest = (step, rows)
            self._seen += 1
        return len(events) - len(rows)

    def _column(self, step: int, rows: list[Row]) -> _Column:
        places: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            places.setdefault(row.kind, []).append(index)
        shares = all_shares(rows)
        table = encode(np.stack(list(shares.values())))
        planes: dict[str, dict[str, Bytes]] = {}
        for kind, where in places.items():
            known = self.modules.setdefault(kind, {})
            targets = [known.setdefault(rows[index].module, len(known)) for index in where]
            found = np.full((len(shares), len(known)), MISSING, dtype=np.uint8)
            found[:, targets] = table[:, where]
            planes[kind] = {name: found[i] for i, name in enumerate(shares) if _belongs(name, kind)}
        return _Column(step, step, planes)

    def _add_column(self, column: _Column) -> None:
        """Columns all stand for as many looks; when there are too many, every two become one."""
        if self.columns and self.columns[-1].looks < self._width:
            self.columns[-1] = _worst([self.columns[-1], column])
        else:
            self.columns.append(column)
        if len(self.columns) == 2 * COLUMNS and self.columns[-1].looks == self._width:
            self.columns, self._width = _squeezed(self.columns, COLUMNS), self._width * 2

    def worst(self, kind: str, plane: str) -> dict[str, float]:
        """By module, the largest share over all looks."""
        rows = self.modules.get(kind, {})
        if not rows:
            return {}
        table = decode(_table(self.columns, kind, plane, len(rows)))
        return dict(zip(rows, np.where(np.isnan(table), 0.0, table).max(axis=1).tolist(), strict=True))

    def describe(self, cells: int, looks: int) -> dict[str, Any]:
        """``heat`` and ``histograms`` as the page has them, or neither where nothing was read.

        ``cells``: bytes of heat map there is room for. ``looks``: histograms there is room for, of one tensor each.
        """
        if not self.columns:
            return {}
        rows = sum(len(names) for names in self.modules.values())
        columns = _squeezed(self.columns, max(1, min(COLUMNS, cells // (rows * _PLANES), len(self.columns))))
        heat: dict[str, Any] = {"steps": [[c.first, c.last] for c in columns], "scaled": self.scaled, "kinds": {}}
        for kind, names in self.modules.items():
            found = dict.fromkeys(plane for column in columns for plane in column.planes.get(kind, {}))
            tables = {plane: _table(columns, kind, plane, len(names)) for plane in found}
            gone = next(iter(tables.values())) == MISSING
            heat["kinds"][kind] = {
                "modules": list(names),
                "planes": {plane: _packed(table, (table > 0) & ~gone) for plane, table in tables.items()},
                # As a plane of its own: those that are empty are left out, which is not the same as no reading.
                "missing": _packed(gone.astype(np.uint8), gone),
            }
        return {"heat": heat, "histograms": self._histograms(max(1, min(_LOOKS, looks // rows)))}

    def _histograms(self, most: int) -> dict[str, Any]:
        looks = [*self.looks]
        if self._latest is not None and looks[-1][0] != self._latest[0]:
            looks.append(self._latest)
        # Evenly over the run, the last look always among them.
        count = min(most, len(looks))
        kept = [looks[-1 - round(i * (len(looks) - 1) / max(count - 1, 1))] for i in reversed(range(count))]
        found: dict[tuple[str, str], list[Any]] = {}
        for index, (_, rows) in enumerate(kept):
            for row in rows:
                found.setdefault((row.kind, row.module), [None] * len(kept))[index] = _histogram(row)
        return {
            "steps": [step for step, _ in kept],
            "rows": [{"k": kind, "m": module, "looks": each} for (kind, module), each in found.items()],
        }


def _histogram(row: Row) -> list[Any]:
    """First exponent, counts, amax, scale, values in all, zeros, inf, NaN, format; counts to four digits."""
    counts = [int(float(f"{n:.4g}")) for n in row.counts]
    return [row.first, counts, short(row.amax), short(row.scale), row.values, row.zeros, row.inf, row.nan, row.dtype]


def _belongs(plane: str, kind: str) -> bool:
    """Whether a plane says something of a kind: updates have their own, and no one holds weight gradients in FP8."""
    if plane in ("zeros", "not finite"):
        return True
    if kind == "update" or plane == "lost":
        return kind == "update" and plane == "lost"
    return not (kind == "weight_gradient" and plane.startswith("fp8"))


def _packed(table: Bytes, says: NDArray[np.bool_]) -> str:
    """A table as text; nothing where it says nothing."""
    return base64.b64encode(table.tobytes()).decode() if says.any() else ""


def _table(columns: list[_Column], kind: str, plane: str, rows: int) -> Bytes:
    """The bytes of a plane, a row for each tensor."""
    table = np.full((rows, len(columns)), MISSING, dtype=np.uint8)
    for index, column in enumerate(columns):
        values = column.planes.get(kind, {}).get(plane)
        if values is not None:
            table[: len(values), index] = values
    return table


def _squeezed(columns: list[_Column], most: int) -> list[_Column]:
    edges = [index * len(columns) // most for index in range(most + 1)]
    return [_worst(columns[begin:end]) for begin, end in pairwise(edges) if end > begin]


def _worst(columns: list[_Column]) -> _Column:
    """Neighbouring looks as one: of each tensor the largest share."""
    if len(columns) == 1:
        return columns[0]
    planes: dict[str, dict[str, Bytes]] = {}
    for kind in dict.fromkeys(kind for column in columns for kind in column.planes):
        found = [column.planes[kind] for column in columns if kind in column.planes]
        rows = max(len(plane) for one in found for plane in one.values())
        names = list(dict.fromkeys(name for one in found for name in one))
        # Missing counts as less than nothing, so that any reading stands before it.
        stack = np.full((len(found), len(names), rows), -1, dtype=np.int16)
        for index, one in enumerate(found):
            for place, name in enumerate(names):
                if name in one:
                    stack[index, place, : len(one[name])] = np.where(one[name] == MISSING, -1, one[name])
        worst = stack.max(axis=0)
        planes[kind] = dict(zip(names, np.where(worst < 0, MISSING, worst).astype(np.uint8), strict=True))
    return _Column(columns[0].first, columns[-1].last, planes, sum(column.looks for column in columns))
