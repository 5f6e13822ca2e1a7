"""LastingFindings: reports what one snapshot cannot prove only after several snapshots in a row show it.

    candidate in a snapshot            count it for its rule and place; otherwise forget the place
    count >= LOOKS over >= UPDATES     report it; twice as many if an earlier snapshot showed the place without it
    end of the run, too few snapshots  report it as a warning if every snapshot shows it and nothing explains it

A branch whose last weight starts at zero (low-rank adapters, adaLN-zero, zero-gamma residual blocks, output layers of
diffusion models, ControlNet) has outputs and gradients of zero in the first updates. With two zero weights in a row it
takes one update more. An input that some batches do not have gives zeros in some snapshots. Neither lasts: an
input that every third batch lacks is missing in six snapshots in a row once in 700 times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from narrowgauge.findings import WARNING, Finding

LOOKS = 3
"""Snapshots in a row that must show it."""
UPDATES = 5
"""Updates that they must span: with a snapshot in every update, three are too early to tell."""

_CERTAIN = ("dead-layer", "no-gradient", "underflow")
"""Rules that a run of one or two snapshots reports as warnings; the others need more to say anything. What they report
may also pass: inputs that some batches do not have."""


class LastingFindings:
    """Counts candidates from snapshot to snapshot, and returns those that last."""

    def __init__(self) -> None:
        self._streaks: dict[tuple[str, str], tuple[int, int]] = {}
        """Snapshots in a row and the update of the first, by rule and place."""
        self._pending: dict[tuple[str, str], Finding] = {}
        self._explained: set[tuple[str, str]] = set()
        """Places that a short run does not report, because an earlier snapshot explained them."""
        self._looks = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        streaks = [[*place, *streak] for place, streak in self._streaks.items()]
        return {"streaks": streaks, "looks": self._looks, "explained": sorted(map(list, self._explained))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts from ``state_dict``."""
        self._streaks = {(rule, where): (count, first) for rule, where, count, first in state["streaks"]}
        self._looks = state["looks"]
        self._explained = {(rule, where) for rule, where in state["explained"]}

    def add(self, update: int, candidates: Iterable[Finding], explained: Iterable[Finding] = ()) -> list[Finding]:
        """Count the candidates of a snapshot.

        Args:
            update: The update of the snapshot.
            candidates: What the snapshot shows.
            explained: Candidates that are expected for now. They count, but are not reported at the end of a short run.

        Returns:
            The candidates that have lasted.
        """
        self._looks += 1
        before, self._streaks, self._pending = self._streaks, {}, {}
        lasting = []
        candidates, explained = list(candidates), list(explained)
        self._explained |= {(finding.rule, finding.where) for finding in explained}
        for finding in [*candidates, *explained]:
            place = finding.rule, finding.where
            count, first = before.get(place, (0, update))
            self._streaks[place] = count + 1, first
            was_fine = finding.rule in _CERTAIN and count + 1 < self._looks
            if count + 1 >= (2 * LOOKS if was_fine else LOOKS) and update - first >= UPDATES:
                seen = f"; so it was in {count + 1} snapshots since step {first}"
                lasting.append(dataclasses.replace(finding, detail=finding.detail + seen, step=first))
            elif count + 1 == self._looks and place not in self._explained:
                self._pending[place] = dataclasses.replace(finding, severity=WARNING, step=first)
        return lasting

    def finish(self) -> list[Finding]:
        """Return, as warnings, the candidates of a run that was too short to prove them."""
        found, self._pending = list(self._pending.values()), {}
        return [one for one in found if one.rule in _CERTAIN] if self._looks < LOOKS else []
