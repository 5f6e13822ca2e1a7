"""Predicts from a run in FP32 or BF16 how FP16 and FP8 would do: which tensors would fail, and how badly.

    FP16    An activation, the input of a layer or the result of a function beyond 65,504 is inf, and no loss scale
            helps. What autocast computes in FP32 is not affected. One loss scale applies to all gradients: the largest
            that keeps the largest gradient within range. Gradients too small at that scale are flushed.
    FP8     Every tensor has its own scale (E4M3 in forward, E5M2 for gradients), so only the range of values within a
            tensor matters and, for delayed scales, whether it jumps beyond what earlier steps have shown. Only inputs,
            weights and output gradients of linear layers are in FP8. If no layer of the model can run in FP8, for
            example because of odd widths, that is the prediction.
    growth  A value that grows steadily is judged by what it would be after as many updates again (``growth``).

A tensor fails if it loses more than training is known to tolerate. The recommended recipe keeps just those modules in
higher precision. Thresholds are on the safe side: an unnecessary warning costs little speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.formats import find_format
from narrowgauge.gauges.rules.growth import find_growth
from narrowgauge.gauges.rules.keep_modules import ModelParts, make_recipe
from narrowgauge.gauges.watch.readings import Reading

HEADROOM = 4.0
"""Factor by which activations and gradients may still grow."""
FLUSHED = 0.3
"""Share of a tensor's values that may be flushed to zero. Gradients up to here have trained well (break and tests)."""
JUMP = 16.0
"""A tensor that grows by more than this between two snapshots exceeds delayed scales for a step."""
_TINY = 2.0**-14
"""The smallest normal FP16 number: a tensor whose largest value is below it loses its small ones."""


@dataclass(frozen=True)
class Break:
    """A tensor that a format cannot hold."""

    module: str
    kind: str
    why: str
    """overflow, growth (it would overflow later), underflow or jump; for block formats also noise and not finite."""
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
    updates: int = 0
    """The last update that was read. Nothing is known about what happens after it, except what grows steadily."""
    unused: str | None = None
    """FP8 only: why no product of the model would run in it; None if one would. The recipe is then ``bf16``."""
    measured: dict[str, Any] | None = None
    """Block formats only: how many operands were measured, the median and the lowest SQNR in dB, that of normal values,
    and the largest shares flushed and saturated (``predict_block_formats``)."""
    tensors: list[dict[str, Any]] = field(default_factory=list)
    """Block formats only: module, operand, product, decibels, flushed and saturated of each operand, worst first."""

    def as_event(self) -> dict[str, Any]:
        """Return the form used in a run's record."""
        return {**vars(self), "breaks": [vars(one) for one in self.breaks]}


def predict_formats(
    snapshots: Iterable[Sequence[Reading]],
    *,
    updates: Sequence[int] | None = None,
    parts: ModelParts | None = None,
) -> list[Prediction]:
    """Predict how FP16 and FP8 would do.

    Args:
        snapshots: The readings of one or more updates of a run in FP32 or BF16, in order, with those in ``extra``.
        updates: The number of each of these updates; by default they are counted from 1.
        parts: What is known about the modules. Without it, recipes are not checked against the model.

    Returns:
        One prediction for FP16 and one for FP8.
    """
    history = [list(readings) for readings in snapshots]
    numbers = list(updates) if updates is not None else list(range(1, len(history) + 1))
    parts = parts or ModelParts.from_readings(history)
    found = []
    for format, breaks, scale in (
        ("fp16", *_find_fp16(history, numbers, parts)),
        ("fp8", _find_fp8(history, parts), None),
    ):
        kept = [(one.kind, one.module) for one in breaks if one.why != "jump"]
        order = sorted(map(_name_function, breaks), key=lambda one: (one.why not in ("overflow", "growth"), -one.share))
        last = numbers[-1] if numbers else 0
        found.append(Prediction(format, not _is_fatal(breaks), make_recipe(format, kept, parts), scale, order, last))
    if parts.no_fp8 is not None:
        found[-1] = Prediction("fp8", survives=True, recipe="bf16", updates=found[-1].updates, unused=parts.no_fp8)
    return found


