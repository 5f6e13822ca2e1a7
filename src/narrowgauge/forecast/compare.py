"""What a step would take without this or that: fused attention, narrowgauge's fused blocks and head, FP8's fused casts.

Each comparison is two traces of the same task, one with the thing and one without, priced by the same rates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.run import Plan
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import Roofline, predict
from narrowgauge.forecast.trace.trace_step import Traced
from narrowgauge.recipe import Recipe

GROUPS = {
    "norms, residual sums and casts": ("norm", "cast", "copy", "pointwise"),
    "activations": ("activation",),
    "head and loss": ("loss",),
}
"""What fusing changes, by kinds of work."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One thing that was fused: milliseconds of a step without it and with it."""

    name: str
    without_ms: float
    with_ms: float

    @property
    def saved_ms(self) -> float:
        return self.without_ms - self.with_ms


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """Attention by a fused kernel, and by products that write all scores to memory."""

    backend: str
    fused_ms: float
    plain_ms: float
    fused_peak: int
    plain_peak: int


def attention_cost(plan: Plan, recipe: Recipe, traced: Traced) -> AttentionCost | None:
    """What attention takes with and without FlashAttention or its like; None where the model has none."""
    names = {op.name for op in traced.trace.ops if op.kind == "attention"}
    backend = next((name for name in ("cudnn", "flash", "efficient") if any(name in one for one in names)), None)
    if backend is None:
        return None
    rates = ReachableRates(plan.gpu)
    plain = plan.trace(replace(recipe, attention="math"))
    with_it, without = predict(traced, rates), predict(plain, rates)
    fused_ms = with_it.by_kind["attention"]
    return AttentionCost(
        backend=backend,
        fused_ms=fused_ms,
        plain_ms=fused_ms + without.device_ms - with_it.device_ms,
        fused_peak=predict_memory(traced).total,
        plain_peak=predict_memory(plain).total,
    )


def fusion_savings(plan: Plan, recipe: Recipe, traced: Traced) -> list[Saving]:
    """What each fusion saves in a step; empty where a recipe fuses nothing on this model."""
    if not any(layer.part_of in ("block", "head") for layer in traced.layers):
        return []
    rates = ReachableRates(plan.gpu)
    wide = recipe if recipe.compute == "bf16" else replace(recipe, compute="bf16", scaling="none", products="fastest")
    fused = predict(traced if wide == recipe else plan.trace(wide), rates)
    plain = predict(plan.trace(wide, fused=False), rates)
    savings = [
        Saving(name=name, without_ms=_sum(plain, kinds), with_ms=_sum(fused, kinds)) for name, kinds in GROUPS.items()
    ]
    if recipe.compute == "fp8" and recipe.scaling == "delayed":
        apart = predict(plan.trace(replace(recipe, scaling="current")), rates)
        savings.append(
            Saving(
                name="FP8 casts inside of producers",
                without_ms=apart.device_ms,
                with_ms=predict(traced, rates).device_ms,
            )
        )
    return savings


def _sum(roofline: Roofline, kinds: tuple[str, ...]) -> float:
    return sum(roofline.by_kind.get(kind, 0.0) for kind in kinds)
