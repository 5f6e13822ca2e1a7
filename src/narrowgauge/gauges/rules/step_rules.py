"""Rules over a run's steps: loss, gradient norm, loss scale, skipped updates.

Thresholds are wide: training is noisy, above all at its start, and a false alarm costs more trust than a late one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.gauges.findings import SERIOUS, WARNING, Finding

WINDOW = 200
"""Steps that are remembered."""
RECENT = 50
ENOUGH = 20
"""Steps before a step can be compared with those before it."""


@dataclass(frozen=True)
class Step:
    """The numbers of one update."""

    number: int
    loss: float
    grad_norm: float
    loss_scale: float
    applied: bool


class StepRules:
    """Looks at each step beside those before it."""

    def __init__(self, scaled: bool = False, floor: float = 1.0) -> None:
        """``scaled``: the recipe has a dynamic loss scale, which never falls below ``floor``."""
        self.scaled, self.floor = scaled, floor
        self.steps: deque[Step] = deque(maxlen=WINDOW)
        self._first: list[float] = []
        self._lowest = math.inf
        self._bad: int | None = None
        """The first of the steps whose loss is not finite, while it is not."""
        self._bad_applied = 0
        """How many of them were applied: a loss may be NaN where no gradient is."""

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of the steps so far, as plain values."""
        steps = [list(dataclasses.astuple(step)) for step in self.steps]
        return {"steps": steps, "first": list(self._first), "lowest": self._lowest} | {
            "bad": self._bad,
            "bad_applied": self._bad_applied,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = deque((Step(*values) for values in state["steps"]), maxlen=WINDOW)
        self._first, self._lowest = list(state["first"]), state["lowest"]
        self._bad, self._bad_applied = state["bad"], state["bad_applied"]

    def see(self, step: Step) -> list[Finding]:
        """What the step shows."""
        found = [*self._loss(step), *self._gradient(step), *self._scale(step), *self._skips(step)]
        self.steps.append(step)
        return found

    def _loss(self, step: Step) -> Iterator[Finding]:
        if not math.isfinite(step.loss):
            self._bad = step.number if self._bad is None else self._bad
            self._bad_applied += step.applied
            if step.number - self._bad >= 2:
                yield Finding(
                    rule="loss-not-finite",
                    severity=SERIOUS,
                    where="loss",
                    detail=f"the loss is {step.loss} since step {self._bad}",
                    consequence=_consequence(step.number - self._bad + 1, self._bad_applied),
                    fix="`narrowgauge replay` names the op that made the first inf or NaN; a lower learning rate or a "
                    "recipe with a wider range may help",
                )
            return
        if self._bad is not None:
            yield bad_batch(self._bad, step.number - self._bad, self._bad_applied)
            self._bad, self._bad_applied = None, 0
        if len(self._first) < 5:
            self._first.append(step.loss)
        recent = [s.loss for s in list(self.steps)[-RECENT:] if math.isfinite(s.loss)]
        if len(recent) < ENOUGH:
            return
        middle = statistics.median(recent)
        spread = statistics.median(abs(loss - middle) for loss in recent)
        if step.loss > middle + max(12 * spread, 0.5 * abs(middle)):
            yield Finding(
                rule="loss-spike",
                severity=WARNING,
                where=f"step {step.number}",
                detail=f"the loss is {step.loss:.4g} where the last {len(recent)} steps had {middle:.4g}",
                consequence="a single bad batch passes; spikes that come again and do not heal are divergence",
                fix="look at the batch; clip gradients, or lower the learning rate",
            )
        latest = statistics.median(recent[-10:])  # one spike among them is no divergence
        self._lowest = min(self._lowest, latest)
        start = statistics.median(self._first)
        if latest > start + 0.1 * abs(start) and latest > self._lowest + 0.5 * abs(self._lowest):
            yield Finding(
                rule="loss-diverging",
                severity=SERIOUS,
                where="loss",
                detail=f"the last ten had {latest:.4g}, the first {start:.4g}, the best {self._lowest:.4g}",
                consequence="the run forgets what it has learnt",
                fix="lower the learning rate, warm it up longer, clip gradients",
            )

    def _gradient(self, step: Step) -> Iterator[Finding]:
        norms = [s.grad_norm for s in list(self.steps)[-RECENT:] if s.applied and math.isfinite(s.grad_norm)]
        if len(norms) < ENOUGH or not step.applied:
            return
        middle = statistics.median(norms)
        if step.grad_norm > 20 * middle > 0:
            yield Finding(
                rule="gradient-spike",
                severity=WARNING,
                where=f"step {step.number}",
                detail=f"the gradients' norm is {step.grad_norm:.3g} where the last {len(norms)} had {middle:.3g}",
                consequence="without clipping one such step can undo many",
                fix="clip gradients (--clip 1.0), and look at the batch",
            )
        if middle == 0 and step.grad_norm == 0:
            yield Finding(
                rule="no-gradient",
                severity=SERIOUS,
                where="all parameters",
                detail=f"the gradients of the last {len(norms)} steps are all zero",
                consequence="nothing is learnt, though every step is taken",
                fix="in FP16, scale the loss; else look for a detach() or an output that the loss does not depend on",
            )
        elif max(norms) <= min(norms) * (1 + 1e-4) and min(norms) > 0:
            yield Finding(
                rule="gradient-norm-constant",
                severity=SERIOUS,
                where="all parameters",
                detail=f"the last {len(norms)} gradients all have a norm of {middle:.4g}",
                consequence="they were clipped before they were unscaled: steps are smaller by the loss scale",
                fix="unscale before clipping; an Engine's clip_norm does",
            )

    def _scale(self, step: Step) -> Iterator[Finding]:
        if not self.scaled or len(self.steps) < ENOUGH:
            return
        recent = [s.loss_scale for s in list(self.steps)[-RECENT:]]
        fell = math.log2(max(recent) / step.loss_scale)
        if fell >= 12:
            yield Finding(
                rule="scale-collapsing",
                severity=SERIOUS,
                where="loss scale",
                detail=f"it fell from {max(recent):g} to {step.loss_scale:g} within {len(recent)} updates",
                consequence="gradients overflow at every scale: an inf is made before scaling, in forward or by an op",
                fix="`narrowgauge replay` names the op; keep its module in FP32, or train in bf16",
            )
        at_floor = [s for s in list(self.steps)[-ENOUGH:] if s.loss_scale <= self.floor]
        if len(at_floor) == ENOUGH and any(not s.applied for s in at_floor):
            yield Finding(
                rule="scale-at-floor",
                severity=SERIOUS,
                where="loss scale",
                detail=f"it has been at its floor of {self.floor:g} for {ENOUGH} updates, and some still overflow",
                consequence="gradients underflow and overflow at the same time: FP16's range is too narrow here",
                fix="train in bf16, or keep the modules with the largest activations in FP32",
            )
        turns = sum(1 for a, b in itertools.pairwise(recent) if b < a)
        if turns >= 10:
            yield Finding(
                rule="scale-oscillating",
                severity=WARNING,
                where="loss scale",
                detail=f"it was lowered {turns} times in {len(recent)} updates and raised again in between",
                consequence="every lowering is a skipped update",
                fix="raise growth_interval, or train in bf16",
            )

    def _skips(self, step: Step) -> Iterator[Finding]:
        recent = [*list(self.steps)[-RECENT + 1 :], step]
        skipped = sum(1 for s in recent if not s.applied)
        if len(recent) == RECENT and skipped > 0.2 * RECENT:
            yield Finding(
                rule="skipping-too-often",
                severity=SERIOUS,
                where="optimizer step",
                detail=f"{skipped} of the last {RECENT} updates were skipped because gradients were not finite",
                consequence="the run is slower than it looks, and learns from a choice of its batches",
                fix="lower the learning rate, or take a recipe with a wider range such as bf16",
            )


def bad_batch(step: int, steps: int, applied: int = 0) -> Finding:
    """The loss was not finite for a moment, and is again; ``applied`` of the updates were not skipped."""
    moment = f"the loss was not finite for {steps} step(s), then finite again"
    if not applied:
        detail = f"{moment} with the same weights"
        consequence = (
            f"the {'update was' if steps == 1 else 'updates were'} skipped, so the weights are sound; the data are not"
        )
        fix = "look at that batch (`narrowgauge replay` shows it); mend or leave out its samples"
    else:
        detail, consequence = moment, _consequence(steps, applied)
        fix = "look at how the loss is computed for that batch: a part of it without a gradient is inf or NaN"
    return Finding(
        rule="bad-batch", severity=SERIOUS, where=f"step {step}", detail=detail, consequence=consequence, fix=fix
    )


def _consequence(steps: int, applied: int) -> str:
    """What became of the updates of steps whose loss was not finite."""
    if not applied:
        return "nothing is learnt: updates are skipped as long as gradients are not finite"
    some = "the update was applied" if steps == 1 else f"{applied} of {steps} updates were applied"
    return f"{some}, as all gradients were finite: the weights have changed, by a loss that cannot be read"
