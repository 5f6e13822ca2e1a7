"""Rules over the readings of tensors in one update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.formats import find_format
from narrowgauge.gauges.watch.readings import Reading
from narrowgauge.gauges.watch.snapshots import Snapshot

_MANY = 16
"""Microbatches whose sum in BF16, with 8 significant bits, no longer changes when a small one is added."""


@dataclass(frozen=True)
class UpdateContext:
    """The readings of one update, and the settings that decide what they mean."""

    snapshot: Snapshot
    microbatches: int = 1
    """Microbatches per update."""
    stochastic_rounding: bool = False
    """Weights without masters are rounded stochastically: most do not change in one step, but are right on average."""

    loss: float | None = None
    """The loss of the update, if it is known."""

    def select(self, kind: str) -> list[Reading]:
        """Return the readings of a kind, in the order of computation."""
        return [reading for reading in self.snapshot.readings if reading.kind == kind]


def check_tensors(context: UpdateContext) -> list[Finding]:
    """Return what every rule in ``RULES`` finds in the readings of one update."""
    return [finding for rule in RULES for finding in rule(context)]


def check_finite(context: UpdateContext) -> Iterator[Finding]:
    """Find the first activation with inf or NaN, in the order of computation: later ones only pass it on."""
    first = next((reading for reading in context.select("activation") if reading.inf or reading.nan), None)
    if first is None:
        return
    overflow = first.dtype == "fp16" and first.inf > 0
    if context.snapshot.applied:
        why = "no gradient of this update was affected, so it was applied; if one is, the update is skipped"
    else:
        why = "the loss and all gradients become inf or NaN; this is the forward pass, so no loss scale can help"
    yield Finding(
        rule="overflow" if overflow else "activation-not-finite",
        severity=SERIOUS,
        where=first.module,
        detail=f"{first.inf} inf and {first.nan} NaN among {first.count} values in {first.dtype}; the largest finite "
        f"value is {first.amax:.4g}",
        why=why,
        fix="keep the module in FP32 (keep=...), or train in bf16, which has the range of FP32" if overflow else
        "`narrowgauge replay` names the op that produced it",
    )  # fmt: skip


def check_logits(context: UpdateContext) -> Iterator[Finding]:
    """Find a head with very large outputs."""
    heads = [reading for reading in context.select("activation") if reading.module.endswith(("head", "logits"))]
    if heads and heads[-1].amax > 500:
        yield Finding(
            rule="exploding-logits",
            severity=SERIOUS if heads[-1].amax > 10_000 else WARNING,
            where=heads[-1].module,
            detail=f"its largest output is {heads[-1].amax:.4g}",
            why="softmax becomes one-hot; gradients vanish except in a few rows, and then spike",
            fix="lower the learning rate, add a z-loss or weight decay on the head",
        )


def check_fp16_limit(context: UpdateContext) -> Iterator[Finding]:
    """Find FP16 activations within a factor of 4 of the largest FP16 number."""
    largest = find_format("fp16").max
    for reading in context.select("activation"):
        if reading.dtype == "fp16" and not reading.inf and reading.amax > largest / 4:
            yield Finding(
                rule="activations-near-limit",
                severity=WARNING,
                where=reading.module,
                detail=f"its largest value is {reading.amax:.4g}; the FP16 maximum is {largest:g}",
                why="a slightly larger value becomes inf",
                fix="keep the module in FP32 (keep=...), or train in bf16",
            )


def check_accumulation(context: UpdateContext) -> Iterator[Finding]:
    """Find gradients of many microbatches that are summed in 16 bits."""
    narrow = [reading for reading in context.select("weight_gradient") if reading.dtype in ("bf16", "fp16")]
    if context.microbatches >= _MANY and narrow:
        yield Finding(
            rule="bf16-accumulation",
            severity=WARNING,
            where=narrow[0].module,
            detail=f"the gradients of {context.microbatches} microbatches are summed in {narrow[0].dtype}, here and in "
            f"{len(narrow) - 1} other parameters",
            why="later microbatches that are small compared with the running sum are rounded away",
            fix="sum in FP32 (gradients=fp32), or use fewer, larger microbatches",
        )


def check_updates(context: UpdateContext) -> Iterator[Finding]:
    """Find updates that are too small to change 16-bit weights, and updates that are larger than the weights."""
    if not context.snapshot.applied:
        return
    weights = {reading.module: reading for reading in context.select("weight")}
    gradients = {reading.module: reading for reading in context.select("weight_gradient")}
    for reading in context.select("update"):
        weight, gradient = weights.get(reading.module), gradients.get(reading.module)
        # Gradients that are released during backward are not read. Otherwise, without one its optimizer did not step.
        learns = not gradients if gradient is None else gradient.zeros < 0.5 * gradient.count
        learns = learns and not context.snapshot.facts.get(("no_rate", reading.module))
        narrow = weight is not None and weight.dtype in ("bf16", "fp16") and not context.stochastic_rounding
        if weight is not None and narrow and reading.zero_share > 0.5 and learns:
            yield Finding(
                rule="stagnating-updates",
                severity=SERIOUS,
                where=reading.module,
                detail=f"{reading.zero_share:.0%} of its weights did not change, because updates are smaller than half "
                f"the distance to the next {weight.dtype} number",
                why="training silently stops long before it has converged",
                fix="keep FP32 masters: a recipe with master=fp32 or split, and FP32 parameters for the optimizer",
            )
        # A weight that was initialized to zeros is as small as its updates, so the ratio alone proves nothing.
        broken = reading.inf or reading.nan
        if broken or ((reading.ratio or 0) > 1 and reading.amax > 1):
            yield Finding(
                rule="updates-too-large",
                severity=SERIOUS,
                where=reading.module,
                detail=f"the update has {reading.inf} inf and {reading.nan} NaN" if broken else
                f"the update is {reading.ratio:.3g} times as large as the weights",
                why="one step destroys the weights",
                fix="check Muon's eps, which must be above 0, and its ns_coefficients"
                if broken and ("muon_square", reading.module) in context.snapshot.facts else
                "check the optimizer states: moments or epsilon in FP16 underflow; or lower the learning rate",
            )  # fmt: skip


RULES: tuple[Callable[[UpdateContext], Iterator[Finding]], ...] = (
    check_finite,
    check_logits,
    check_fp16_limit,
    check_accumulation,
    check_updates,
)
