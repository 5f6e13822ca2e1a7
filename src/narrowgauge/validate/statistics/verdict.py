"""The verdict on a recipe: two one-sided tests on paired differences of the final loss, against a margin.

Candidate and reference are trained in pairs: same seed, same data, same initial weights. The difference of a pair,
relative to the reference's mean loss, has a mean (the gap) and a spread (the noise that is left). With n pairs

    equivalent     the gap lies above -margin and below +margin, each shown at level alpha
    worse          the gap lies above +margin, shown at level alpha; or more runs diverged than chance explains
    better         the gap lies below -margin, shown at level alpha
    inconclusive   none of these: with the number of pairs that would decide it, if the spread stays as it is

"Not significantly different" is never taken for equal: a test with two noisy pairs shows nothing, and says so. The
interval is the one these tests stand for, of level 1 - 2 alpha. ``detectable`` is the gap beyond the margin that would
have been called worse with probability ``power``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.errors import UsageError
from narrowgauge.validate.statistics.t_distribution import normal_cdf, spread, t_quantile

EQUIVALENT, WORSE, BETTER, INCONCLUSIVE = "equivalent", "worse", "better", "inconclusive"
ALPHA, POWER = 0.05, 0.8
MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What n pairs of runs show."""

    verdict: str
    margin: float
    """Relative to the reference's mean loss, as are all gaps here."""
    seeds: int
    gap: float | None
    interval: tuple[float, float] | None
    deviation: float | None
    """Standard deviation of the pairs' differences."""
    diverged: tuple[int, int]
    """Runs of the reference and of the candidate that ended without a finite loss."""
    reason: str
    alpha: float = ALPHA

    @property
    def is_good(self) -> bool:
        """Whether the candidate is shown to be as good as the reference, or better."""
        return self.verdict in (EQUIVALENT, BETTER)

    @property
    def seeds_needed(self) -> int | None:
        """Pairs that would decide, where these did not; None: decided, or more than anyone would run."""
        if self.verdict != INCONCLUSIVE:
            return None
        if self.gap is None or self.deviation is None:
            return 3
        return seeds_needed(self.gap, self.deviation, self.margin, self.alpha)

    @property
    def detectable(self) -> float | None:
        """The smallest gap that so many pairs would have called worse, four times of five."""
        pairs = self.seeds - max(self.diverged)
        return None if self.deviation is None else detectable(pairs, self.deviation, self.margin, self.alpha)


def judge(
    reference: Sequence[float], candidate: Sequence[float], margin: float = 0.005, alpha: float = ALPHA
) -> Verdict:
    """The verdict on final losses, pair by pair; a loss that is not finite is a run that diverged."""
    if len(reference) != len(candidate) or not reference:
        raise UsageError(f"a verdict needs pairs of runs, got {len(reference)} of the reference and {len(candidate)}")
    if not 0 < margin < 1:
        raise UsageError(f"margin={margin} must lie between 0 and 1: 0.005 is half a percent of the loss")
    diverged = tuple(sum(not math.isfinite(loss) for loss in losses) for losses in (reference, candidate))
    pairs = [(r, c) for r, c in zip(reference, candidate, strict=True) if math.isfinite(r) and math.isfinite(c)]
    common = {"margin": margin, "seeds": len(reference), "diverged": diverged, "alpha": alpha}
    chance = fisher(diverged[0], len(reference), diverged[1], len(candidate))
    none = {"gap": None, "interval": None, "deviation": None}
    if diverged[1] > diverged[0] and (chance < alpha or not pairs):
        text = f"{diverged[1]} of {len(candidate)} runs diverged, where the reference's were {diverged[0]}"
        return Verdict(verdict=WORSE, reason=text, **common, **none)  # type: ignore[arg-type]
    if len(pairs) < 2:
        text = "one pair of runs has no spread to judge by"
        return Verdict(verdict=INCONCLUSIVE, reason=text, **common, **none)  # type: ignore[arg-type]
    level = abs(statistics.mean(r for r, _ in pairs)) or 1.0
    gaps = [(c - r) / level for r, c in pairs]
    count, gap, deviation = len(gaps), statistics.mean(gaps), statistics.stdev(gaps)
    half = t_quantile(1 - alpha, count - 1) * deviation / math.sqrt(count)
    low, high = gap - half, gap + half
    if high < margin and low > -margin:
        verdict = EQUIVALENT
        text = f"the gap lies between {low:+.3%} and {high:+.3%}, within {margin:.2%} either way"
    elif low > margin:
        verdict = WORSE
        text = f"the gap is at least {low:+.3%}, beyond {margin:.2%}"
    elif high < -margin:
        verdict = BETTER
        text = f"the loss is lower by at least {-high:.3%}, beyond {margin:.2%}"
    else:
        verdict = INCONCLUSIVE
        text = f"the gap lies between {low:+.3%} and {high:+.3%}, which {count} pairs cannot narrow to {margin:.2%}"
    return Verdict(
        verdict=verdict,
        gap=gap,
        interval=(low, high),
        deviation=deviation,
        reason=text,
        **common,  # type: ignore[arg-type]
    )


