"""Rules for matrices that Muon steps: is the update what orthogonalization should give?

All singular values of an orthogonalized matrix [r, c] are about 1 (0.7 to 1.2), so its mean square is 1 / max(r, c),
and that of the update the square of the rate times as much. What is measured, divided by this, is the mean square of
the singular values:

    about 1     orthogonal
    near 0      few directions have a gradient, or the momentum's norm is below eps, or too few steps
    above 4     the iteration diverges with these coefficients
    about 1, although the gradient is 0: the momentum is old, and Muon does not care how small it has become

The size of gradients says nothing about how fast these matrices learn: Muon divides by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.rules.tensor_rules import UpdateContext
from narrowgauge.gauges.watch.readings import Reading
from narrowgauge.gauges.watch.snapshots import Snapshot

SQUARE, DECAY, EPS = "muon_square", "muon_decay", "muon_eps"
"""Facts of a matrix (``model_facts``): the expected mean square of its update, rate times decay, and eps."""
_SMALL, _LARGE, _STALE = 0.015, 4.0, 0.1
"""Mean squares of singular values. A healthy GPT of width 64 with 8 tokens per batch has 0.12 in its first update, and
0.36 in its ninth: gradients of few tokens have few directions, and the momentum collects them."""
LARGE_UPDATE = 0.2
"""Muon at its usual rate of 0.02 changes small initial weights by 4% in an update, where Adam changes them by 0.5%."""


@dataclass(frozen=True)
class MuonUpdate:
    """The update of a matrix, compared with an orthogonal one."""

    reading: Reading
    share: float
    """The mean square of the singular values of what was orthogonalized."""
    decay: float
    """The mean square of weight decay's part, in the same unit."""
    gradient_norm: float | None
    eps: float

    @property
    def has_gradient(self) -> bool:
        return self.gradient_norm is None or self.gradient_norm > 0


def is_stepped_by_muon(snapshot: Snapshot, name: str) -> bool:
    """Whether Muon steps this parameter."""
    return (SQUARE, name) in snapshot.facts


def is_usual_update(snapshot: Snapshot, reading: Reading) -> bool:
    """Whether an update is one of Muon's that is no larger than usual, relative to the weights."""
    return is_stepped_by_muon(snapshot, reading.module) and (reading.ratio or 0.0) < LARGE_UPDATE


def read_muon_updates(context: UpdateContext) -> Iterator[MuonUpdate]:
    """Yield the updates of Muon's matrices in a snapshot; those at a rate of 0 say nothing."""
    facts = context.snapshot.facts
    weights = {one.module: one.mean_square for one in context.select("weight")}
    gradients = {
        one.module: (one.mean_square * one.count) ** 0.5 / one.scale for one in context.select("weight_gradient")
    }
    for one in context.select("update"):
        square = facts.get((SQUARE, one.module), 0.0)
        if square > 0:
            decay = facts.get((DECAY, one.module), 0.0) ** 2 * weights.get(one.module, 0.0)
            yield MuonUpdate(one, one.mean_square / square, decay / square, gradients.get(one.module),
                             facts.get((EPS, one.module), 0.0))  # fmt: skip


def check_orthogonal(context: UpdateContext) -> Iterator[Finding]:
    """Find updates whose singular values are far from 1."""
    for update in read_muon_updates(context):
        share, name = update.share, update.reading.module
        if share > _LARGE * (1 + update.decay):
            yield Finding(
                rule="muon-not-orthogonal",
                severity=SERIOUS,
                where=name,
                detail=f"the singular values of its update are {share**0.5:.3g} in the root mean square, not about 1",
                why="the Newton-Schulz iteration diverges, and the matrix moves much faster than the rate says",
                fix="use the default ns_coefficients (3.4445, -4.775, 2.0315) with five steps",
            )
        elif share < _SMALL and update.has_gradient:
            tiny = update.gradient_norm is not None and update.gradient_norm < update.eps
            yield Finding(
                rule="muon-not-orthogonal",
                severity=WARNING,
                where=name,
                detail=f"the singular values of its update are {share**0.5:.2g} in the root mean square, not about 1"
                + (f"; its gradient's norm, {update.gradient_norm:.2g}, is below eps={update.eps:g}" if tiny else ""),
                why="it hardly moves: Muon divides by eps instead of the norm" if tiny else
                "its gradients have a few directions only, so most of the matrix does not learn",
                fix="scale the loss up, or lower eps" if tiny else
                "give it AdamW's rule if it is an embedding, a head or a table; raise ns_steps if you lowered them",
            )  # fmt: skip


def check_stale(context: UpdateContext) -> Iterator[Finding]:
    """Find matrices without a gradient that still move at full speed."""
    for update in read_muon_updates(context):
        if not update.has_gradient and update.share > _STALE + 2 * update.decay:
            yield Finding(
                rule="muon-stale-update",
                severity=WARNING,
                where=update.reading.module,
                detail="its gradient is zero, and its update as large as with a gradient",
                why="Muon gives the momentum its full length however much it has decayed, so the matrix drifts in an "
                "old direction for hundreds of updates",
                fix="set the gradient to None where the loss does not depend on the matrix, or give it AdamW's rule",
            )
