"""The verdict on a recipe: two one-sided tests (TOST) on paired differences of the final loss, with a margin.

Candidate and reference are trained in pairs: same seed, same data, same initial weights. The difference of a pair,
relative to the reference's mean loss, has a mean (the gap) and a standard deviation (the remaining noise). With n pairs

    equivalent     the gap is above -margin and below +margin, each shown at level alpha
    worse          the gap is above +margin, shown at level alpha; or significantly more runs diverged
    better         the gap is below -margin, shown at level alpha
    inconclusive   none of these; the verdict has the number of pairs that would decide if the noise stays the same

"Not significantly different" never counts as equivalent: two noisy pairs show nothing. The interval corresponds to
these tests and has level 1 - 2 alpha. ``detectable`` is the smallest gap that would have been judged worse with
probability ``power``.

Pairs that are copies of one pair, because the seed changes nothing in the task, are no sample: their deviation of 0 is
not the noise. They are inconclusive, as a single pair is, and so are gaps relative to a loss of 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.errors import UsageError
from narrowgauge.validate.statistics.t_distribution import normal_cdf, t_quantile, tabulate_deviation

EQUIVALENT, WORSE, BETTER, INCONCLUSIVE = "equivalent", "worse", "better", "inconclusive"
ALPHA, POWER = 0.05, 0.8
MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a test on n pairs of runs."""

    verdict: str
    margin: float
    """The largest gap that counts as equivalent, relative to the reference's mean loss, like all gaps."""
    seeds: int
    """The number of pairs."""
    gap: float | None
    """The mean difference of the pairs; None if there are no two finite pairs."""
    interval: tuple[float, float] | None
    """The confidence interval of the gap, of level 1 - 2 alpha."""
    deviation: float | None
    """Standard deviation of the pairs' differences."""
    diverged: tuple[int, int]
    """The number of runs without a finite loss, of the reference and of the candidate."""
    reason: str
    """The verdict in one sentence."""
    alpha: float = ALPHA
    decidable: bool = True
    """Whether more pairs could decide. They could not if all pairs are equal, if the reference's mean loss is 0, or if
    all runs of the reference diverged."""

    @property
    def is_good(self) -> bool:
        """Whether the candidate is equivalent to the reference, or better."""
        return self.verdict in (EQUIVALENT, BETTER)

    @property
    def seeds_needed(self) -> int | None:
        """The number of pairs that would decide; None if decided, or if 1,000 pairs would not."""
        if self.verdict != INCONCLUSIVE or not self.decidable:
            return None
        if self.gap is None or self.deviation is None:
            return 3
        return seeds_needed(self.gap, self.deviation, self.margin, self.alpha)

    @property
    def detectable(self) -> float | None:
        """The smallest gap that this many pairs would have judged worse with a probability of 80%."""
        pairs = self.seeds - max(self.diverged)
        return None if self.deviation is None else detectable(pairs, self.deviation, self.margin, self.alpha)


def judge(
    reference: Sequence[float], candidate: Sequence[float], margin: float = 0.005, alpha: float = ALPHA
) -> Verdict:
    """Tests paired final losses.

    Args:
        reference: Final losses of the reference. A loss that is not finite is a diverged run.
        candidate: Final losses of the candidate, in the same order.
        margin: The largest relative gap that counts as equivalent.
        alpha: The level of each one-sided test.

    Raises:
        UsageError: If the lists are empty or differ in length, or the margin is not between 0 and 1.
    """
    if len(reference) != len(candidate) or not reference:
        raise UsageError(
            f"a verdict needs pairs of runs, got {len(reference)} reference and {len(candidate)} candidate runs"
        )
    if not 0 < margin < 1:
        raise UsageError(f"margin={margin} must be between 0 and 1: 0.005 is half a percent of the loss")
    diverged = tuple(sum(not math.isfinite(loss) for loss in losses) for losses in (reference, candidate))
    pairs = [(r, c) for r, c in zip(reference, candidate, strict=True) if math.isfinite(r) and math.isfinite(c)]
    common = {"margin": margin, "seeds": len(reference), "diverged": diverged, "alpha": alpha}
    chance = fisher_exact_test(diverged[0], len(reference), diverged[1], len(candidate))
    none: dict[str, float | None] = {"gap": None, "interval": None, "deviation": None}
    if diverged[1] > diverged[0] and (chance < alpha or not pairs):
        text = f"{diverged[1]} of {len(candidate)} runs diverged, compared with {diverged[0]} of the reference"
        return Verdict(verdict=WORSE, reason=text, **common, **none)  # type: ignore[arg-type]
    if len(pairs) < 2:
        text = "a single pair of runs does not show the noise between seeds"
        if len(reference) > 1 or not pairs:
            left = "only one pair" if pairs else "no pair"
            text = f"{left} of {len(reference)} has two finite losses: {diverged[0]} of the reference's runs diverged, "
            text += f"and {diverged[1]} of the candidate's"
        found = diverged[0] < len(reference)
        return Verdict(verdict=INCONCLUSIVE, reason=text, decidable=found, **common, **none)  # type: ignore[arg-type]
    level = abs(statistics.mean(r for r, _ in pairs))
    if text := _explain_undecidable(pairs, level):
        none["gap"] = (pairs[0][1] - pairs[0][0]) / level if level else None
        return Verdict(verdict=INCONCLUSIVE, reason=text, decidable=False, **common, **none)  # type: ignore[arg-type]
    gaps = [(c - r) / level for r, c in pairs]
    count, gap, deviation = len(gaps), statistics.mean(gaps), statistics.stdev(gaps)
    half = t_quantile(1 - alpha, count - 1) * deviation / math.sqrt(count)
    low, high = gap - half, gap + half
    if high < margin and low > -margin:
        verdict = EQUIVALENT
        text = f"the gap is between {low:+.3%} and {high:+.3%}, within the margin of ±{margin:.2%}"
    elif low > margin:
        verdict = WORSE
        text = f"the gap is at least {low:+.3%}, more than the margin of {margin:.2%}"
    elif high < -margin:
        verdict = BETTER
        text = f"the loss is lower by at least {-high:.3%}, more than the margin of {margin:.2%}"
    else:
        verdict = INCONCLUSIVE
        text = f"the gap is between {low:+.3%} and {high:+.3%}: {count} pairs are too few for a margin of {margin:.2%}"
    return Verdict(
        verdict=verdict,
        gap=gap,
        interval=(low, high),
        deviation=deviation,
        reason=text,
        **common,  # type: ignore[arg-type]
    )


