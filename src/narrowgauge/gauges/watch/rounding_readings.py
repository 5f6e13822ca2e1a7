"""RoundingReading: what rounding to a block format does to one operand of a layer's product. Does not need torch.

A histogram of a whole tensor cannot say it: a block's scale follows its own largest value, so it matters which values
share a block. The counts come from blocks of the tensors themselves (``rounding_reader``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.block_formats import find_block_format
from narrowgauge.errors import UsageError

OPERANDS = ("input", "weight", "gradient")
"""gradient: with respect to a layer's output."""
NO_NOISE_DB = 200.0
"""The ratio that stands for values that are represented exactly."""
STOCHASTIC_DB = -3.0
"""What stochastic rounding costs; its errors have a mean of zero, so sums lose less."""
Key = tuple[str, str, str, str, str, str]
"""Format, rule for scales, rounding, operand, product, and the path of the layer."""


@dataclass(frozen=True, kw_only=True)
class RoundingReading:
    """An operand of one product in one update."""

    format: str
    """The block format: mxfp8_e4m3, mxfp8_e5m2, mxfp4 or nvfp4."""
    rule: str
    """How powers of two were selected as scales: floor or up."""
    rounding: str
    """nearest or stochastic."""
    operand: str
    """One of ``OPERANDS``."""
    product: str
    """output, grad_input or grad_weight: blocks are along the dimension that it sums."""
    module: str
    nonzero: float
    """Values that were compared and are not zero."""
    flushed: float
    saturated: float
    lost: float
    signal: float
    noise: float

    @property
    def flushed_share(self) -> float:
        """Share of the nonzero values that became zero."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    @property
    def saturated_share(self) -> float:
        """Share of the nonzero values that are above the largest number of their block."""
        return self.saturated / self.nonzero if self.nonzero else 0.0

    @property
    def decibels(self) -> float:
        """Signal-to-quantization-noise ratio; ``NO_NOISE_DB`` if nothing was rounded."""
        if not self.noise:
            return NO_NOISE_DB
        return min(10 * math.log10(self.signal / self.noise), NO_NOISE_DB) if self.signal else -NO_NOISE_DB

    @property
    def usual_decibels(self) -> float:
        """The ratio that normally distributed values have in this format."""
        usual = find_block_format(self.format).decibels
        return usual[self.rule] + (STOCHASTIC_DB if self.rounding == "stochastic" else 0.0)

    @property
    def place(self) -> str:
        """The operand in words."""
        return f"{self.module} ({self.operand}, for {self.product})"

    def as_event(self) -> list[Any]:
        """Return the form used in a run's record."""
        return list(vars(self).values())

    @staticmethod
    def from_event(event: Iterable[Any]) -> RoundingReading:
        """Rebuild a reading from ``as_event``.

        Raises:
            ValueError: It is not one.
        """
        names = list(RoundingReading.__dataclass_fields__)
        fields: dict[str, Any] = dict(zip(names, event, strict=True))
        fields = {name: (str if name in names[:6] else float)(value) for name, value in fields.items()}
        reading = RoundingReading(**fields)
        try:
            known = find_block_format(reading.format).decibels
        except UsageError as error:
            raise ValueError(str(error)) from None
        if reading.rule not in known:
            raise ValueError(f"{reading.rule} is not a rule for {reading.format}")
        return reading


def merge_readings(keys: Iterable[Key | None], rows: Iterable[Iterable[float]]) -> list[RoundingReading]:
    """Return one reading for each key: rows of the same key (tiles, repeated calls) are summed, and None left out."""
    sums: dict[Key, list[float]] = {}
    for key, row in zip(keys, rows, strict=True):
        if key is None:
            continue
        known = sums.get(key)
        sums[key] = list(row) if known is None else [a + b for a, b in zip(known, row, strict=True)]
    names = list(RoundingReading.__dataclass_fields__)
    found = []
    for key, row in sums.items():
        fields: Mapping[str, Any] = dict(zip(names, (*key, *row), strict=True))
        found.append(RoundingReading(**fields))
    return found
