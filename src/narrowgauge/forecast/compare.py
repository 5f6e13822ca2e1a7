"""Predicts what each fusion saves: fused attention, narrowgauge's fused blocks and head, and FP8's fused casts.

Each comparison traces the same task twice, with the fusion and without it, and predicts both with the same rates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.run import Scenario
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import Roofline, predict_time
from narrowgauge.forecast.trace.trace_step import Traced
from narrowgauge.recipe import Recipe
from narrowgauge.recipe_checks import FP8_FIELDS

GROUPS = {
    "norms, residual sums and casts": ("norm", "cast", "copy", "pointwise"),
    "activations": ("activation",),
    "head and loss": ("loss",),
}
"""What fusing changes, by kind of work."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One fusion: milliseconds of a step without it and with it."""

    name: str
    without_ms: float
    with_ms: float

    @property
    def saved_ms(self) -> float:
        return self.without_ms - self.with_ms


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """Attention as a fused kernel, and as separate products that write all scores to memory."""

    backend: str
    fused_ms: float
    plain_ms: float
    fused_peak: int
    plain_peak: int


def compare_attention(scenario: Scenario, recipe: Recipe, traced: Traced) -> AttentionCost | None:
    """Predict attention with and without a fused kernel; None where the model has no attention."""
    names = {op.name for op in traced.trace.ops if op.kind == "attention"}
    backend = next((name for name in ("cudnn", "flash", "efficient") if any(name in one for one in names)), None)
    if backend is None:
        return None
    rates = ReachableRates(scenario.gpu)
    plain = scenario.trace(replace(recipe, attention="math"))
    with_it, without = predict_time(traced, rates), predict_time(plain, rates)
    fused_ms = with_it.by_kind["attention"]
    return AttentionCost(
        backend=backend,
        fused_ms=fused_ms,
        plain_ms=fused_ms + without.device_ms - with_it.device_ms,
        fused_peak=predict_memory(traced).total,
        plain_peak=predict_memory(plain).total,
    )


def compare_fusions(scenario: Scenario, recipe: Recipe, traced: Traced) -> list[Saving]:
    """Predict what each fusion saves per step; empty where a recipe fuses nothing in this model, or only the head."""
    if recipe.granularity != "tensor" or not any(layer.part_of in ("block", "head") for layer in traced.layers):
        return []
    rates = ReachableRates(scenario.gpu)
    wide = recipe if recipe.compute == "bf16" else _compute_in_bf16(recipe)
    fused = predict_time(traced if wide == recipe else scenario.trace(wide), rates)
    plain = predict_time(scenario.trace(wide, fused=False), rates)
    savings = [
        Saving(name=name, without_ms=_sum(plain, kinds), with_ms=_sum(fused, kinds)) for name, kinds in GROUPS.items()
    ]
    if recipe.compute == "fp8" and recipe.scaling == "delayed":
        apart = predict_time(scenario.trace(replace(recipe, scaling="current")), rates)
        savings.append(
            Saving(
                name="FP8 casts inside the producing kernels",
                without_ms=apart.device_ms,
                with_ms=predict_time(traced, rates).device_ms,
            )
        )
    return savings


def _compute_in_bf16(recipe: Recipe) -> Recipe:
    """Return an FP8 recipe with BF16 products, without what only FP8 recipes have."""
    plain = Recipe(compute="bf16")
    changes = {name: getattr(plain, name) for name in FP8_FIELDS}
    if recipe.activations in ("normalized", "8bit"):
        changes["activations"] = plain.activations
    if recipe.frozen == "fp8":
        changes["frozen"] = "bf16"
    return replace(recipe, compute="bf16", **changes)


def _sum(roofline: Roofline, kinds: tuple[str, ...]) -> float:
    return sum(roofline.by_kind.get(kind, 0.0) for kind in kinds)
