"""Foretells from a run in a wide format how FP16 and FP8 would do: which tensors would break, and how badly.

    FP16    an activation beyond 65,504 is an inf, and no loss scale helps. Gradients are scaled by one number for the
            whole model: the largest that keeps the largest gradient within range. What is still too small at that scale
            is flushed.
    FP8     every tensor has a scale of its own (E4M3 forward, E5M2 for gradients), so only the spread within a tensor
            counts, and, for delayed scales, whether it jumps beyond what earlier steps have shown.

A tensor breaks where more of it is lost than training is known to bear; the recipe keeps just those modules in higher
precision. Thresholds lean to the safe side: a warning that was not needed costs a little speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.formats import find_format
from narrowgauge.gauges.watch.readings import Reading

HEADROOM = 4.0
"""Activations and gradients may grow by this much before they are a risk."""
FLUSHED = 0.3
"""Of a tensor's values: what may be lost to zero. Gradients flushed up to here have trained well (break and tests)."""
JUMP = 16.0
"""From one look to the next a tensor that grows by more outruns delayed scales for a step."""
_KEPT = 8
"""More modules than this are not named one by one: then the format does not suit the model."""


@dataclass(frozen=True)
class Break:
    """A tensor that a format cannot hold."""

    module: str
    kind: str
    why: str
    """overflow, underflow or jump."""
    share: float
    """Of the values that would be lost; for a jump, the factor."""
    detail: str


@dataclass
class Foretold:
    """What would become of the run in one format."""

    format: str
    survives: bool
    recipe: str
    """What to train with: the format, with what breaks kept in higher precision."""
    loss_scale: float | None = None
    """For FP16: the largest power of two that keeps all gradients within range, with headroom."""
    breaks: list[Break] = field(default_factory=list)

    def as_event(self) -> dict[str, Any]:
        return {**vars(self), "breaks": [vars(one) for one in self.breaks]}


def foretell(looks: Iterable[Sequence[Reading]]) -> list[Foretold]:
    """For FP16 and FP8, from the readings of one or more updates of a run in FP32 or BF16."""
    history = [list(look) for look in looks]
    return [_fp16(history), _fp8(history)]


def _fp16(history: list[list[Reading]]) -> Foretold:
    most = find_format("fp16").max
    breaks: dict[tuple[str, str], Break] = {}
    gradients = [r for look in history for r in look if r.kind == "gradient" and r.amax > 0]
    largest = max((r.amax / r.scale for r in gradients), default=0.0)
    scale = 2.0 ** math.floor(math.log2(most / HEADROOM / largest)) if largest else 65536.0
    scale = min(scale, 2.0**24)
    for look in history:
        for r in look:
            if r.kind == "activation" and (r.amax * HEADROOM > most or r.inf or r.nan):
                share = r.shares("fp16").overflow
                breaks[r.module, r.kind] = Break(
                    r.module, r.kind, "overflow", share, f"its largest value is {r.amax:.4g}, FP16 ends at {most:g}"
                )
            if r.kind == "gradient" and r.exponents:
                flushed = r.shares("fp16", scale / r.scale).flushed
                if flushed > FLUSHED:
                    detail = f"{flushed:.0%} would be zero at the largest loss scale that fits all others, {scale:g}"
                    breaks[r.module, r.kind] = Break(r.module, r.kind, "underflow", flushed, detail)
    return _judged("fp16", list(breaks.values()), scale, fatal=_is_fatal(breaks.values()))


def _fp8(history: list[list[Reading]]) -> Foretold:
    breaks: dict[tuple[str, str], Break] = {}
    before: dict[tuple[str, str], float] = {}
    for index, look in enumerate(history):
        for r in look:
            if r.kind not in ("activation", "gradient", "weight") or not r.exponents:
                continue
            name = "e5m2" if r.kind == "gradient" else "e4m3"
            flushed = r.shares(name, r.best_scale(name)).flushed
            if flushed > FLUSHED:
                detail = f"{flushed:.0%} would be zero beside its largest value of {r.amax:.3g}, at the best scale"
                breaks[r.module, r.kind] = Break(r.module, r.kind, "underflow", flushed, detail)
            size = r.amax / r.scale
            last = before.get((r.module, r.kind))
            if index > 1 and last and size > JUMP * last:
                detail = f"it grew {size / last:.3g} times from one look to the next"
                breaks.setdefault((r.module, r.kind), Break(r.module, r.kind, "jump", size / last, detail))
            before[r.module, r.kind] = size
    return _judged("fp8", list(breaks.values()), None, fatal=_is_fatal(breaks.values()))


def _is_fatal(breaks: Iterable[Break]) -> bool:
    """Whether training in the format would fail, rather than lose a little: an inf in forward, or most of a tensor."""
    return any(
        (one.why == "overflow" and one.share > 0) or (one.why == "underflow" and one.share > 0.9) for one in breaks
    )


def _judged(format: str, breaks: list[Break], scale: float | None, fatal: bool) -> Foretold:
    modules = list(dict.fromkeys(one.module.removesuffix(".weight") for one in breaks if one.why != "jump"))
    if not modules:
        recipe = format
    elif len(modules) <= _KEPT:
        recipe = f"{format}[keep={'+'.join(modules)}]"
    else:
        recipe = "bf16"
    order = sorted(breaks, key=lambda one: (one.why != "overflow", -one.share))
    return Foretold(format, not fatal, recipe, scale, order)
