"""Which shares of a look's tensors each format would lose: ``gauges.readings.Reading.shares``, for all of them at once.

A run of 100,000 steps has a thousand looks at hundreds of tensors; one by one, six formats each, they would take
minutes. At which scale a format sees a tensor:

    FP32, TF32, BF16    none: the values as they would be without a loss scale
    FP16                gradients at the loss scale they were trained with, or of a run in another format at the largest
                        that fits all of the look with some headroom; everything else as it is
    FP8                 each tensor at the largest power of two that keeps its largest value within range
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowgauge.formats import FORMATS, Format
from narrowgauge.gauges.rules.predict_formats import HEADROOM
from narrowgauge.gauges.watch.readings import KINDS

_FIRST, _LAST = -160, 140
"""Exponents of the histogram that formats are laid over; float32 holds -149 to 127."""
_LARGEST_SCALE = 2.0**24
"""The largest loss scale that is proposed, as in ``gauges.foretell``."""

Floats = NDArray[np.float64]


class Row(NamedTuple):
    """One tensor of one look, as the record has it: ``gauges.readings.Reading`` without its dictionary of exponents."""

    kind: str
    module: str
    dtype: str
    values: int
    """How many, in all."""
    amax: float
    first: int
    """Exponent of the first of ``counts``."""
    counts: list[int]
    zeros: int
    inf: int
    nan: int
    scale: float
    lost: float

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> Row:
        """From ``Reading.as_event``; ValueError and the like where it is something else."""
        first, counts = event["e"]
        get = event.get
        row = cls(event["k"], str(event["m"]), str(event["t"]), int(event["n"]), float(event["amax"]), int(first),
                  counts, int(get("zeros", 0)), int(get("inf", 0)), int(get("nan", 0)), float(get("scale", 1.0)),
                  float(get("lost") or 0.0))  # fmt: skip
        sound = row.kind in KINDS and 0 <= row.amax < math.inf and 0 < row.scale < math.inf and row.values >= 0
        if not sound or len(counts) > _LAST - _FIRST or not _FIRST <= row.first <= _LAST - len(counts):
            raise ValueError(f"reading of {row.module}")
        if counts and not (min(counts) >= 0 and sum(counts) < 1e30):
            raise ValueError(f"histogram of {row.module}")
        return row


def all_shares(rows: Sequence[Row]) -> dict[str, Floats]:
    """By plane, a share for each row: what formats lose, and what is zero, not finite or lost as it is."""
    count = np.array([max(r.values, 1) for r in rows], dtype=np.float64)
    planes = {
        "zeros": np.array([r.zeros for r in rows]) / count,
        "not finite": np.array([r.inf + r.nan for r in rows]) / count,
        "lost": np.array([r.lost for r in rows]),
    }
    bins = np.zeros((len(rows), _LAST - _FIRST + 1))
    for index, r in enumerate(rows):
        bins[index, r.first - _FIRST : r.first - _FIRST + len(r.counts)] = r.counts
    below = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(bins, axis=1)], axis=1)
    total = below[:, -1]
    scale = np.log2(np.array([r.scale for r in rows]))
    # Of a tensor of zeros nothing is lost; the smallest double is far below every format.
    amax = np.log2(np.maximum(np.array([r.amax for r in rows]), 5e-324))
    is_gradient = np.array(["gradient" in r.kind for r in rows])
    fit = 0.0 if is_as_trained(rows) else _fitting_scale(amax[is_gradient] - scale[is_gradient])
    for name, f in FORMATS.items():
        shift = _shift(f, is_gradient, scale, amax, fit)
        limits = (math.log2(f.smallest_subnormal) - 1, math.log2(f.smallest_normal), math.log2(f.max))
        flushed, small, held = (_below(limit - shift, bins, below) / np.maximum(total, 1) for limit in limits)
        planes[f"{name} flushed"] = flushed
        planes[f"{name} subnormal"] = np.maximum(small - flushed, 0.0)
        # The bin of the limit is cut in two above, but the largest value is known.
        beyond = (amax + shift > limits[2]) & (total > 0)
        planes[f"{name} overflow"] = np.where(beyond, np.clip(1 - held, 0.0, 1.0), 0.0)
    return planes


def is_as_trained(rows: Sequence[Row]) -> bool:
    """Whether gradients stand at a loss scale that the run chose: it has one, or is in FP16 without."""
    return any(r.scale != 1.0 or r.dtype == "fp16" for r in rows if "gradient" in r.kind)


def _fitting_scale(sizes: Floats) -> float:
    """log2 of the largest loss scale that keeps all gradients of a look within FP16, with headroom."""
    if not len(sizes) or sizes.max() < -1000:
        return 0.0
    return min(math.floor(math.log2(FORMATS["fp16"].max / HEADROOM) - float(sizes.max())), math.log2(_LARGEST_SCALE))


def _shift(f: Format, is_gradient: NDArray[np.bool_], scale: Floats, amax: Floats, fit: float) -> Floats:
    """By how many powers of two a format sees each tensor larger than it was read."""
    if f.storage_bits == 8:
        return np.where(amax > -1000, np.floor(math.log2(f.max) - amax), 0.0)
    if f.name == "fp16":
        return np.where(is_gradient, np.where(scale == 0, fit, 0.0), -scale)
    return -scale


def _below(limit: Floats, bins: Floats, below: Floats) -> Floats:
    """How many values of each row lie below 2**limit, those of a bin being spread evenly in the logarithm."""
    place = np.clip(limit - _FIRST, 0.0, bins.shape[1])
    whole = np.minimum(place.astype(np.int64), bins.shape[1] - 1)
    rows = np.arange(len(bins))
    result: Floats = below[rows, whole] + bins[rows, whole] * (place - whole)
    return result
