"""Rules over tensors that are zeros, or too small for FP16.

One snapshot proves nothing, so ``lasting`` decides which are reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.rules.tensor_rules import UpdateContext
from narrowgauge.gauges.watch.readings import Reading

_CROWDED = 0.25
"""Share of FP16 values in the subnormal range above which a tensor counts as underflowing, if its largest is small."""
_SMALL = 2.0**-8
"""If the largest gradient is above this, what FP16 flushes is at most a hundredth of it and does no harm."""


def find_zeros(context: UpdateContext) -> tuple[list[Finding], list[Finding]]:
    """Find modules whose output is all zeros, and parameters and FP16 activations whose gradient is.

    Args:
        context: The readings of one update.

    Returns:
        The findings, and those that a weight explains which starts at zero: they pass once it has changed.
    """
    if context.loss == 0:  # a hinge loss that has reached 0 has no gradient
        return [], []
    found: list[tuple[Reading, Finding]] = []
    activations, weight_gradients = context.select("activation"), context.select("weight_gradient")
    if any(not one.is_zero for one in activations):
        found += [(one, _describe_dead(one)) for one in activations if one.is_zero]
    if any(not one.is_zero for one in weight_gradients):
        found += [(one, _describe_no_gradient(one)) for one in weight_gradients if one.is_zero]
    for one in context.select("gradient"):
        found += [(one, finding) for finding in _check_underflow(one)]
    expected = _find_explained(context)
    return (
        [finding for reading, finding in found if (reading.kind, reading.module) not in expected],
        [finding for reading, finding in found if (reading.kind, reading.module) in expected],
    )


def find_starting_at_zero(context: UpdateContext) -> set[str]:
    """Return the modules whose weights are all zero but get a gradient: the next update changes them."""
    learning = {one.module for one in context.select("weight_gradient") if not one.is_zero}
    zero = {one.module for one in context.select("weight") if one.count and one.is_zero}
    return {name.removesuffix(".weight") for name in zero & learning if name.endswith(".weight")}


def _find_explained(context: UpdateContext) -> set[tuple[str, str]]:
    """Return the kinds and places whose zeros can follow from a weight that starts at zero.

    Its own output is zero. What is computed before it gets no gradient through it, nor do the modules right after it
    whose output it multiplies (a gate). What follows after the first module with a gradient has another reason.
    """
    starting = find_starting_at_zero(context)
    if not starting:
        return set()
    order = [one.module for one in context.select("activation")]
    unlearned = {one.module for one in context.select("gradient") if one.is_zero}
    last = max((place for place, module in enumerate(order) if module in starting), default=-1)
    after = itertools.takewhile(lambda module: module in unlearned, order[last + 1 :])
    waiting = {*order[: max(last, 0)], *after}
    zero = {one.module.removesuffix(".weight") for one in context.select("weight") if one.is_zero}
    explained = {("activation", module) for module in starting | (waiting & zero)}
    explained |= {("gradient", module) for module in waiting}
    for one in context.select("weight_gradient"):
        module = one.module.rpartition(".")[0]
        if module in waiting or module not in order:  # a parameter of a module that is not watched
            explained.add(("weight_gradient", one.module))
    return explained


def _check_underflow(reading: Reading) -> Iterator[Finding]:
    """Find FP16 gradients that are zero or subnormal for the most part."""
    if reading.dtype != "fp16":
        return
    shares = reading.shares("fp16")
    if reading.zero_share > 0.999:
        yield Finding(
            rule="underflow",
            severity=SERIOUS,
            where=reading.module,
            detail=f"{reading.zeros} of {reading.count} gradients are zero at a loss scale of {reading.scale:g}",
            why="this layer and those before it learn nothing",
            fix="use a dynamic loss scale (recipe fp16), or bf16, which needs none",
        )
    elif shares.subnormal > _CROWDED and reading.amax < _SMALL:
        best = reading.best_scale("fp16") * reading.scale
        yield Finding(
            rule="underflow",
            severity=SERIOUS if shares.subnormal > 2 * _CROWDED else WARNING,
            where=reading.module,
            detail=f"{shares.subnormal:.0%} of its nonzero gradients are FP16 subnormals and "
            f"{reading.zero_share:.0%} of all are zero at a loss scale of {reading.scale:g}",
            why="small gradients are lost: the layer learns slowly, or not at all",
            fix=f"use a dynamic loss scale (recipe fp16), or a fixed one of up to {best:g}; bf16 needs none",
        )


def _describe_dead(reading: Reading) -> Finding:
    return Finding(
        rule="dead-layer",
        severity=SERIOUS,
        where=reading.module,
        detail=f"all {reading.count} values of its output are zero",
        why="it contributes nothing, and layers before it get no gradient through it",
        fix="check its weights and inputs; in FP16, also the loss scale",
    )


def _describe_no_gradient(reading: Reading) -> Finding:
    return Finding(
        rule="no-gradient",
        severity=WARNING,
        where=reading.module,
        detail=f"all {reading.count} values of its gradient are zero",
        why="it learns nothing",
        fix="check whether the loss depends on it; in FP16, also the loss scale",
    )
