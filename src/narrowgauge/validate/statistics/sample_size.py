"""How many pairs of runs are spent on a candidate: a few to learn the noise, then what is needed, at most four looks.

Whoever looks at growing data again and again and stops when it suits will find what is not there. So the level of 5% is
shared out among the looks beforehand, 2 + 1 + 1 + 1: whatever the looks show, the chance that any of them shows
something false is at most their sum. With a fixed number of pairs there is one look, and it has all five.
"""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.validate.statistics.verdict import ALPHA, INCONCLUSIVE, Verdict, judge, power_to_decide, seeds_needed

LEVELS = (0.02, 0.01, 0.01, 0.01)
"""Of the looks, with a number of pairs that is found on the way."""
FIRST = 3
"""Pairs for the first look."""
HOPELESS = 0.25
"""More pairs are not spent where the chance that they decide is below this."""


class Inquiry:
    """Of one candidate: how many pairs are ``wanted`` next, and the ``verdict`` so far."""

    def __init__(self, margin: float, seeds: int | None = None) -> None:
        """``seeds``: that many, and no more; None: as many as it takes."""
        self.margin, self.seeds = margin, seeds
        self.wanted: int | None = seeds or FIRST
        self.verdict: Verdict | None = None
        self.needed: int | None = None
        """Pairs that would probably decide, where these do not."""
        self._looks = 0

    def see(self, reference: Sequence[float], candidate: Sequence[float], affordable: int) -> None:
        """Judge the wanted pairs; there is time for ``affordable`` in all, these included."""
        level = ALPHA if self.seeds else LEVELS[self._looks]
        self.verdict = judge(reference, candidate, self.margin, level)
        self._looks += 1
        self.wanted = self.needed = None
        if self.verdict.verdict == INCONCLUSIVE:
            self.wanted = self._more(self.verdict, len(reference), affordable)

    def _more(self, verdict: Verdict, seen: int, affordable: int) -> int | None:
        last = self._looks >= len(LEVELS) or bool(self.seeds)
        level = ALPHA if last else LEVELS[self._looks]
        if verdict.gap is None or verdict.deviation is None:
            self.needed = max(FIRST, seen + 1)
            return None if last or affordable < self.needed else self.needed
        self.needed = seeds_needed(verdict.gap, verdict.deviation, self.margin, level)
        if last:
            return None
        most = min(self.needed or affordable, affordable)
        chance = power_to_decide(most, verdict.deviation, verdict.gap, self.margin, level) if most > seen else 0.0
        return most if chance >= HOPELESS else None
