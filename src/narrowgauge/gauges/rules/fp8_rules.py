"""Rules over FP8 sites from update to update: which saturate or underflow, and whether their scales follow."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.watch.snapshots import Fp8Reading


@dataclass(frozen=True)
class SiteWindow:
    """One FP8 site in the last updates."""

    site: str
    scales: list[float]
    """One per reading, oldest first."""
    saturated: list[int]
    """Values that saturated, one count per update."""
    flushed: int
    """Values flushed to zero in all updates of the window."""
    size: int
    """Values of the tensor; 0 if unknown."""


class Fp8Rules:
    """Checks every FP8 site over a window of updates with every rule in ``RULES``."""

    def __init__(self, window: int = 8) -> None:
        self.window = window
        self._readings: deque[Fp8Reading] = deque(maxlen=window + 1)
        self.sizes: dict[str, int] = defaultdict(int)
        """Values of each site's tensor in an update, where known."""

    def state_dict(self) -> dict[str, Any]:
        """Return the window as plain values."""
        return {"seen": [dict(vars(reading)) for reading in self._readings], "sizes": dict(self.sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window from ``state_dict``."""
        self._readings = deque((Fp8Reading(**fields) for fields in state["seen"]), maxlen=self.window + 1)
        self.sizes = defaultdict(int, state["sizes"])

    def check(self, reading: Fp8Reading) -> list[Finding]:
        """Add the reading of an update, and return the findings of all sites once the window is full."""
        self._readings.append(reading)
        if len(self._readings) <= self.window:
            return []
        windows = [self._make_window(site) for site in reading.scales]
        return [finding for window in windows for rule in RULES for finding in rule(window)]

    def _make_window(self, site: str) -> SiteWindow:
        readings = list(self._readings)
        return SiteWindow(
            site,
            scales=[reading.scales[site] for reading in readings],
            saturated=[b.saturated[site] - a.saturated[site] for a, b in itertools.pairwise(readings)],
            flushed=readings[-1].flushed[site] - readings[0].flushed[site],
            size=self.sizes.get(site, 0),
        )


def check_saturation(window: SiteWindow) -> Iterator[Finding]:
    """Find a site that saturates in every update, with a scale that is frozen or does not follow fast enough."""
    counts = window.saturated
    if all(count > 0 for count in counts[-4:]) and len(set(window.scales[-4:])) == 1:
        yield Finding(
            rule="fp8-stale-scale",
            severity=SERIOUS,
            where=window.site,
            detail=f"{counts[-1]} values saturated in the last update, as in earlier ones, and the scale stays at "
            f"{window.scales[-1]:.4g}",
            why="the largest values are all clipped to the same number, so the layer computes wrong results",
            fix="let scales follow: scaling=delayed or current, and an amax history that is updated",
        )
    elif all(count > max(8, 1e-4 * max(window.size, 1)) for count in counts):
        yield Finding(
            rule="fp8-saturating",
            severity=WARNING,
            where=window.site,
            detail=f"values saturated in each of the last {len(counts)} updates, {counts[-1]} in the last",
            why="outliers are clipped: the tensor grows faster than its amax history follows",
            fix="add headroom (margin=1), use a shorter history with amax=recent, or keep the layer out of FP8",
        )


def check_underflow(window: SiteWindow) -> Iterator[Finding]:
    """Find a site that flushes more than half of its values to zero."""
    updates = len(window.saturated)
    if window.size > 1 and window.flushed > 0.5 * window.size * updates:
        yield Finding(
            rule="fp8-underflow",
            severity=SERIOUS,
            where=window.site,
            detail=f"{window.flushed / (window.size * updates):.0%} of its values were flushed to zero",
            why="the matrix product reads zeros for most of the tensor",
            fix="scale it: scaling=delayed or current; for gradients use E5M2, which has the wider range",
        )


RULES: tuple[Callable[[SiteWindow], Iterator[Finding]], ...] = (check_saturation, check_underflow)
