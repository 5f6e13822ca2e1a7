"""ExpertReading: how many tokens each expert of one layer got in one update. Does not need torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ExpertReading:
    """The routing of one layer, in the first microbatch of one update."""

    module: str
    """Path of the module with the experts."""
    chosen: int
    """Experts per token."""
    counts: tuple[int, ...]
    """How many tokens each expert got."""
    logits: float | None = None
    """How far the router's largest logit is above the mean of a token's logits, averaged over tokens; None: unknown."""
    idle: tuple[int, ...] = ()
    """Experts whose weights got a gradient of zeros only."""

    def as_event(self) -> list[Any]:
        """Return the form used in a run's record."""
        return [self.module, self.chosen, list(self.counts), self.logits, list(self.idle)]

    @staticmethod
    def from_event(event: Sequence[Any]) -> ExpertReading:
        """Rebuild a reading from ``as_event``.

        Raises:
            ValueError, TypeError: It is not one.
        """
        module, chosen, counts, logits, idle = event
        made = ExpertReading(
            module=str(module),
            chosen=int(chosen),
            counts=tuple(map(int, counts)),
            logits=None if logits is None else float(logits),
            idle=tuple(map(int, idle)),
        )
        if made.chosen < 1 or not made.counts or min(made.counts) < 0:
            raise ValueError(f"counts of {module}")
        return made


def count_effective(counts: Sequence[int]) -> float:
    """Return how many experts with equal shares have the entropy of these counts: 1 for one expert, E for all."""
    total = sum(counts)
    if not total:
        return 0.0
    shares = [count / total for count in counts if count]
    return math.exp(-sum(share * math.log(share) for share in shares))
