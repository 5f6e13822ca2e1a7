"""Rules over a run's steps: loss, gradient norm, loss scale, skipped updates.

Thresholds are wide: training is noisy, above all at the start, and a false alarm costs more trust than a late finding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.rules.nonfinite_advice import REPLAY, advise_on_nonfinite
from narrowgauge.recipe import Recipe

WINDOW = 200
"""Steps that are kept."""
RECENT = 50
ENOUGH = 20
"""Steps needed before a step can be compared with earlier ones."""
STREAK = 10
"""Consecutive skipped updates that are too many for a dynamic loss scale: a factor of 1,024. At the start of a run,
where a summed loss may need that, they are a warning."""
LARGE_UPDATE = 0.03
"""Updates of matrices above this share of the weights, while the loss rises, are the cause. Adam's usual is 1e-3."""
_FP32 = Recipe()


@dataclass(frozen=True)
class Step:
    """The numbers of one update."""

    number: int
    loss: float
    grad_norm: float
    loss_scale: float
    applied: bool


class StepRules:
    """Checks each step against the steps before it with every rule in ``RULES``."""

    def __init__(
        self, scaled: bool = False, floor: float = 1.0, *, clip_norm: float | None = None, recipe: Recipe = _FP32
    ) -> None:
        """Start without a history.

        Args:
            scaled: Whether the recipe has a dynamic loss scale.
            floor: The smallest value of that scale.
            clip_norm: The norm to which gradients are clipped, if they are.
            recipe: The recipe, which decides what the advice is.
        """
        self.scaled, self.floor, self.clip_norm, self.recipe = scaled, floor, clip_norm, recipe
        self.steps: deque[Step] = deque(maxlen=WINDOW)
        self.first_losses: list[float] = []
        self.lowest_loss = math.inf
        self.nonfinite_since: int | None = None
        """The first step of the current series of steps with a nonfinite loss."""
        self.update_ratio = 0.0
        """The largest update of a matrix relative to its weights, in the latest snapshot; 0 if there is none."""
        self.nonfinite_applied = 0
        """How many updates of the series were applied: a loss can be NaN while all gradients are finite."""

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain values."""
        return {
            "steps": [list(dataclasses.astuple(step)) for step in self.steps],
            "first": list(self.first_losses),
            "lowest": self.lowest_loss,
            "bad": self.nonfinite_since,
            "bad_applied": self.nonfinite_applied,
            "update_ratio": self.update_ratio,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the history from ``state_dict``."""
        self.steps = deque((Step(*values) for values in state["steps"]), maxlen=WINDOW)
        self.first_losses, self.lowest_loss = list(state["first"]), state["lowest"]
        self.nonfinite_since, self.nonfinite_applied = state["bad"], state["bad_applied"]
        self.update_ratio = state.get("update_ratio", 0.0)

    def check(self, step: Step) -> list[Finding]:
        """Return the findings of a step and add it to the history."""
        found = [finding for rule in RULES for finding in rule(self, step)]
        self.steps.append(step)
        return [dataclasses.replace(finding, step=finding.step or step.number) for finding in found]

    def recent(self, count: int = RECENT) -> list[Step]:
        """Return the last steps before the one that is checked."""
        return list(self.steps)[-count:]


def check_finite_loss(before: StepRules, step: Step) -> Iterator[Finding]:
    """Find a loss that is inf or NaN for three steps, or for fewer and then finite again."""
    if math.isfinite(step.loss):
        if before.nonfinite_since is not None:
            first = before.nonfinite_since
            yield _describe_bad_batch(first, step.number - first, before.nonfinite_applied)
            before.nonfinite_since, before.nonfinite_applied = None, 0
        return
    before.nonfinite_since = step.number if before.nonfinite_since is None else before.nonfinite_since
    before.nonfinite_applied += step.applied
    if step.number - before.nonfinite_since >= 2:
        yield Finding(
            rule="loss-not-finite",
            severity=SERIOUS,
            where="loss",
            detail=f"the loss has been {step.loss} since step {before.nonfinite_since}",
            why=_describe_updates(step.number - before.nonfinite_since + 1, before.nonfinite_applied),
            fix=advise_on_nonfinite(before.recipe),
            step=before.nonfinite_since,
        )


