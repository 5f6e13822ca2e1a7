"""SQNR: how much larger a tensor is than what a narrower computation adds to it, in decibels.

    SQNR = 10 log10(sum of reference**2 / sum of (candidate - reference)**2)        6 dB are one bit

Sums are taken in FP64. Equal tensors have inf, candidates with an inf or NaN that the reference has not have -inf. JSON
has neither: there 200 stands for equal and -200 for not finite (``capped``); null is for what does not exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats import find_format
from narrowgauge.gauges.watch.readings import Reading, Shares, read_counts
from narrowgauge.kernels import FP8_MAX
from narrowgauge.kernels.tensor_stats import StatsTable, add_statistics

CAP = 200.0
"""In JSON, what equal tensors are said to have; with a minus, those that are not finite."""
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_PART = 1 << 22


@dataclass
class Tally:
    """Signal and noise, summed over any number of tensors."""

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0
    not_finite: int = 0
    """Values of the candidate that are inf or NaN where the reference is not, or the other way round."""

    @torch.no_grad()
    def add(self, reference: Tensor, candidate: Tensor, scale: float = 1.0) -> None:
        """Take in a tensor and its counterpart, which was computed ``scale`` times as large."""
        self.count += reference.numel()
        for one, other in zip(_parts(reference), _parts(candidate), strict=True):
            exact, given = one.double(), other.to(one.device).double() / scale
            finite = torch.isfinite(exact)
            both = finite & torch.isfinite(given)
            same = (exact == given) | (torch.isnan(exact) & torch.isnan(given))
            self.not_finite += int((~both & ~same).sum())
            self.signal += float(torch.where(finite, exact, 0.0).square().sum())
            self.noise += float(torch.where(both, given - exact, 0.0).square().sum())

    @property
    def decibels(self) -> float | None:
        """None where there was nothing to compare."""
        if not self.count:
            return None
        if self.not_finite:
            return -math.inf
        if not self.noise:
            return math.inf
        return max(10 * math.log10(self.signal / self.noise), -CAP) if self.signal else -CAP

    @property
    def relative(self) -> float:
        """The noise over the signal."""
        return self.noise / self.signal if self.signal else 0.0


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    dense: Tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return tuple(dense.reshape(-1).split(_PART))


def capped(decibels: float | None) -> float | None:
    """As JSON can hold it: within 200 dB either way."""
    return None if decibels is None else max(-CAP, min(CAP, decibels))


def spoken(decibels: float | None) -> str:
    """As people read it."""
    if decibels is None:
        return ""
    if math.isinf(decibels):
        return "equal" if decibels > 0 else "not finite"
    return f"{decibels:.1f}"


def rounded(x: Tensor, format: str | None, scale: float = 1.0, limited: bool = True) -> Tensor:
    """What a format holds of ``x * scale``, divided by the scale again; None is a format that holds everything.

    FP8 saturates, as narrowgauge's casts do. Without ``limited`` the format has all exponents there are, so that only
    the spacing of its numbers is left.
    """
    if format is None:
        return x
    wide = x.double() * scale
    if limited and format in DTYPES:
        dtype = DTYPES[format]
        most = FP8_MAX.get(dtype, math.inf)
        held = wide.clamp(-most, most).to(dtype).double()
    else:
        mantissa, exponent = torch.frexp(wide)
        places = 2.0 ** (find_format(format).mantissa_bits + 1)
        held = torch.ldexp(torch.round(mantissa * places) / places, exponent)
    return (held / scale).to(x.dtype)


def shares_of(x: Tensor, format: str, scale: float) -> Shares:
    """Which parts of a tensor's values a format cannot hold at a scale, by their powers of two."""
    table = StatsTable.make(1, x.device)
    add_statistics(table, 0, x.float())
    amax, squares = table.sizes[0].tolist()
    fields = read_counts(table.counts[0].tolist(), x.numel(), amax)
    reading = Reading(kind="activation", module="", dtype="fp32", amax=amax, mean_square=squares, **fields)
    return reading.shares(format, scale)
