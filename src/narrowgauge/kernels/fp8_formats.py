"""The FP8 formats of the kernels, by name. A new one is a line here, and its conversions in ``fp8_tile``.

Kernels take the name as the constant FORMAT; None stands for an output in 16 or 32 bits, which has no scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from narrowgauge.kernels import HAVE_TRITON, jit

if HAVE_TRITON:
    import triton.language as tl


class Fp8Format(NamedTuple):
    """What casts to a format must know."""

    name: str
    largest: float
    """The largest finite value. Casts saturate to it."""
    flush: float
    """Half the smallest subnormal: values up to this become 0."""
    saturation: float
    """Half a step above the largest value. Up to here rounding gives that value; only values beyond it are clipped."""


FP8_FORMATS: dict[torch.dtype, Fp8Format] = {
    torch.float8_e4m3fn: Fp8Format("e4m3", 448.0, 2.0**-10, 464.0),
    torch.float8_e5m2: Fp8Format("e5m2", 57344.0, 2.0**-17, 61440.0),
}
FP8_MAX = {dtype: format.largest for dtype, format in FP8_FORMATS.items()}
FLUSH_THRESHOLD = {dtype: format.flush for dtype, format in FP8_FORMATS.items()}
SATURATION_THRESHOLD = {dtype: format.saturation for dtype, format in FP8_FORMATS.items()}
FP8_DTYPES = {format.name: dtype for dtype, format in FP8_FORMATS.items()}
"""The dtype of each name."""


def get_format_name(dtype: torch.dtype | None) -> str | None:
    """Return a dtype's constant FORMAT; None if it is not an FP8 format."""
    return FP8_FORMATS[dtype].name if dtype in FP8_FORMATS else None


# Kernels cannot read the table, so it is here once more; a test compares them.
@jit
def largest_of(FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    return 448.0 if FORMAT == "e4m3" else 57344.0


@jit
def flush_threshold_of(FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    return 0.0009765625 if FORMAT == "e4m3" else 7.62939453125e-06


@jit
def saturation_threshold_of(FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    return 464.0 if FORMAT == "e4m3" else 61440.0