def check_loss_level(before: StepRules, step: Step) -> Iterator[Finding]:
    """Find a single loss far above the recent ones, and losses that have risen above the first ones."""
    if not math.isfinite(step.loss):
        return
    if len(before.first_losses) < 5:
        before.first_losses.append(step.loss)
    recent = [s.loss for s in before.recent() if math.isfinite(s.loss)]
    if len(recent) < ENOUGH:
        return
    median = statistics.median(recent)
    deviation = statistics.median(abs(loss - median) for loss in recent)
    start = statistics.median(before.first_losses)
    # A share of the first losses: a hinge loss has a median of 0, and any loss is infinitely larger.
    if step.loss > median + max(12 * deviation, 0.5 * abs(median), 0.1 * abs(start)):
        yield Finding(
            rule="loss-spike",
            severity=WARNING,
            where=f"step {step.number}",
            detail=f"the loss is {step.loss:.4g}; the median of the last {len(recent)} steps is {median:.4g}",
            why="a single bad batch is harmless; repeated spikes that do not recover are divergence",
            fix="inspect the batch; clip gradients, or lower the learning rate",
        )
    latest = statistics.median(recent[-10:])  # robust to one spike
    before.lowest_loss = min(before.lowest_loss, latest)
    if latest > start + 0.1 * abs(start) and latest > before.lowest_loss + 0.5 * abs(before.lowest_loss):
        destroyed = before.update_ratio > LARGE_UPDATE or latest > 1000 * abs(start) > 0
        yield Finding(
            rule="loss-diverging",
            severity=SERIOUS if destroyed else WARNING,
            where="loss",
            detail=f"median of the last ten losses {latest:.4g}, of the first five {start:.4g}; best "
            f"{before.lowest_loss:.4g}; updates are up to {before.update_ratio:.2g} of the weights",
            why="the model is losing what it has learned" if destroyed else
            "the model is losing what it has learned, unless its targets move, as in Q-learning",
            fix="lower the learning rate, use a longer warmup, clip gradients",
        )  # fmt: skip


def check_gradient_norm(before: StepRules, step: Step) -> Iterator[Finding]:
    """Find a gradient norm that spikes, is always zero, or never changes."""
    norms = [s.grad_norm for s in before.recent() if s.applied and math.isfinite(s.grad_norm)]
    if len(norms) < ENOUGH or not step.applied:
        return
    median = statistics.median(norms)
    if step.grad_norm > 20 * median > 0:
        yield Finding(
            rule="gradient-spike",
            severity=WARNING,
            where=f"step {step.number}",
            detail=f"the gradient norm is {step.grad_norm:.3g}; the median of the last {len(norms)} is {median:.3g}",
            why="without clipping, one such step can undo many",
            fix="clip gradients (--clip 1.0), and inspect the batch",
        )
    if median == 0 and step.grad_norm == 0 and step.loss != 0:  # a hinge loss that has reached 0 needs none
        yield Finding(
            rule="no-gradient",
            severity=SERIOUS,
            where="all parameters",
            detail=f"all gradients of the last {len(norms)} steps are zero",
            why="the optimizer steps, but the model learns nothing",
            fix="in FP16, scale the loss; otherwise look for a detach() or an output that the loss does not depend on",
        )
    elif max(norms) <= min(norms) * (1 + 1e-4) and min(norms) > 0:
        yield Finding(
            rule="gradient-norm-constant",
            severity=SERIOUS,
            where="all parameters",
            detail=f"the gradient norm was {median:.4g} in each of the last {len(norms)} steps",
            why="gradients were clipped before unscaling, so updates are too small by the loss scale",
            fix="unscale before clipping, or use clip_norm of Engine, which does so",
        )


def check_loss_scale(before: StepRules, step: Step) -> Iterator[Finding]:
    """Find a dynamic loss scale that collapses, stays at its floor, or oscillates."""
    if not before.scaled or len(before.steps) < ENOUGH:
        return
    recent = [s.loss_scale for s in before.recent()]
    if math.log2(max(recent) / step.loss_scale) >= 12:
        yield Finding(
            rule="scale-collapsing",
            severity=SERIOUS,
            where="loss scale",
            detail=f"it fell from {max(recent):g} to {step.loss_scale:g} within {len(recent)} updates",
            why="gradients overflow at any scale, so the inf comes from the forward pass or from one op",
            fix="`narrowgauge replay` names the op; keep its module in FP32, or train in bf16",
        )
    at_floor = [s for s in before.recent(ENOUGH) if s.loss_scale <= before.floor]
    if len(at_floor) == ENOUGH and any(not s.applied for s in at_floor):
        yield Finding(
            rule="scale-at-floor",
            severity=SERIOUS,
            where="loss scale",
            detail=f"it has been at its floor of {before.floor:g} for {ENOUGH} updates, and some still overflow",
            why="gradients underflow and overflow at the same time: the range of FP16 is too narrow here",
            fix="train in bf16, or keep the modules with the largest activations in FP32",
        )
    lowered = sum(1 for a, b in itertools.pairwise(recent) if b < a)
    if lowered >= 10:
        yield Finding(
            rule="scale-oscillating",
            severity=WARNING,
            where="loss scale",
            detail=f"it was lowered {lowered} times in {len(recent)} updates and raised again in between",
            why="each time it is lowered, an update is skipped",
            fix="raise growth_interval, or train in bf16",
        )


