"""Rules for mixtures of experts: experts without tokens, routers that collapse, logits that grow, lost gradients.

Few tokens say little: of 32 choices among 64 experts, half of the experts get none. So the counts of the last snapshots
are added up, and a rule applies once they are enough:

    dead-experts       no token, although an equal share would be at least 200. An expert with a twentieth of an equal
                       share then expects 10 tokens, and has none once in 20,000 times
    router-collapse    the entropy of all choices is that of E' experts with equal shares, and E' is at most a tenth of
                       the way from k (each token gets the same k experts) to E (all equal); at least 8 choices for
                       each expert

``lasting`` decides which are reported: a router may start with equal scores, and learns to tell experts apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.watch.expert_readings import ExpertReading, count_effective
from narrowgauge.gauges.watch.snapshots import Snapshot

WINDOW = 8
"""Snapshots whose counts are added up."""
_EQUAL_SHARE = 200
_CHOICES_PER_EXPERT = 8
_COLLAPSED, _HARD = 0.1, 0.02
_LARGE_LOGITS = 50.0
_GROWN_LOGITS, _GROWTH = 20.0, 10.0
"""The largest logit of a healthy router is less than 10 above the mean; at 20, softmax is one-hot in all but name."""
_TOKENS = 16
"""Tokens of which at least one must give an expert a gradient."""


class ExpertRules:
    """Applies the rules to each snapshot, and remembers the counts of the last ones."""

    def __init__(self) -> None:
        self._counts: dict[str, deque[tuple[int, ...]]] = {}
        self._first_logits: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what the rules remember, as plain values."""
        counts = {path: [list(one) for one in window] for path, window in self._counts.items()}
        return {"counts": counts, "logits": dict(self._first_logits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what the rules remember; an empty state, of an older checkpoint, changes nothing."""
        for path, window in state.get("counts", {}).items():
            self._counts[path] = deque((tuple(map(int, one)) for one in window), maxlen=WINDOW)
        self._first_logits |= {path: float(value) for path, value in state.get("logits", {}).items()}

    def check(self, snapshot: Snapshot) -> list[Finding]:
        """Return what a snapshot shows; whether it lasts is for the caller to decide."""
        found: list[Finding] = []
        for reading in snapshot.experts:
            window = self._counts.setdefault(reading.module, deque(maxlen=WINDOW))
            if window and len(window[-1]) != len(reading.counts):
                window.clear()
            window.append(reading.counts)
            if reading.logits is not None:
                self._first_logits.setdefault(reading.module, reading.logits)
            totals = [sum(column) for column in zip(*window, strict=True)]
            found += list(_check_collapse(reading, totals)) or list(_check_dead(reading, totals))
            found += _check_logits(reading, self._first_logits.get(reading.module))
            found += _check_gradients(reading)
        return found


def _check_dead(reading: ExpertReading, totals: list[int]) -> Iterator[Finding]:
    """Find experts that get no tokens."""
    equal = sum(totals) / len(totals)
    dead = [number for number, count in enumerate(totals) if not count]
    if dead and equal >= _EQUAL_SHARE:
        yield Finding(
            rule="dead-experts",
            severity=WARNING,
            where=reading.module,
            detail=f"{_list_experts(dead)} of {len(totals)} got no token; an equal share would be {equal:.0f}",
            why="they learn nothing, and their parameters take memory for nothing",
            fix="add a load-balancing loss or raise its factor (0.01 is usual); check that it is part of the loss",
        )


def _check_collapse(reading: ExpertReading, totals: list[int]) -> Iterator[Finding]:
    """Find a router that sends nearly all tokens to few experts."""
    experts, chosen, total = len(totals), min(reading.chosen, len(totals)), sum(totals)
    if experts == chosen or total < _CHOICES_PER_EXPERT * experts or total < _TOKENS * chosen:
        return
    effective = count_effective(totals)
    place = (effective - chosen) / (experts - chosen)
    if place < _COLLAPSED:
        most = max(range(experts), key=totals.__getitem__)
        yield Finding(
            rule="router-collapse",
            severity=SERIOUS if place < _HARD else WARNING,
            where=reading.module,
            detail=f"its {experts} experts are used as if there were {effective:.3g} with equal shares; expert {most} "
            f"gets {totals[most] / total:.0%} of all choices, where {1 / experts:.1%} would be equal",
            why="the other experts hardly learn: the model is as good as one with few experts",
            fix="add a load-balancing loss or raise its factor (0.01 is usual), or lower the learning rate of routers",
        )


def _check_logits(reading: ExpertReading, first: float | None) -> Iterator[Finding]:
    """Find router logits at which softmax is one-hot."""
    logits = reading.logits
    if logits is None or first is None:
        return
    if logits > _LARGE_LOGITS or (logits > _GROWN_LOGITS and logits > _GROWTH * first):
        yield Finding(
            rule="router-logits",
            severity=WARNING,
            where=reading.module,
            detail=f"a token's largest router logit is {logits:.3g} above the mean on average; at first it was "
            f"{first:.3g}",
            why="routing becomes one-hot, its gradients vanish, and rounding decides between experts",
            fix="add a router z-loss (a factor of 0.001 is usual), or lower the learning rate",
        )


def _check_gradients(reading: ExpertReading) -> Iterator[Finding]:
    """Find experts that get tokens, but a gradient of zeros."""
    lost = [number for number in reading.idle if reading.counts[number] >= _TOKENS]
    if lost and len(lost) < len(reading.counts):  # all of them: the zeros of the whole tensor are reported
        tokens = min(reading.counts[number] for number in lost)
        yield Finding(
            rule="expert-underflow",
            severity=WARNING,
            where=reading.module,
            detail=f"{_list_experts(lost)} of {len(reading.counts)} got {tokens} tokens or more, and a gradient of "
            "zeros; the others have gradients",
            why="they learn nothing: their gradients, multiplied by small router weights, are below the format",
            fix="use bf16 or a dynamic loss scale; in FP8, keep these experts in BF16 (keep=...)",
        )


def _list_experts(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"expert{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}{more}"
