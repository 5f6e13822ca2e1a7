"""Speed at equal loss: how much faster a candidate reaches the loss that the reference ends with.

A candidate whose steps are r times as fast, but whose loss after N steps is higher by d, needs more steps for the same
loss. How many follows from how the final loss falls with the length of a run. Near N,

    L(N') = L(N) - b ln(N' / N)

with b from shorter runs of the reference, of s N steps: b = (L(s N) - L(N)) / -ln(s). So the candidate reaches the
reference's L(N) after N exp(d / b) steps, and

    speed at equal loss = r exp(-d / b)

Every run is trained through the decay of its own learning rate: a loss in the middle of a run is not one that it could
have ended with. All runs of a seed have the same data and the same initial weights.

The interval is that of ln(r) - d / b, with ln(r) as the median over rounds, which a disturbed round does not move, and
d and b as means over n pairs and over k <= n shorter runs. Its variance is, to first order in the deviations (d and b
are paired, so their covariance counts; a median of normal values has at most pi / 2 of the variance of their mean),

    (pi / 2) var(ln r) / rounds + (var(d) / n - 2 (d / b) cov(d, b) / n + (d / b)^2 var(b) / k) / b^2

and its level 1 - 2 alpha, by Student's t. Its degrees of freedom are Welch's and Satterthwaite's, with three samples:
times, pairs (with the covariance) and shorter runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrowgauge.validate.statistics.t_distribution import t_quantile
from narrowgauge.validate.statistics.verdict import ALPHA

SHARE = 0.6
"""The length of the shorter runs, as a share of the others'."""


@dataclass(frozen=True, kw_only=True)
class EqualLoss:
    """The speed of a candidate relative to the reference, at equal steps and at equal loss."""

    step_ratio: float
    """How many times as fast a step is."""
    reason: str
    """The result in one sentence."""
    steps_needed: float | None = None
    """Steps to reach the reference's final loss, relative to the reference's; None if the loss does not fall."""
    ratio: float | None = None
    """How many times as fast the candidate reaches the reference's final loss."""
    interval: tuple[float, float] | None = None
    """The confidence interval of ``ratio``; None with fewer than two pairs."""
    slope: float | None = None
    """How much the reference's final loss falls if runs are e times as long."""
    plain_ratio: float | None = None
    """``ratio`` relative to steps of PyTorch alone, if it ends with the reference's loss."""

    def beside_plain(self, reference_ms: Sequence[float], plain_ms: Sequence[float]) -> EqualLoss:
        """Return the same with the ratio to PyTorch alone, whose steps were measured in turns with the reference's."""
        if self.ratio is None:
            return self
        logs = [math.log(plain / now) for now, plain in zip(reference_ms, plain_ms, strict=True)]
        ratio = self.ratio * math.exp(statistics.median(logs))
        return replace(self, plain_ratio=ratio, reason=f"{self.reason}; {ratio:.3f} times as fast as PyTorch alone")


def compare_at_equal_loss(
    reference: Sequence[float],
    candidate: Sequence[float],
    shorter: Sequence[float],
    reference_ms: Sequence[float],
    candidate_ms: Sequence[float],
    share: float = SHARE,
    alpha: float = ALPHA,
) -> EqualLoss:
    """Compute the speed at equal loss.

    Args:
        reference: Final losses of the reference, one per seed.
        candidate: Final losses of the candidate, in the same order.
        shorter: Final losses of the reference's shorter runs, in the same order; the last seeds may have none.
        reference_ms: Times of a step, one per round.
        candidate_ms: The same of the candidate, measured in turns with it: equal indices are pairs.
        share: The length of the shorter runs, as a share of the others'.
        alpha: The level of each side of the interval.
    """
    logs = [math.log(before / now) for before, now in zip(reference_ms, candidate_ms, strict=True)]
    step = statistics.median(logs)
    step_ratio = math.exp(step)
    if share >= 1:
        return EqualLoss(step_ratio=step_ratio, reason="runs of one step have no shorter ones to compare with")
    pairs = [(r, c - r) for r, c in zip(reference, candidate, strict=True) if math.isfinite(r + c)]
    triples = [
        (c - r, (s - r) / -math.log(share))
        for r, c, s in zip(reference, candidate, shorter, strict=False)
        if math.isfinite(r + c + s)
    ]
    if not triples:
        return EqualLoss(step_ratio=step_ratio, reason="no seed has three finite losses")
    gaps, slopes = [gap for _, gap in pairs], [slope for _, slope in triples]
    gap, slope = statistics.fmean(gaps), statistics.fmean(slopes)
    count, few = len(gaps), len(slopes)
    error = statistics.stdev(slopes) / math.sqrt(few) if few > 1 else 0.0
    t = t_quantile(1 - alpha, few - 1) if few > 1 else 0.0
    if slope <= t * error or slope <= 0:
        text = "longer runs of the reference do not show a lower loss: the runs are too short, too long or too noisy"
        return EqualLoss(step_ratio=step_ratio, slope=slope, reason=text)
    more = gap / slope
    ratio, needed = math.exp(step - more), math.exp(more)
    fewer = "more" if needed >= 1 else "fewer"
    told = f"steps are {step_ratio:.3f} times as fast, and {abs(needed - 1):.1%} {fewer} are needed"
    if few < 2:
        text = f"{ratio:.3f} times as fast at equal loss ({told}); one seed does not show the noise"
        return EqualLoss(
            step_ratio=step_ratio, steps_needed=needed, ratio=ratio, interval=None, slope=slope, reason=text
        )
    together = statistics.covariance([gap for gap, _ in triples], slopes)
    samples = [
        ((statistics.variance(gaps) - 2 * more * together) / count / slope**2, count),
        (more**2 * statistics.variance(slopes) / few / slope**2, few),
        (math.pi / 2 * statistics.variance(logs) / len(logs) if len(logs) > 1 else 0.0, len(logs)),
    ]
    half = _measure_half_width(samples, alpha)
    low, high = math.exp(step - more - half), math.exp(step - more + half)
    text = f"{ratio:.3f} times as fast at equal loss, between {low:.3f} and {high:.3f} ({told})"
    return EqualLoss(
        step_ratio=step_ratio, steps_needed=needed, ratio=ratio, interval=(low, high), slope=slope, reason=text
    )


def _measure_half_width(samples: Sequence[tuple[float, int]], alpha: float) -> float:
    """Return half of the interval of a sum of means, from the variance of each mean and the size of its sample."""
    variance = sum(part for part, _ in samples)
    if variance <= 0:
        return 0.0
    weights = sum(part**2 / (size - 1) for part, size in samples if size > 1)
    smallest = min(size for part, size in samples if size > 1) - 1
    degrees = max(smallest, math.floor(variance**2 / weights)) if weights else smallest
    return t_quantile(1 - alpha, degrees) * math.sqrt(variance)
