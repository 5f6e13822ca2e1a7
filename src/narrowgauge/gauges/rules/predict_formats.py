"""Predicts from a run in FP32 or BF16 how FP16 and FP8 would do: which tensors would fail, and how badly.

    FP16    An activation beyond 65,504 is inf, and no loss scale helps. One loss scale applies to all gradients: the
            largest that keeps the largest gradient within range. Gradients too small at that scale are flushed.
    FP8     Every tensor has its own scale (E4M3 in forward, E5M2 for gradients), so only the range of values within a
            tensor matters and, for delayed scales, whether it jumps beyond what earlier steps have shown.

A tensor fails if it loses more than training is known to tolerate. The recommended recipe keeps just those modules in
higher precision. Thresholds are on the safe side: an unnecessary warning costs little speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.formats import find_format
from narrowgauge.gauges.watch.readings import Reading

HEADROOM = 4.0
"""Factor by which activations and gradients may still grow."""
FLUSHED = 0.3
"""Share of a tensor's values that may be flushed to zero. Gradients up to here have trained well (break and tests)."""
JUMP = 16.0
"""A tensor that grows by more than this between two snapshots exceeds delayed scales for a step."""
_KEPT = 8
"""If more modules than this fail, the format does not suit the model."""


@dataclass(frozen=True)
class Break:
    """A tensor that a format cannot hold."""

    module: str
    kind: str
    why: str
    """overflow, underflow or jump."""
    share: float
    """Share of the values that would be lost; for a jump, the factor of growth."""
    detail: str


@dataclass
class Prediction:
    """How a run would do in one format."""

    format: str
    survives: bool
    """Whether training would succeed."""
    recipe: str
    """Recommended recipe: the format, with the modules that fail kept in higher precision."""
    loss_scale: float | None = None
    """FP16 only: the largest power of two that keeps all gradients within range, with headroom."""
    breaks: list[Break] = field(default_factory=list)

    def as_event(self) -> dict[str, Any]:
        """Return the form used in a run's record."""
        return {**vars(self), "breaks": [vars(one) for one in self.breaks]}


def predict_formats(snapshots: Iterable[Sequence[Reading]]) -> list[Prediction]:
    """Predict how FP16 and FP8 would do.

    Args:
        snapshots: The readings of one or more updates of a run in FP32 or BF16, in order.

    Returns:
        One prediction for FP16 and one for FP8.
    """
    history = [list(readings) for readings in snapshots]
    return [_predict_fp16(history), _predict_fp8(history)]


def _predict_fp16(history: list[list[Reading]]) -> Prediction:
    most = find_format("fp16").max
    breaks: dict[tuple[str, str], Break] = {}
    gradients = [r for readings in history for r in readings if r.kind == "gradient" and r.amax > 0]
    largest = max((r.amax / r.scale for r in gradients), default=0.0)
    scale = 2.0 ** math.floor(math.log2(most / HEADROOM / largest)) if largest else 65536.0
    scale = min(scale, 2.0**24)
    for readings in history:
        for r in readings:
            if r.kind == "activation" and (r.amax * HEADROOM > most or r.inf or r.nan):
                share = r.shares("fp16").overflow
                breaks[r.module, r.kind] = Break(
                    r.module,
                    r.kind,
                    "overflow",
                    share,
                    f"its largest value is {r.amax:.4g}, the FP16 maximum is {most:g}",
                )
            if r.kind == "gradient" and r.exponents:
                flushed = r.shares("fp16", scale / r.scale).flushed
                if flushed > FLUSHED:
                    detail = f"{flushed:.0%} would be zero at the largest loss scale that fits all gradients, {scale:g}"
                    breaks[r.module, r.kind] = Break(r.module, r.kind, "underflow", flushed, detail)
    return _make_prediction("fp16", list(breaks.values()), scale, fatal=_is_fatal(breaks.values()))


def _predict_fp8(history: list[list[Reading]]) -> Prediction:
    breaks: dict[tuple[str, str], Break] = {}
    before: dict[tuple[str, str], float] = {}
    for index, readings in enumerate(history):
        for r in readings:
            if r.kind not in ("activation", "gradient", "weight") or not r.exponents:
                continue
            name = "e5m2" if r.kind == "gradient" else "e4m3"
            flushed = r.shares(name, r.best_scale(name)).flushed
            if flushed > FLUSHED:
                detail = f"{flushed:.0%} would be zero at the best scale for its largest value, {r.amax:.3g}"
                breaks[r.module, r.kind] = Break(r.module, r.kind, "underflow", flushed, detail)
            size = r.amax / r.scale
            last = before.get((r.module, r.kind))
            if index > 1 and last and size > JUMP * last:
                detail = f"it grew {size / last:.3g} times between two snapshots"
                breaks.setdefault((r.module, r.kind), Break(r.module, r.kind, "jump", size / last, detail))
            before[r.module, r.kind] = size
    return _make_prediction("fp8", list(breaks.values()), None, fatal=_is_fatal(breaks.values()))


def _is_fatal(breaks: Iterable[Break]) -> bool:
    """Whether training would fail, not just lose some precision: inf in the forward pass, or most of a tensor lost."""
    return any(
        (one.why == "overflow" and one.share > 0) or (one.why == "underflow" and one.share > 0.9) for one in breaks
    )


def _make_prediction(format: str, breaks: list[Break], scale: float | None, fatal: bool) -> Prediction:
    modules = list(dict.fromkeys(one.module.removesuffix(".weight") for one in breaks if one.why != "jump"))
    if not modules:
        recipe = format
    elif len(modules) <= _KEPT:
        recipe = f"{format}[keep={'+'.join(modules)}]"
    else:
        recipe = "bf16"
    order = sorted(breaks, key=lambda one: (one.why != "overflow", -one.share))
    return Prediction(format, not fatal, recipe, scale, order)
