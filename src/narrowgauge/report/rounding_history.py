"""What block formats do to the operands of layers: the worst of each layer, for the table of layers.

In a run with an emulated recipe it comes from the readings of its snapshots, in others from predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from narrowgauge.gauges.watch.rounding_readings import RoundingReading


class RoundingHistory:
    """The lowest SQNR and the largest share of flushed values of each layer, over its operands and all samples."""

    def __init__(self) -> None:
        self.emulated: dict[str, tuple[float, float]] = {}
        """By layer, dB and share, as the run has rounded its operands."""
        self.predicted: dict[str, dict[str, tuple[float, float]]] = {}
        """By format and layer, dB and share, as predicted."""

    def add(self, events: Iterable[Any]) -> int:
        """Add the readings of a sample. Returns the number of readings that could not be parsed."""
        misread = 0
        for event in events:
            try:
                one = RoundingReading.from_event(event)
                _keep_worst(self.emulated, one.module, one.decibels, one.flushed_share)
            except (TypeError, ValueError, OverflowError, ZeroDivisionError):
                misread += 1
        return misread

    def add_prediction(self, format: str, tensors: Iterable[dict[str, Any]]) -> None:
        """Replace the prediction for a format.

        Raises:
            KeyError, TypeError, ValueError: The record is damaged.
        """
        found: dict[str, tuple[float, float]] = {}
        for one in tensors:
            _keep_worst(found, str(one["module"]), float(one["decibels"]), float(one["flushed"]))
        if found:
            self.predicted[format] = found


def _keep_worst(found: dict[str, tuple[float, float]], module: str, decibels: float, flushed: float) -> None:
    if not (math.isfinite(decibels) and math.isfinite(flushed)):
        raise ValueError(f"reading of {module}")
    low, high = found.get(module, (decibels, flushed))
    found[module] = min(low, decibels), max(high, flushed)
