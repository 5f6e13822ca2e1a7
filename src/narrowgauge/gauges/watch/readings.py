"""Reading: the statistics of one tensor, and what any format would lose of it at any scale. Does not need torch.

A histogram over powers of two is enough: a format flushes a value in [2**e, 2**(e + 1)) below half its smallest
subnormal, holds it as a subnormal below its smallest normal, and overflows above its largest number. Within a power of
two, values are assumed to be uniform in the logarithm. This matters only where a limit falls inside a bin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.formats import find_format

KINDS = ("weight", "activation", "gradient", "weight_gradient", "update")
"""gradient: with respect to a module's output; weight_gradient: to a parameter; update: the change of a parameter."""
_FIRST = -126
"""The power of two of histogram bin 1, which also holds all smaller values."""


@dataclass(frozen=True)
class Shares:
    """The shares of a tensor's finite nonzero values that a format flushes, holds as subnormals or overflows."""

    flushed: float
    subnormal: float
    overflow: float


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The statistics of one tensor in one update."""

    kind: str
    module: str
    dtype: str
    """The tensor's format, by its name in ``formats``."""
    count: int
    zeros: int = 0
    inf: int = 0
    nan: int = 0
    amax: float = 0.0
    """Largest magnitude of the finite values."""
    mean_square: float = 0.0
    exponents: Mapping[int, int] = field(default_factory=dict)
    """Number of values with |x| in [2**e, 2**(e + 1)), by e."""
    scale: float = 1.0
    """The factor in the values: the loss scale for gradients, the scale of the site for FP8 tensors."""
    lost: float | None = None
    """Updates only: the share too small to change a BF16 weight."""
    ratio: float | None = None
    """Updates only: their root mean square divided by that of the weights."""

    @property
    def zero_share(self) -> float:
        """Share of all values that are zero."""
        return self.zeros / self.count if self.count else 0.0

    @property
    def is_zero(self) -> bool:
        """Whether all values are zero."""
        return self.zeros == self.count

    def shares(self, format: str, scale: float = 1.0) -> Shares:
        """Compute what a format would lose of the tensor.

        Args:
            format: Name of the format, for example ``"fp16"`` or ``"e4m3"``.
            scale: Factor that the tensor is multiplied by first.

        Returns:
            The shares of the finite nonzero values that are flushed, subnormal or overflow.

        Raises:
            UsageError: There is no such format.
        """
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
        # The bin that holds the limit is split above, but the largest value is known exactly.
        overflow = 1 - held if self.amax * scale > known.max else 0.0
        return Shares(flushed, max(small - flushed, 0.0), overflow)

    def best_scale(self, format: str) -> float:
        """Return the largest power of two that keeps the largest value within the format; 1 for a tensor of zeros."""
        if not self.amax:
            return 1.0
        return 2.0 ** math.floor(math.log2(find_format(format).max / self.amax))

    def as_event(self) -> dict[str, Any]:
        """Return the form used in a run's record; keys are short because there are many readings."""
        event: dict[str, Any] = {"k": self.kind, "m": self.module, "t": self.dtype, "n": self.count, "amax": self.amax}
        event |= {"ms": self.mean_square, "e": [min(self.exponents, default=0), _dense(self.exponents)]}
        optional = {"zeros": self.zeros, "inf": self.inf, "nan": self.nan, "lost": self.lost, "ratio": self.ratio}
        event |= {name: value for name, value in optional.items() if value}
        return event | ({"scale": self.scale} if self.scale != 1.0 else {})

    @staticmethod
    def from_event(event: Mapping[str, Any]) -> Reading:
        """Rebuild a reading from ``as_event``."""
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
    """Convert a row of ``kernels.tensor_stats`` (256 bins and the number of NaN) to the fields of a reading.

    If the bins come from a sample, counts are scaled up to ``total`` values. A tensor with a nonzero ``amax`` is then
    never reported as all zeros.
    """
    bins, nan, beyond = counts[:255], counts[256], counts[255]
    stretch = (total - beyond) / sum(bins) if any(bins) else 1.0
    exponents = {_FIRST + index: round(count * stretch) for index, count in enumerate(bins[1:]) if count}
    zeros = min(round(bins[0] * stretch), total - beyond - (amax > 0))
    return {"count": total, "zeros": zeros, "inf": beyond - nan, "nan": nan, "exponents": exponents}


def _float(value: Any) -> float | None:
    return None if value is None else float(value)  # NaN and infinity are strings in a record


def _dense(exponents: Mapping[int, int]) -> list[int]:
    if not exponents:
        return []
    return [exponents.get(e, 0) for e in range(min(exponents), max(exponents) + 1)]