def _find_fp16(history: list[list[Reading]], updates: list[int], parts: ModelParts) -> tuple[list[Break], float]:
    most = find_format("fp16").max
    breaks: dict[tuple[str, str], Break] = {}
    gradients = [r for readings in history for r in readings if r.kind == "gradient" and r.amax > 0]
    largest = max((r.amax / r.scale for r in gradients), default=0.0)
    scale = 2.0 ** math.floor(math.log2(most / HEADROOM / largest)) if largest else 65536.0
    scale = min(scale, 2.0**24)
    sizes: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for update, readings in zip(updates, history, strict=True):
        for r in readings:
            if _is_half(r, parts):
                sizes.setdefault((r.module, r.kind), []).append((update, r.amax))
                _add_worse(breaks, _check_fp16_range(r))
            if r.kind == "gradient" and r.exponents:
                flushed = r.shares("fp16", scale / r.scale).flushed
                if flushed > FLUSHED:
                    detail = f"{flushed:.0%} would be zero at the largest loss scale that fits all gradients, {scale:g}"
                    breaks[r.module, r.kind] = Break(r.module, r.kind, "underflow", flushed, detail)
    for (module, kind), points in sizes.items():
        growth = find_growth(points, most)
        if growth is not None and breaks.get((module, kind), _NONE).why != "overflow":
            detail = f"it grew from {points[0][1]:.3g} to {points[-1][1]:.3g} and {growth}"
            breaks[module, kind] = Break(module, kind, "growth", 0.0, detail)
    overflowing = {module for module, kind in breaks if kind == "activation"}
    return [one for one in breaks.values() if one.kind != "intermediate" or _owner(one) not in overflowing], scale


def _check_fp16_range(r: Reading) -> Iterator[Break]:
    """What FP16 loses of a tensor of the forward pass."""
    most = find_format("fp16").max
    if r.amax * HEADROOM > most or r.inf or r.nan:
        share = r.shares("fp16").overflow if r.exponents else float(r.amax > most)
        detail = f"its largest value is {r.amax:.4g}, the FP16 maximum is {most:g}"
        yield Break(r.module, r.kind, "overflow", share, detail)
    elif r.exponents and r.amax < _TINY and (flushed := r.shares("fp16").flushed) > FLUSHED:
        detail = f"{flushed:.0%} would be zero: its largest value is {r.amax:.3g}"
        yield Break(r.module, r.kind, "underflow", flushed, detail)


def _find_fp8(history: list[list[Reading]], parts: ModelParts) -> list[Break]:
    breaks: dict[tuple[str, str], Break] = {}
    before: dict[tuple[str, str], float] = {}
    for index, readings in enumerate(history):
        for r in readings:
            if not r.exponents or not parts.is_fp8(r.kind, r.module):
                continue
            name = "e5m2" if r.kind == "gradient" else "e4m3"
            flushed = r.shares(name, r.best_scale(name)).flushed
            if flushed > FLUSHED:
                detail = f"{flushed:.0%} would be zero at the best scale for its largest value, {r.amax:.3g}"
                _add_worse(breaks, [Break(r.module, r.kind, "underflow", flushed, detail)])
            size = r.amax / r.scale
            last = before.get((r.module, r.kind))
            if index > 1 and last and size > JUMP * last:
                detail = f"it grew {size / last:.3g} times between two snapshots"
                breaks.setdefault((r.module, r.kind), Break(r.module, r.kind, "jump", size / last, detail))
            before[r.module, r.kind] = size
    return list(breaks.values())


_NONE = Break("", "", "", 0.0, "")


def _is_half(r: Reading, parts: ModelParts) -> bool:
    """Whether a tensor of the forward pass would be in FP16."""
    return r.kind in ("input", "intermediate") or (r.kind == "activation" and r.module not in parts.stays_fp32)


def _name_function(one: Break) -> Break:
    """Name the function whose result is an intermediate: its place is the module and the function."""
    if one.kind != "intermediate":
        return one
    path, _, function = one.module.partition("\n")
    return replace(one, module=path or "(model or loss)", kind=function)


def _owner(one: Break) -> str:
    return one.module.partition("\n")[0]


def _add_worse(breaks: dict[tuple[str, str], Break], found: Iterable[Break]) -> None:
    """Add breaks; of two at one place, the one that loses more stays."""
    for one in found:
        before = breaks.get((one.module, one.kind))
        if before is None or before.why == "jump" or one.share >= before.share:
            breaks[one.module, one.kind] = one


def _is_fatal(breaks: Iterable[Break]) -> bool:
    """Whether training would fail, not just lose some precision: inf in the forward pass, or most of a tensor lost."""
    return any(
        one.why == "growth" or (one.why == "overflow" and one.share > 0) or (one.why == "underflow" and one.share > 0.9)
        for one in breaks
    )