def _explain_undecidable(pairs: Sequence[tuple[float, float]], level: float) -> str:
    """Why no number of such pairs would decide; empty if one could."""
    if len(set(pairs)) == 1:
        losses = "{:.5g}, and of the candidate {:.5g}".format(*pairs[0])
        return (
            f"each of {len(pairs)} runs of the reference ended with a loss of {losses}: the seed changes nothing, so "
            "the pairs do not show the noise between seeds; let the data or the initial weights depend on the seed"
        )
    return "" if level else "the mean loss of the reference is 0, so that gaps cannot be relative to it"


def power_equivalent(count: int, deviation: float, gap: float, margin: float, alpha: float = ALPHA) -> float:
    """The probability that ``count`` pairs show equivalence, given the true gap and standard deviation."""
    if deviation <= 0:
        return float(abs(gap) < margin)
    t, error = t_quantile(1 - alpha, count - 1), deviation / math.sqrt(count)
    total = 0.0
    for x, weight in tabulate_deviation(count - 1):
        reach = margin - t * x * error
        if reach > 0:
            total += weight * (normal_cdf((reach - gap) / error) - normal_cdf((-reach - gap) / error))
    return total


def power_worse(count: int, deviation: float, gap: float, margin: float, alpha: float = ALPHA) -> float:
    """The probability that ``count`` pairs show a gap larger than the margin."""
    if deviation <= 0:
        return float(gap > margin)
    t, error = t_quantile(1 - alpha, count - 1), deviation / math.sqrt(count)
    return sum(
        weight * (1 - normal_cdf((margin + t * x * error - gap) / error)) for x, weight in tabulate_deviation(count - 1)
    )


def power_to_decide(count: int, deviation: float, gap: float, margin: float, alpha: float = ALPHA) -> float:
    """The probability that ``count`` pairs show what is true: equivalence, or a gap larger than the margin."""
    test = power_equivalent if abs(gap) < margin else power_worse
    return test(count, deviation, abs(gap), margin, alpha) if count > 1 else 0.0


def seeds_needed(gap: float, deviation: float, margin: float, alpha: float = ALPHA, power: float = POWER) -> int | None:
    """The smallest number of pairs that decides with probability ``power``; None if MOST_SEEDS would not."""
    if power_to_decide(MOST_SEEDS, deviation, gap, margin, alpha) < power:
        return None
    low, high = 1, MOST_SEEDS
    while high - low > 1:  # more pairs never have less power
        middle = (low + high) // 2
        enough = power_to_decide(middle, deviation, gap, margin, alpha) >= power
        low, high = (low, middle) if enough else (middle, high)
    return max(high, 2)


def detectable(count: int, deviation: float, margin: float, alpha: float = ALPHA, power: float = POWER) -> float:
    """The smallest gap that ``count`` pairs judge worse with probability ``power``."""
    low, high = margin, margin + 100 * deviation + 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        enough = power_worse(count, deviation, middle, margin, alpha) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high


def fisher_exact_test(failed: int, runs: int, other_failed: int, other_runs: int) -> float:
    """The one-sided p-value for more failures among the other runs (Fisher's exact test).

    The probability of at least ``other_failed`` failures in ``other_runs`` if both groups have the same failure rate.
    """
    all_failed = failed + other_failed
    ways = math.comb(runs + other_runs, all_failed)
    most = min(all_failed, other_runs)
    return sum(math.comb(other_runs, k) * math.comb(runs, all_failed - k) for k in range(other_failed, most + 1)) / ways
