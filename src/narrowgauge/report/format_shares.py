"""The share of each tensor's values that every format would lose: a vectorized ``Reading.shares`` of gauges.

A run of 100,000 steps has a thousand samples of hundreds of tensors. Computing six formats for one reading at a time
would take minutes. The scale at which a format is applied to a tensor:

    FP32, TF32, BF16    none: the values without the loss scale
    FP16                gradients: the loss scale of the step; in a run of another format, the largest loss scale that
                        fits all gradients of the sample with some headroom. Other tensors: none
    FP8                 for each tensor the largest power of two that keeps its largest value in range
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
"""The range of exponents of the histograms; float32 has -149 to 127."""
_LARGEST_SCALE = 2.0**24
"""The largest loss scale considered, as in ``gauges.rules.predict_formats``."""

Floats = NDArray[np.float64]


class RecordedReading(NamedTuple):
    """One tensor in one sample, as recorded: a ``Reading`` of gauges without its dictionary of exponents."""

    kind: str
    module: str
    dtype: str
    values: int
    """The number of elements."""
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
    def parse(cls, event: Mapping[str, Any]) -> RecordedReading:
        """Parses the output of ``Reading.as_event``.

        Raises:
            KeyError, TypeError, ValueError, AttributeError, OverflowError: If it is not a valid reading.
        """
        first, counts = event["e"]
        get = event.get
        row = cls(event["k"], str(event["m"]), str(event["t"]), int(event["n"]), float(event["amax"]), int(first),
                  counts, int(get("zeros", 0)), int(get("inf", 0)), int(get("nan", 0)), float(get("scale", 1.0)),
                  float(get("lost") or 0.0))  # fmt: skip
        is_valid = row.kind in KINDS and 0 <= row.amax < math.inf and 0 < row.scale < math.inf and row.values >= 0
        if not is_valid or len(counts) > _LAST - _FIRST or not _FIRST <= row.first <= _LAST - len(counts):
            raise ValueError(f"reading of {row.module}")
        if counts and not (min(counts) >= 0 and sum(counts) < 1e30):
            raise ValueError(f"histogram of {row.module}")
        return row


def compute_shares(rows: Sequence[RecordedReading]) -> dict[str, Floats]:
    """For each plane, one share per row: what each format loses, and what is zero, not finite or lost already."""
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
    # A tensor of zeros loses nothing. The smallest double is far below the range of every format.
    amax = np.log2(np.maximum(np.array([r.amax for r in rows]), 5e-324))
    is_gradient = np.array(["gradient" in r.kind for r in rows])
    fit = 0.0 if has_training_scale(rows) else _fitting_scale(amax[is_gradient] - scale[is_gradient])
    for name, f in FORMATS.items():
        shift = _compute_shift(f, is_gradient, scale, amax, fit)
        limits = (math.log2(f.smallest_subnormal) - 1, math.log2(f.smallest_normal), math.log2(f.max))
        flushed, small, in_range = (_count_below(limit - shift, bins, below) / np.maximum(total, 1) for limit in limits)
        planes[f"{name} flushed"] = flushed
        planes[f"{name} subnormal"] = np.maximum(small - flushed, 0.0)
        # The bin that contains the limit is split above; the largest value decides whether anything overflows.
        beyond = (amax + shift > limits[2]) & (total > 0)
        planes[f"{name} overflow"] = np.where(beyond, np.clip(1 - in_range, 0.0, 1.0), 0.0)
    return planes


def has_training_scale(rows: Sequence[RecordedReading]) -> bool:
    """Whether gradients were read at the run's own loss scale: it uses one, or trains in FP16 without one."""
    return any(r.scale != 1.0 or r.dtype == "fp16" for r in rows if "gradient" in r.kind)


def _fitting_scale(sizes: Floats) -> float:
    """log2 of the largest loss scale that keeps all gradients of a sample within FP16, with headroom."""
    if not len(sizes) or sizes.max() < -1000:
        return 0.0
    return min(math.floor(math.log2(FORMATS["fp16"].max / HEADROOM) - float(sizes.max())), math.log2(_LARGEST_SCALE))


def _compute_shift(f: Format, is_gradient: NDArray[np.bool_], scale: Floats, amax: Floats, fit: float) -> Floats:
    """The power of two by which each tensor is scaled before a format is applied, relative to its reading."""
    if f.storage_bits == 8:
        return np.where(amax > -1000, np.floor(math.log2(f.max) - amax), 0.0)
    if f.name == "fp16":
        return np.where(is_gradient, np.where(scale == 0, fit, 0.0), -scale)
    return -scale


def _count_below(limit: Floats, bins: Floats, below: Floats) -> Floats:
    """The number of values below 2**limit in each row. Values are log-uniform within a bin."""
    place = np.clip(limit - _FIRST, 0.0, bins.shape[1])
    whole = np.minimum(place.astype(np.int64), bins.shape[1] - 1)
    rows = np.arange(len(bins))
    result: Floats = below[rows, whole] + bins[rows, whole] * (place - whole)
    return result
