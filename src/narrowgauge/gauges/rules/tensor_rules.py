"""Rules over the readings of tensors, and over the scales and counts of FP8 sites."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from narrowgauge.formats import find_format
from narrowgauge.gauges.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.watch.probe import Look, Pulse
from narrowgauge.gauges.watch.readings import Reading

_CROWDED = 0.25
"""Share of FP16 values in the subnormal range from which a tensor counts as underflowing, if its largest is small."""
_SMALL = 2.0**-8
"""Where the largest gradient lies above this, what FP16 flushes is a hundredth of it and less, and does no harm."""
_MANY = 16
"""Microbatches whose sum in BF16, with 8 bits, no longer notices a small one."""


def see_look(look: Look, dithered: bool = False, microbatches: int = 1) -> list[Finding]:
    """What the readings of one update, of so many microbatches, show.

    ``dithered``: weights without masters are rounded stochastically: most of them then do not change in a step, and are
    right on average.
    """
    activations = [reading for reading in look.readings if reading.kind == "activation"]
    found = [*_not_finite(activations, look.applied), *_dead(look.readings), *_logits(activations)]
    for reading in look.readings:
        found += _underflow(reading)
        found += _near_limit(reading)
    narrow = [r for r in look.readings if r.kind == "weight_gradient" and r.dtype in ("bf16", "fp16")]
    if microbatches >= _MANY and narrow:
        found.append(_accumulation(narrow, microbatches))
    if look.applied:
        found += [one for one in _updates(look.readings) if not (dithered and one.rule == "stagnating-updates")]
    return found


def _not_finite(activations: Sequence[Reading], applied: bool) -> Iterator[Finding]:
    """The first in the order of computation: those after it only pass it on."""
    first = next((reading for reading in activations if reading.inf or reading.nan), None)
    if first is None:
        return
    over = first.dtype == "fp16" and first.inf > 0
    yield Finding(
        rule="overflow" if over else "activation-not-finite",
        severity=SERIOUS,
        where=first.module,
        detail=f"{first.inf} inf and {first.nan} NaN of {first.count} values in {first.dtype}, the largest finite one "
        f"{first.amax:.4g}",
        consequence="it reached no gradient of this update, which was applied; where it does, the update is skipped"
        if applied
        else "the loss and every gradient become inf or NaN; no loss scale can help, as this is forward",
        fix="keep the module in FP32 (keep=...), or train in bf16, which has FP32's range" if over else
        "`narrowgauge replay` names the op that made it",
    )  # fmt: skip


def _accumulation(narrow: Sequence[Reading], microbatches: int) -> Finding:
    return Finding(
        rule="bf16-accumulation",
        severity=WARNING,
        where=narrow[0].module,
        detail=f"the gradients of {microbatches} microbatches are summed in {narrow[0].dtype}, here and in "
        f"{len(narrow) - 1} more",
        consequence="a microbatch that is small beside the sum so far is rounded away, always the later ones",
        fix="sum in FP32: gradients=fp32, or fewer, larger microbatches",
    )


def _underflow(reading: Reading) -> Iterator[Finding]:
    if reading.kind != "gradient" or reading.dtype != "fp16":
        return
    shares = reading.shares("fp16")
    if reading.zero_share > 0.999:
        yield Finding(
            rule="underflow",
            severity=SERIOUS,
            where=reading.module,
            detail=f"{reading.zeros} of its {reading.count} gradients are zero, at a loss scale of {reading.scale:g}",
            consequence="the layer and those before it learn nothing",
            fix="scale the loss dynamically (recipe fp16); bf16 needs no scale",
        )
    elif shares.subnormal > _CROWDED and reading.amax < _SMALL:
        best = reading.best_scale("fp16") * reading.scale
        yield Finding(
            rule="underflow",
            severity=SERIOUS if shares.subnormal > 2 * _CROWDED else WARNING,
            where=reading.module,
            detail=f"{shares.subnormal:.0%} of its gradients that are not zero are FP16 subnormals and "
            f"{reading.zero_share:.0%} are zero, at a loss scale of {reading.scale:g}",
            consequence="small gradients vanish: the layer learns slowly, or not at all",
            fix=f"scale the loss dynamically (recipe fp16), or by up to {best:g}; bf16 needs no scale",
        )


def _near_limit(reading: Reading) -> Iterator[Finding]:
    if reading.kind == "activation" and reading.dtype == "fp16" and not reading.inf:
        most = find_format("fp16").max
        if reading.amax > most / 4:
            yield Finding(
                rule="activations-near-limit",
                severity=WARNING,
                where=reading.module,
                detail=f"its largest value is {reading.amax:.4g}; FP16 ends at {most:g}",
                consequence="the next outlier is an inf",
                fix="keep the module in FP32 (keep=...), or train in bf16",
            )


def _dead(readings: Sequence[Reading]) -> Iterator[Finding]:
    """Modules that give nothing but zeros, where others do not; and parameters that get no gradient."""
    for kind, rule, what in (("activation", "dead-layer", "output"), ("weight_gradient", "no-gradient", "gradient")):
        own = [reading for reading in readings if reading.kind == kind]
        alive = sum(reading.zeros < reading.count for reading in own)
        for reading in own if alive else ():
            if reading.zeros == reading.count:
                yield Finding(
                    rule=rule,
                    severity=SERIOUS if kind == "activation" else WARNING,
                    where=reading.module,
                    detail=f"all {reading.count} values of its {what} are zero",
                    consequence="it contributes nothing, and what lies before it learns nothing through it",
                    fix="look at its weights and inputs; in FP16 also at the loss scale",
                )


def _logits(activations: Sequence[Reading]) -> Iterator[Finding]:
    last = next((reading for reading in reversed(activations) if reading.module.endswith(("head", "logits"))), None)
    if last is not None and last.amax > 500:
        yield Finding(
            rule="exploding-logits",
            severity=SERIOUS if last.amax > 10_000 else WARNING,
            where=last.module,
            detail=f"its largest output is {last.amax:.4g}",
            consequence="softmax turns into a choice of one, gradients vanish but for a few rows, and then spike",
            fix="lower the learning rate, add a z-loss or weight decay on the head",
        )


def _updates(readings: Sequence[Reading]) -> Iterator[Finding]:
    weights = {reading.module: reading for reading in readings if reading.kind == "weight"}
    gradients = {reading.module: reading for reading in readings if reading.kind == "weight_gradient"}
    for reading in readings:
        if reading.kind != "update":
            continue
        weight, gradient = weights.get(reading.module), gradients.get(reading.module)
        learns = gradient is None or gradient.zeros < 0.5 * gradient.count
        if weight is not None and weight.dtype in ("bf16", "fp16") and reading.zero_share > 0.5 and learns:
            yield Finding(
                rule="stagnating-updates",
                severity=SERIOUS,
                where=reading.module,
                detail=f"{reading.zero_share:.0%} of its weights did not change, as updates are smaller than half the "
                f"distance to the next {weight.dtype} number",
                consequence="training stops long before it is done, and silently",
                fix="keep FP32 masters: a recipe with master=fp32 or split, and FP32 parameters for the optimizer",
            )
        # A weight that began as zeros is as small as its updates, so that a ratio alone says nothing.
        if reading.inf or reading.nan or ((reading.ratio or 0) > 1 and reading.amax > 1):
            yield Finding(
                rule="updates-too-large",
                severity=SERIOUS,
                where=reading.module,
                detail=f"an update is {reading.ratio:.3g} times its weights' size" if not (reading.inf or reading.nan)
                else f"{reading.inf} inf and {reading.nan} NaN in an update",
                consequence="the weights are lost in one step",
                fix="look at the optimizer's states: moments or epsilon in FP16 vanish; or lower the learning rate",
            )  # fmt: skip


class SiteRules:
    """FP8 sites from update to update: which saturate or flush, and whether their scales follow."""

    def __init__(self, window: int = 8) -> None:
        self.window = window
        self._seen: deque[Pulse] = deque(maxlen=window + 1)
        self.sizes: dict[str, int] = defaultdict(int)
        """Values of a tensor in an update, by site, as far as they are known."""

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of the updates so far, as plain values."""
        return {"seen": [dict(vars(pulse)) for pulse in self._seen], "sizes": dict(self.sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = deque((Pulse(**pulse) for pulse in state["seen"]), maxlen=self.window + 1)
        self.sizes = defaultdict(int, state["sizes"])

    def see(self, pulse: Pulse) -> list[Finding]:
        self._seen.append(pulse)
        if len(self._seen) <= self.window:
            return []
        found = []
        pulses = list(self._seen)
        for site in pulse.scales:
            rises = [b.saturated[site] - a.saturated[site] for a, b in itertools.pairwise(pulses)]
            scales = {p.scales[site] for p in pulses[-4:]}
            known = max(self.sizes.get(site, 0), 1)
            if all(rise > 0 for rise in rises[-4:]) and len(scales) == 1:
                found.append(_stale(site, rises[-1], pulse.scales[site]))
            elif all(rise > max(8, 1e-4 * known) for rise in rises):
                found.append(_saturating(site, rises, self.window))
            flushed = pulse.flushed[site] - pulses[0].flushed[site]
            if known > 1 and flushed > 0.5 * known * self.window:
                found.append(_flushing(site, flushed / (known * self.window)))
        return found


def _stale(site: str, count: int, scale: float) -> Finding:
    return Finding(
        rule="fp8-stale-scale",
        severity=SERIOUS,
        where=site,
        detail=f"{count} values saturated in the last update, as in those before, and the scale stays at {scale:.4g}",
        consequence="its largest values are all cut to the same number, so the layer computes something else",
        fix="let scales follow: scaling=delayed or current, and an amax history that is not frozen",
    )


def _saturating(site: str, rises: Sequence[int], window: int) -> Finding:
    return Finding(
        rule="fp8-saturating",
        severity=WARNING,
        where=site,
        detail=f"values saturated in each of the last {window} updates, {rises[-1]} in the last",
        consequence="outliers are cut: the tensor grows faster than its amax history follows",
        fix="give it headroom (margin=1), a shorter history with amax=recent, or keep the layer out of FP8",
    )


def _flushing(site: str, share: float) -> Finding:
    return Finding(
        rule="fp8-underflow",
        severity=SERIOUS,
        where=site,
        detail=f"{share:.0%} of its values were flushed to zero",
        consequence="the product reads zeros for most of the tensor",
        fix="scale it: scaling=delayed or current; for gradients take E5M2, which has the wider range",
    )
