"""The tokens of each expert over a run, as a heat map for each layer with experts.

A cell is a byte: 0 for no token, 1 to 254 for 1/16 to 16 times an equal share on a logarithmic scale, 255 for missing.
An equal share is 127 or 128. If there are more samples than columns, a column is the sum of its samples.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.gauges.watch.expert_readings import ExpertReading, count_effective
from narrowgauge.report.downsample import round_number

COLUMNS = 200
MISSING = 255
LARGEST = 16.0
"""Times an equal share, at most."""
_ALL_CELLS = 400_000
"""Bytes of all layers of a run, at most."""

Counts = NDArray[np.int64]


def encode(counts: Counts) -> NDArray[np.uint8]:
    """Counts of a column's experts as bytes."""
    total = counts.sum()
    if not total:
        return np.full(len(counts), MISSING, dtype=np.uint8)
    ratio = np.clip(counts * len(counts) / total, 1 / LARGEST, LARGEST)
    place = 1 + np.rint(253 * (0.5 + np.log(ratio) / (2 * np.log(LARGEST))))
    return np.where(counts == 0, 0, place).astype(np.uint8)


@dataclass
class _Column:
    first: int
    last: int
    counts: dict[str, Counts]
    samples: int = 1


class ExpertHistory:
    """The counts of all samples, summed to at most ``2 * COLUMNS`` columns."""

    def __init__(self) -> None:
        self._columns: list[_Column] = []
        self._width = 1
        self._experts: dict[str, int] = {}
        self._chosen: dict[str, int] = {}

    def add(self, step: int, events: Iterable[Any]) -> int:
        """Add the readings of a sample. Returns the number of readings that could not be parsed."""
        misread, counts = 0, {}
        for event in events:
            try:
                one = ExpertReading.from_event(event)
                made = np.array(one.counts, dtype=np.int64)
            except (TypeError, ValueError, OverflowError):
                misread += 1
                continue
            if self._experts.setdefault(one.module, len(made)) != len(made):
                misread += 1
                continue
            counts[one.module], self._chosen[one.module] = made, one.chosen
        if counts:
            self._add_column(_Column(step, step, counts))
        return misread

    def _add_column(self, column: _Column) -> None:
        if self._columns and self._columns[-1].samples < self._width:
            self._columns[-1] = _sum([self._columns[-1], column])
        else:
            self._columns.append(column)
        if len(self._columns) == 2 * COLUMNS and self._columns[-1].samples == self._width:
            self._columns, self._width = _reduce(self._columns, COLUMNS), self._width * 2

    def describe(self) -> dict[str, Any]:
        """The page data ``experts``; empty if there are none."""
        if not self._columns:
            return {}
        rows = sum(self._experts.values())
        most = max(1, min(COLUMNS, _ALL_CELLS // rows, len(self._columns)))
        columns = _reduce(self._columns, most)
        layers = [self._describe_layer(module, columns) for module in self._experts]
        return {"experts": {"steps": [[one.first, one.last] for one in columns], "layers": layers}}

    def _describe_layer(self, module: str, columns: list[_Column]) -> dict[str, Any]:
        experts = self._experts[module]
        table = np.full((experts, len(columns)), MISSING, dtype=np.uint8)
        last = np.zeros(experts, dtype=np.int64)
        for index, column in enumerate(columns):
            if module in column.counts:
                last = column.counts[module]
                table[:, index] = encode(last)
        total, most = int(last.sum()), int(last.argmax())
        return {
            "module": module,
            "experts": experts,
            "chosen": self._chosen[module],
            "cells": base64.b64encode(table.tobytes()).decode(),
            "effective": round_number(count_effective(last.tolist())),
            "most": most,
            "most_share": round_number(int(last[most]) / total) if total else 0,
            "none": int((last == 0).sum()),
        }


def _reduce(columns: list[_Column], most: int) -> list[_Column]:
    edges = [index * len(columns) // most for index in range(most + 1)]
    return [_sum(columns[begin:end]) for begin, end in pairwise(edges) if end > begin]


def _sum(columns: list[_Column]) -> _Column:
    """Add up consecutive columns."""
    counts: dict[str, Counts] = {}
    for column in columns:
        for module, one in column.counts.items():
            counts[module] = counts[module] + one if module in counts else one
    return _Column(columns[0].first, columns[-1].last, counts, sum(column.samples for column in columns))
