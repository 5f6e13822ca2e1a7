"""Rules over the operands that an emulated recipe rounds to a block format: which lose their values, which are noisy.

E2M1 flushes 7 to 9% of normally distributed values and saturates 2 to 4%, sparse tensors up to half, and models train
all the same. So neither share is a fault by itself. The noise is: 6 dB less than normally distributed values have, or
almost all values flushed. Stochastic rounding flushes without a bias, and is judged by its noise alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from narrowgauge.block_formats import find_block_format
from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.rules.predict_block_formats import FATAL, NOISY_DB
from narrowgauge.gauges.watch.rounding_readings import RoundingReading

_FIX = "keep={module} computes the layer in FP32{options}"
_OPTIONS = "; gradient_rounding=stochastic and hadamard=random are NVIDIA's means for gradients in NVFP4"


def find_rounding_faults(readings: Iterable[RoundingReading]) -> Iterator[Finding]:
    """Find the operands of an update that do not suit the emulated format."""
    for one in readings:
        if one.lost or not one.nonzero:  # the rules for tensors report inf and NaN, and zeros
            continue
        title = find_block_format(one.format).title
        options = _OPTIONS if one.operand == "gradient" and one.rounding == "nearest" else ""
        common: dict[str, Any] = {"where": one.place, "fix": _FIX.format(module=one.module, options=options)}
        shares = f"{one.flushed_share:.0%} flushed to zero, {one.saturated_share:.0%} saturated"
        if one.rounding == "nearest" and one.flushed_share > FATAL:
            yield Finding(
                rule="block-underflow",
                severity=SERIOUS,
                detail=f"{one.flushed_share:.0%} of its values became zero in {title} (emulated)",
                why="the largest value of each block hides the others: the matrix product reads zeros for most of them",
                **common,
            )
        elif one.decibels < one.usual_decibels - NOISY_DB:
            yield Finding(
                rule="block-noise",
                severity=WARNING,
                detail=f"{one.decibels:.1f} dB in {title} (emulated), normally distributed values have "
                f"{one.usual_decibels:.1f}: {shares}",
                why="its product has four times the usual rounding noise, or more",
                **common,
            )