def power_equivalent(count: int, deviation: float, gap: float, margin: float, alpha: float = ALPHA) -> float:
    """The probability that ``count`` pairs show equivalence where the true gap and spread are these."""
    if deviation <= 0:
        return float(abs(gap) < margin)
    t, error = t_quantile(1 - alpha, count - 1), deviation / math.sqrt(count)
    total = 0.0
    for x, weight in spread(count - 1):
        reach = margin - t * x * error
        if reach > 0:
            total += weight * (normal_cdf((reach - gap) / error) - normal_cdf((-reach - gap) / error))
    return total


def power_worse(count: int, deviation: float, gap: float, margin: float, alpha: float = ALPHA) -> float:
    """The probability that ``count`` pairs show a gap beyond the margin."""
    if deviation <= 0:
        return float(gap > margin)
    t, error = t_quantile(1 - alpha, count - 1), deviation / math.sqrt(count)
    return sum(weight * (1 - normal_cdf((margin + t * x * error - gap) / error)) for x, weight in spread(count - 1))


def power_to_decide(count: int, deviation: float, gap: float, margin: float, alpha: float = ALPHA) -> float:
    """The probability that ``count`` pairs show what is the case: equivalence, or a gap beyond the margin."""
    test = power_equivalent if abs(gap) < margin else power_worse
    return test(count, deviation, abs(gap), margin, alpha) if count > 1 else 0.0


def seeds_needed(gap: float, deviation: float, margin: float, alpha: float = ALPHA, power: float = POWER) -> int | None:
    """The fewest pairs that decide with probability ``power``; None where MOST_SEEDS would not."""
    if power_to_decide(MOST_SEEDS, deviation, gap, margin, alpha) < power:
        return None
    low, high = 1, MOST_SEEDS
    while high - low > 1:  # more pairs never have less power
        middle = (low + high) // 2
        enough = power_to_decide(middle, deviation, gap, margin, alpha) >= power
        low, high = (low, middle) if enough else (middle, high)
    return max(high, 2)


def detectable(count: int, deviation: float, margin: float, alpha: float = ALPHA, power: float = POWER) -> float:
    """The smallest gap that ``count`` pairs call worse with probability ``power``."""
    low, high = margin, margin + 100 * deviation + 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        enough = power_worse(count, deviation, middle, margin, alpha) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high


def fisher(bad: int, of: int, worse: int, out_of: int) -> float:
    """The probability that at least ``worse`` of ``out_of`` fail by chance, where both kinds fail alike (Fisher)."""
    failures, runs = bad + worse, of + out_of
    ways = math.comb(runs, failures)
    most = min(failures, out_of)
    return sum(math.comb(out_of, k) * math.comb(of, failures - k) for k in range(worse, most + 1)) / ways