def check_skips(before: StepRules, step: Step) -> Iterator[Finding]:
    """Find gradients that are not finite, unless a dynamic loss scale is adapting, and runs that skip many updates."""
    if step.applied:
        return
    advice = advise_on_nonfinite(before.recipe)
    if not before.scaled and math.isfinite(step.loss):
        yield Finding(
            rule="gradient-not-finite",
            severity=SERIOUS,
            where="optimizer step",
            detail=f"a gradient of step {step.number} is inf or NaN, although its loss is {step.loss:.4g}",
            why="the update was skipped, so the weights are intact; the backward pass of some op has no finite result",
            fix=advice,
        )
    recent = [*before.recent(RECENT - 1), step]
    streak = list(itertools.takewhile(lambda s: not s.applied, reversed(recent)))
    if len(streak) >= STREAK and all(math.isfinite(s.loss) for s in streak):
        yield Finding(
            rule="skips-in-a-row",
            severity=WARNING if before.scaled and len(streak) == step.number else SERIOUS,
            where="optimizer step",
            detail=f"{len(streak)} consecutive updates were skipped because gradients were not finite",
            why="the model learns nothing in these steps",
            fix=advice,
            step=streak[-1].number,
        )
    skipped = sum(1 for s in recent if not s.applied)
    if len(recent) == RECENT and skipped > 0.2 * RECENT:
        yield Finding(
            rule="skipping-too-often",
            severity=SERIOUS,
            where="optimizer step",
            detail=f"{skipped} of the last {RECENT} updates were skipped because gradients were not finite",
            why="progress is slower than the step count suggests, and some batches never contribute",
            fix=advice,
        )


def check_clipping(before: StepRules, step: Step) -> Iterator[Finding]:
    """Find gradients that are clipped by more than a factor of 100 in every one of the last 50 steps."""
    if before.clip_norm is None or not math.isfinite(before.clip_norm):
        return
    norms = [s.grad_norm for s in [*before.recent(RECENT - 1), step] if s.applied and math.isfinite(s.grad_norm)]
    if len(norms) == RECENT and min(norms) > 100 * before.clip_norm:
        yield Finding(
            rule="always-clipped",
            severity=WARNING,
            where="all parameters",
            detail=f"the gradient norm was at least {min(norms):.3g} in each of the last {RECENT} steps, and is "
            f"clipped to {before.clip_norm:g}",
            why="every batch counts the same whatever its gradient; SGD also has a much lower learning rate then "
            "(Adam and Muon divide by the size of gradients)",
            fix="take the mean of the loss instead of its sum, or clip to about the usual norm",
        )


RULES: tuple[Callable[[StepRules, Step], Iterator[Finding]], ...] = (
    check_finite_loss,
    check_loss_level,
    check_gradient_norm,
    check_loss_scale,
    check_skips,
    check_clipping,
)


def _describe_bad_batch(step: int, steps: int, applied: int) -> Finding:
    """A finding for a loss that was not finite for some ``steps``, of which ``applied`` changed the weights."""
    detail = f"the loss was not finite for {steps} step(s), then finite again"
    if applied:
        why = _describe_updates(steps, applied)
        fix = "check how the loss is computed for that batch: a part of it without a gradient is inf or NaN"
    else:
        detail += " with the same weights"
        why = (
            f"the {'update was' if steps == 1 else 'updates were'} skipped, so the weights are intact; the data is bad"
        )
        fix = f"inspect that batch; fix or remove its bad samples; {REPLAY}"
    return Finding(rule="bad-batch", severity=SERIOUS, where=f"step {step}", detail=detail, why=why, fix=fix, step=step)


def _describe_updates(steps: int, applied: int) -> str:
    """What happened to the updates of ``steps`` with a nonfinite loss."""
    if not applied:
        return "the model learns nothing: updates are skipped while gradients are not finite"
    some = "the update was applied" if steps == 1 else f"{applied} of {steps} updates were applied"
    return f"{some} because all gradients were finite, so a nonfinite loss has changed the weights"
