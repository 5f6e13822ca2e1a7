"""SQNR (signal-to-quantization-noise ratio): the size of a tensor relative to its error in low precision, in decibels.

    SQNR = 10 log10(sum of reference**2 / sum of (candidate - reference)**2)        6 dB are one bit

Sums are in FP64. Equal tensors have an SQNR of inf. If only the candidate has inf or NaN, the SQNR is -inf. JSON has
neither: there 200 means equal, -200 means not finite (``cap``), and null means that the quantity does not exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats import find_format
from narrowgauge.gauges.watch.readings import Reading, Shares, read_counts
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.kernels.tensor_stats import StatsTable, add_statistics

CAP = 200.0
"""The SQNR of equal tensors in JSON; negative for tensors that are not finite."""
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_PART = 1 << 22


@dataclass
class Tally:
    """Sums signal and noise over any number of tensors."""

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0
    not_finite: int = 0
    """Values that are inf or NaN in only one of candidate and reference."""

    @torch.no_grad()
    def add(self, reference: Tensor, candidate: Tensor, scale: float = 1.0) -> None:
        """Adds a tensor and its low-precision counterpart, which is ``scale`` times as large."""
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
        """The SQNR; None if no tensor was added."""
        if not self.count:
            return None
        if self.not_finite:
            return -math.inf
        if not self.noise:
            return math.inf
        return max(10 * math.log10(self.signal / self.noise), -CAP) if self.signal else -CAP

    @property
    def relative(self) -> float:
        """The ratio of noise to signal."""
        return self.noise / self.signal if self.signal else 0.0


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    dense: Tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return tuple(dense.reshape(-1).split(_PART))


def cap(decibels: float | None) -> float | None:
    """Limits decibels to ±200, for JSON."""
    return None if decibels is None else max(-CAP, min(CAP, decibels))


def format_decibels(decibels: float | None) -> str:
    """Decibels as text."""
    if decibels is None:
        return ""
    if math.isinf(decibels):
        return "equal" if decibels > 0 else "not finite"
    return f"{decibels:.1f}"


def round_to_format(x: Tensor, format: str | None, scale: Tensor | float = 1.0, limited: bool = True) -> Tensor:
    """Rounds ``x * scale`` to a format and divides by the scale again.

    FP8 saturates, like narrowgauge's casts.

    Args:
        x: The tensor.
        format: The name of the format; None returns ``x``.
        scale: The factor before rounding, or factors in a shape that broadcasts to that of ``x``.
        limited: Apply the format's exponent range. Without it only the mantissa is rounded.
    """
    if format is None:
        return x
    wide = x.double() * scale
    if limited and format in DTYPES:
        dtype = DTYPES[format]
        most = FP8_MAX.get(dtype, math.inf)
        stored = wide.clamp(-most, most).to(dtype).double()
    else:
        mantissa, exponent = torch.frexp(wide)
        places = 2.0 ** (find_format(format).mantissa_bits + 1)
        stored = torch.ldexp(torch.round(mantissa * places) / places, exponent)
    return (stored / scale).to(x.dtype)


def measure_shares(x: Tensor, format: str, scale: Tensor | float) -> Shares:
    """The shares of a tensor's values that a format flushes, stores as subnormals or overflows at a scale."""
    if isinstance(scale, Tensor):
        x, scale = x * scale, 1.0
    table = StatsTable.make(1, x.device)
    add_statistics(table, 0, x.float())
    amax, squares = table.sizes[0].tolist()
    fields = read_counts(table.counts[0].tolist(), x.numel(), amax)
    reading = Reading(kind="activation", module="", dtype="fp32", amax=amax, mean_square=squares, **fields)
    return reading.shares(format, scale)
