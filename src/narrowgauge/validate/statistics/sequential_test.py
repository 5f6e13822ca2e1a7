"""Chooses how many pairs of runs to train: a few to estimate the noise, then as many as needed, in up to four analyses.

Analyzing growing data repeatedly and stopping at the first significant result inflates the error rate. So the level of
5% is divided among the analyses beforehand, 2 + 1 + 1 + 1: the probability that any of them shows a false result is at
most their sum. With a fixed number of pairs there is one analysis at the full 5%.
"""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.validate.statistics.verdict import ALPHA, INCONCLUSIVE, Verdict, judge, power_to_decide, seeds_needed

LEVELS = (0.02, 0.01, 0.01, 0.01)
"""The levels of the analyses, if the number of pairs is not fixed."""
FIRST = 3
"""Pairs of the first analysis."""
LEAST_POWER = 0.25
"""No more pairs are trained if the probability that they decide is below this."""


class SequentialTest:
    """The test of one candidate: the ``verdict`` so far, and the ``pairs_wanted`` for the next analysis."""

    def __init__(self, margin: float, seeds: int | None = None) -> None:
        """Creates a test.

        Args:
            margin: The largest relative gap that counts as equivalent.
            seeds: A fixed number of pairs; None for as many as needed.
        """
        self.margin, self.seeds = margin, seeds
        self.pairs_wanted: int | None = seeds or FIRST
        self.verdict: Verdict | None = None
        self.pairs_needed: int | None = None
        """Pairs that would probably decide, if the verdict is inconclusive."""
        self._analyses = 0

    def update(self, reference: Sequence[float], candidate: Sequence[float], affordable: int) -> None:
        """Analyzes the final losses of the wanted pairs.

        Args:
            reference: Final losses of the reference, one per pair.
            candidate: Final losses of the candidate.
            affordable: The total number of pairs that fit into the budget.
        """
        level = ALPHA if self.seeds else LEVELS[self._analyses]
        self.verdict = judge(reference, candidate, self.margin, level)
        self._analyses += 1
        self.pairs_wanted = self.pairs_needed = None
        if self.verdict.verdict == INCONCLUSIVE and self.verdict.decidable:
            self.pairs_wanted = self._choose_next(self.verdict, len(reference), affordable)

    def _choose_next(self, verdict: Verdict, seen: int, affordable: int) -> int | None:
        last = self._analyses >= len(LEVELS) or bool(self.seeds)
        level = ALPHA if last else LEVELS[self._analyses]
        if verdict.gap is None or verdict.deviation is None:
            self.pairs_needed = max(FIRST, seen + 1)
            return None if last or affordable < self.pairs_needed else self.pairs_needed
        self.pairs_needed = seeds_needed(verdict.gap, verdict.deviation, self.margin, level)
        if last:
            return None
        most = min(self.pairs_needed or affordable, affordable)
        chance = power_to_decide(most, verdict.deviation, verdict.gap, self.margin, level) if most > seen else 0.0
        return most if chance >= LEAST_POWER else None
