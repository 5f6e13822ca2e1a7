"""Compares the losses of measured recipes with those of their baselines: a fast step must also compute the same thing.

All of them start with the same weights and see the same batches. The first loss shows the forward pass, the last one
the updates as well. Differences are relative to the first loss, since the last one may be close to 0. Dropout draws
other masks in other implementations, so small batches with dropout differ by noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.bench.compare import Row

FIRST, LAST = 0.02, 0.1
"""The largest differences of comparable losses."""


@dataclass(frozen=True)
class LossGap:
    """The difference of a row's losses from those of its baseline."""

    name: str
    reference: str
    first: float | None
    """Of the losses of the first step, relative to that loss. None: a loss is unknown or not finite."""
    last: float | None
    """Of the losses of the last step, relative to the first loss. None also if the numbers of steps differ."""

    @property
    def comparable(self) -> bool:
        """Whether both differences are small."""
        return all(gap is not None and abs(gap) <= most for gap, most in ((self.first, FIRST), (self.last, LAST)))

    def __str__(self) -> str:
        first, last = ("unknown" if gap is None else f"{gap:+.2%}" for gap in (self.first, self.last))
        return f"loss of {self.name} compared with {self.reference}: {first} at the first step, {last} at the last"


def compare_losses(rows: Sequence[Row]) -> list[LossGap]:
    """Return the gap of each row that is not plain torch.

    The reference is the recipe's plain-torch baseline, else the first plain-torch row, else the first row.
    """
    plain = [row for row in rows if row.name.startswith("torch-")]
    gaps = []
    for row in rows:
        reference = next((one for one in plain if one.recipe == row.recipe), plain[0] if plain else rows[0])
        if row is reference or row in plain:
            continue
        scale = reference.loss_first
        first = _divide(row.loss_first, reference.loss_first, scale)
        same_steps = len(row.times_ms) == len(reference.times_ms)
        last = _divide(row.loss, reference.loss, scale) if same_steps else None
        gaps.append(LossGap(row.name, reference.name, first, last))
    return gaps


def _divide(loss: float | None, other: float | None, scale: float | None) -> float | None:
    if loss is not None and loss == other:
        return 0.0  # also of losses that are 0
    if loss is None or other is None or not scale:
        return None
    gap = (loss - other) / abs(scale)
    return gap if math.isfinite(gap) else None
