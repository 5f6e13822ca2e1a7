"""Predicts from a run in FP32 or BF16 what MXFP8, MXFP4 and NVFP4 would do to each operand of its linear layers.

The numbers are measured on blocks of the tensors (``gauges.watch.rounding_reader``), not derived from histograms: the
scale of a block follows the largest of its own 16 or 32 values, and a histogram does not say which values share a
block. Of all snapshots, the worst of each operand counts.

    noise       the SQNR is 6 dB below that of normally distributed values in the format: four times the usual noise
    underflow   more than half of the nonzero values become zero
    not finite  a block has inf or NaN, so none of its values can be read back

These name the operands that suit a format worst, and the recipe keeps their layers in FP32. How much noise training
tolerates is not known from one step: a training run in the emulated format shows it, and ``validate`` compares such
runs with FP32. So ``survives`` is only False where a product would read almost nothing of a tensor.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from narrowgauge.gauges.rules.keep_modules import ModelParts, make_recipe
from narrowgauge.gauges.rules.predict_formats import Break, Prediction
from narrowgauge.gauges.watch.rounding_readings import RoundingReading

NOISY_DB = 6.0
"""How far below the ratio of normally distributed values a tensor is called noisy."""
FLUSHED = 0.5
FATAL = 0.9
"""Share of the nonzero values of a tensor without which a product has lost it."""
RECIPES = {"mxfp8_e4m3": "emulated-mxfp8", "mxfp4": "emulated-mxfp4", "nvfp4": "emulated-nvfp4"}
"""By block format, the recipe that emulates it."""


def predict_block_formats(
    snapshots: Iterable[Sequence[RoundingReading]],
    *,
    updates: Sequence[int] = (),
    parts: ModelParts | None = None,
) -> list[Prediction]:
    """Predict what block formats would do.

    Args:
        snapshots: The readings of one or more updates.
        updates: The numbers of these updates, in order.
        parts: What is known about the modules. Without it, recipes are not checked against the model.

    Returns:
        One prediction for each format that was measured.
    """
    worst: dict[str, dict[tuple[str, str, str], RoundingReading]] = {}
    for readings in snapshots:
        for one in readings:
            known = worst.setdefault(one.format, {})
            place = one.module, one.operand, one.product
            if place not in known or _is_worse(one, known[place]):
                known[place] = one
    last = updates[-1] if updates else 0
    return [
        _predict(name, sorted(worst[name].values(), key=lambda one: one.decibels), last, parts or ModelParts())
        for name in RECIPES
        if name in worst
    ]


def describe_measured(measured: Mapping[str, Any], survives: bool) -> list[str]:
    """Return what was measured as two lines of text.

    Args:
        measured: The numbers of a prediction, as in a run's record.
        survives: Whether no operand is lost.
    """
    numbers = {name: float(measured[name]) for name in ("decibels", "decibels_usual", "decibels_worst")}
    return [
        f"{'' if survives else 'would fail: '}{measured['operands']} operands at {numbers['decibels']:.1f} dB in the "
        f"median (normal values have {numbers['decibels_usual']:.1f}), at least {numbers['decibels_worst']:.1f}: "
        f"{measured['worst']}",
        f"up to {float(measured['flushed']):.1%} flushed to zero, {float(measured['saturated']):.1%} saturated",
    ]


def find_break(one: RoundingReading) -> Break | None:
    """Return why an operand does not suit the format; None if it does."""
    if one.lost:
        return Break(one.module, one.operand, "not finite", 1.0, f"for {one.product}, a block has inf or NaN")
    if one.flushed_share > FLUSHED:
        detail = f"for {one.product}, {one.flushed_share:.0%} would be zero ({one.decibels:.1f} dB)"
        return Break(one.module, one.operand, "underflow", one.flushed_share, detail)
    if one.decibels < one.usual_decibels - NOISY_DB:
        detail = f"for {one.product}, {one.decibels:.1f} dB, normal values have {one.usual_decibels:.1f}"
        return Break(one.module, one.operand, "noise", one.flushed_share, detail)
    return None


def is_fatal(one: RoundingReading) -> bool:
    """Whether a product would read almost nothing of an operand."""
    return bool(one.lost) or one.flushed_share > FATAL


def _is_worse(one: RoundingReading, other: RoundingReading) -> bool:
    return (one.lost, -one.decibels) > (other.lost, -other.decibels)


def _predict(name: str, readings: list[RoundingReading], last: int, parts: ModelParts) -> Prediction:
    """Predict one format from the worst reading of each operand, in the order of their SQNR."""
    breaks = [found for one in readings if (found := find_break(one)) is not None]
    recipe = make_recipe(RECIPES[name], [(one.kind, one.module) for one in breaks], parts)
    tensors = [
        {
            "module": one.module,
            "operand": one.operand,
            "product": one.product,
            "decibels": one.decibels,
            "flushed": one.flushed_share,
            "saturated": one.saturated_share,
        }
        for one in readings
    ]
    measured = {
        "operands": len(readings),
        "decibels": statistics.median(one.decibels for one in readings),
        "decibels_usual": readings[0].usual_decibels,
        "decibels_worst": readings[0].decibels,
        "worst": readings[0].place,
        "flushed": max(one.flushed_share for one in readings),
        "saturated": max(one.saturated_share for one in readings),
    }
    return Prediction(
        RECIPES[name].removeprefix("emulated-"),
        not any(is_fatal(one) for one in readings),
        recipe,
        breaks=breaks,
        updates=last,
        measured=measured,
        tensors=tensors,
    )
