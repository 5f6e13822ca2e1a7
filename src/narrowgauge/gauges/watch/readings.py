"""What was read off one tensor, and what any format would make of it at any scale. Knows nothing of torch.

A histogram over powers of two is enough for that: a value in [2**e, 2**(e + 1)) is flushed by a format when it lies
below half its smallest subnormal, held as a subnormal below its smallest normal, lost above its largest number. Within
a power of two values are taken to be spread evenly in the logarithm, which decides only where a limit cuts a bin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.formats import find_format

KINDS = ("weight", "activation", "gradient", "weight_gradient", "update")
"""gradient: of the loss by a module's output; weight_gradient: by a parameter; update: what a step added to one."""
_FIRST = -126
"""The power of two of the histogram's bin 1, which also holds everything smaller."""


@dataclass(frozen=True)
class Shares:
    """Which parts of a tensor's values (those that are finite and not zero) a format cannot hold well."""

    flushed: float
    subnormal: float
    overflow: float


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One tensor of one step."""

    kind: str
    module: str
    dtype: str
    """The format the tensor is in, by its name in ``formats``."""
    count: int
    zeros: int = 0
    inf: int = 0
    nan: int = 0
    amax: float = 0.0
    """Of the finite values."""
    mean_square: float = 0.0
    exponents: Mapping[int, int] = field(default_factory=dict)
    """How many values have |x| in [2**e, 2**(e + 1)), by e."""
    scale: float = 1.0
    """What the tensor was multiplied by: the loss scale of gradients, the scale of an FP8 tensor's site."""
    lost: float | None = None
    """Of updates: the share too small to change the weight if that were in BF16."""
    ratio: float | None = None
    """Of updates: their root mean square over the weights'."""

    @property
    def zero_share(self) -> float:
        return self.zeros / self.count if self.count else 0.0

    def shares(self, format: str, scale: float = 1.0) -> Shares:
        """What the format would lose of the tensor, multiplied by ``scale`` first."""
        known = find_format(format)
        total = sum(self.exponents.values())
        if not total:
            return Shares(0.0, 0.0, 0.0)
        shift = math.log2(scale)
        flush = math.log2(known.smallest_subnormal) - 1 - shift
        normal = math.log2(known.smallest_normal) - shift
        most = math.log2(known.max) - shift
        below = dict.fromkeys((flush, normal, most), 0.0)
        for exponent, count in self.exponents.items():
            for limit in below:
                below[limit] += count * min(max(limit - exponent, 0.0), 1.0)
        flushed, small, held = (below[limit] / total for limit in (flush, normal, most))
        # The bin of the limit is cut in two above, but the largest value is known.
        overflow = 1 - held if self.amax * scale > known.max else 0.0
        return Shares(flushed, max(small - flushed, 0.0), overflow)

    def best_scale(self, format: str) -> float:
        """The largest power of two that keeps the largest value within the format; 1 where there is no value."""
        if not self.amax:
            return 1.0
        return 2.0 ** math.floor(math.log2(find_format(format).max / self.amax))

    def as_event(self) -> dict[str, Any]:
        """As it is kept in a run's record: short, as there are many."""
        event: dict[str, Any] = {"k": self.kind, "m": self.module, "t": self.dtype, "n": self.count, "amax": self.amax}
        event |= {"ms": self.mean_square, "e": [min(self.exponents, default=0), _dense(self.exponents)]}
        optional = {"zeros": self.zeros, "inf": self.inf, "nan": self.nan, "lost": self.lost, "ratio": self.ratio}
        event |= {name: value for name, value in optional.items() if value}
        return event | ({"scale": self.scale} if self.scale != 1.0 else {})

    @staticmethod
    def from_event(event: Mapping[str, Any]) -> Reading:
        first, counts = event["e"]
        return Reading(
            kind=event["k"],
            module=event["m"],
            dtype=event["t"],
            count=event["n"],
            zeros=event.get("zeros", 0),
            inf=event.get("inf", 0),
            nan=event.get("nan", 0),
            amax=float(event["amax"]),
            mean_square=float(event["ms"]),
            exponents={first + index: count for index, count in enumerate(counts) if count},
            scale=float(event.get("scale", 1.0)),
            lost=_float(event.get("lost")),
            ratio=_float(event.get("ratio")),
        )


def read_counts(counts: list[int], total: int, amax: float) -> dict[str, Any]:
    """The fields that follow from a row of ``kernels.stats``: 256 bins, and how many are NaN, of ``total`` values.

    Where the bins are of a sample they are stretched to the whole; zeros are then not all, if anything is larger.
    """
    bins, nan, beyond = counts[:255], counts[256], counts[255]
    stretch = (total - beyond) / sum(bins) if any(bins) else 1.0
    exponents = {_FIRST + index: round(count * stretch) for index, count in enumerate(bins[1:]) if count}
    zeros = min(round(bins[0] * stretch), total - beyond - (amax > 0))
    return {"count": total, "zeros": zeros, "inf": beyond - nan, "nan": nan, "exponents": exponents}


def _float(value: Any) -> float | None:
    return None if value is None else float(value)  # NaN and infinity are text in a record


def _dense(exponents: Mapping[int, int]) -> list[int]:
    if not exponents:
        return []
    return [exponents.get(e, 0) for e in range(min(exponents), max(exponents) + 1)]
