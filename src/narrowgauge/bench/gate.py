"""The gate: is a recipe still as fast, against its plain-torch twin, as it was when a base was saved?

Times of two days cannot be compared; ratios can. Candidate and twin take turns, round after round, so that the
machine's state falls on both, and what is compared is the ratio of their times, before and now. On a CPU these are
times of the processor: the wall clock also counts what other processes take, which is ten times the noise. It is looked
at too, for a slowdown that only waits. Some rounds are off by a fifth while the rest agree to a percent, so of each
side's log ratios the middle half counts (the mean after a quarter is cut off at either end). The interval of the change
is Yuen's: Student's for means of this kind, with either side's spread its own.

    slower      the interval lies above 0, and the change is more than the tolerance
    pass        the interval lies below the tolerance
    faster      a pass, with the interval below 0 and a gain of more than the tolerance
    undecided   none of these after the last round: said, and no failure

One looks after 1, 2, 4 and 8 times the rounds and stops at the first verdict. The level of a look is such that all of
them together, over all recipes and clocks, cry wolf once in a hundred gates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from narrowgauge.bench.base import Base, twin_of
from narrowgauge.bench.contest import Contestant, Enough, Row, looks
from narrowgauge.errors import UsageError

Tell = Callable[[str], None]

SLOWER, PASS, FASTER, UNDECIDED = "slower", "pass", "faster", "undecided"
FALSE_ALARMS = 0.01
"""How often a gate fails that should not, at most."""
CUT = 0.25
"""The share that is cut off at either end."""
TOLERANCE = 0.03
ROUNDS = 12
"""Rounds before the first look."""


@dataclass(frozen=True)
class Middle:
    """The mean of the middle half of some values, with its variance and degrees of freedom."""

    mean: float
    variance: float
    freedom: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Middle:
        count = len(values)
        cut = int(CUT * count)
        kept = count - 2 * cut
        if kept < 2:
            return cls(float(np.median(values)), math.inf, 1)
        ordered = np.sort(values)
        pulled_in = np.clip(ordered, ordered[cut], ordered[count - cut - 1])
        squares = float(np.sum((pulled_in - pulled_in.mean()) ** 2))
        return cls(float(ordered[cut : count - cut].mean()), squares / (kept * (kept - 1)), kept - 1)

    def half_width(self, miss: float, other: Middle | None = None) -> float:
        """Half the interval of this mean, or of its difference to another: each end is missed that often."""
        variance = self.variance + (other.variance if other else 0.0)
        if not 0 < variance < math.inf:
            return variance
        weight = self.variance**2 / self.freedom + (other.variance**2 / other.freedom if other else 0.0)
        return t_quantile(miss, round(variance**2 / weight, 1)) * math.sqrt(variance)


@functools.lru_cache(maxsize=4096)
def t_quantile(miss: float, freedom: float) -> float:
    """The value that Student's t passes with probability ``miss``: t is the root of ``freedom`` times the tangent of
    an angle whose density is a power of its cosine, summed here from the far end, where the steps are finest."""
    edges = np.linspace(0, 1, 20_001) ** 3 * math.pi / 2
    from_end, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    tail = np.cumsum(np.sin(from_end) ** (freedom - 1) * widths)
    return math.sqrt(freedom) / math.tan(float(np.interp(2 * miss * tail[-1], tail, edges[1:])))


@dataclass(frozen=True, kw_only=True)
class Change:
    """What became of a ratio of times."""

    verdict: str
    before: float
    now: float
    """The recipe's time over its twin's."""
    change: float
    """now / before - 1: above 0 is slower."""
    interval: tuple[float, float] | None
    """Of the change; None where the rounds are too few for any."""
    rounds: int

    def __str__(self) -> str:
        low, high = self.interval or (-math.inf, math.inf)
        within = f"{low:+.2%} to {high:+.2%}" if self.interval else "too few rounds for an interval"
        return f"{self.change:+.2%} ({within})"


def judge(before: Sequence[float], now: Sequence[float], tolerance: float, miss: float) -> Change:
    """The verdict on log ratios of a base and of now; without a base, before is exactly 1: the twin's own time."""
    then = Middle.of(before) if before else Middle(0.0, 0.0, 1)
    today = Middle.of(now)
    shift, half = today.mean - then.mean, today.half_width(miss, then)
    change, low, high = (math.expm1(min(value, 700.0)) for value in (shift, shift - half, shift + half))
    if low > 0 and change > tolerance:
        verdict = SLOWER
    elif high < tolerance:
        verdict = FASTER if high < 0 and change < -tolerance else PASS
    else:
        verdict = UNDECIDED
    return Change(
        verdict=verdict,
        before=math.exp(then.mean),
        now=math.exp(today.mean),
        change=change,
        interval=(low, high) if math.isfinite(half) else None,
        rounds=len(now),
    )


class Timed(Protocol):
    """A contestant, or its row."""

    @property
    def times_ms(self) -> Sequence[float]: ...
    @property
    def cpu_ms(self) -> Sequence[float]: ...


def log_ratios(candidate: Timed, twin: Timed) -> dict[str, list[float]]:
    """Of the times of each round, by each clock there is; the first is the one that decides."""
    pairs = {"cpu": (candidate.cpu_ms, twin.cpu_ms), "wall": (candidate.times_ms, twin.times_ms)}
    return {
        clock: [math.log(mine / its) for mine, its in zip(*times, strict=True)]
        for clock, times in pairs.items()
        if all(min(side, default=0.0) > 0 for side in times)
    }


def level(recipes: int, clocks: int) -> float:
    """How often one end of one look's interval may miss."""
    return FALSE_ALARMS / (len(looks(1)) * recipes * clocks)


class Gate:
    """Judges recipes against a base; without one, against the twin itself."""

    def __init__(self, base: Base | None, recipes: Sequence[str], tolerance: float, tell: Tell) -> None:
        self.base, self.recipes, self.tolerance, self.tell = base, len(recipes), tolerance, tell
        self.before = {name: log_ratios(*base.pair(name)) for name in recipes} if base else {}

    def enough(self, field: Sequence[Contestant]) -> bool:
        """Whether the recipe that leads the field is decided."""
        twin = _twin(field)
        if twin is None:
            raise UsageError(f"{field[0].name} has no plain-torch twin here to hold it against: leave it out")
        clock, found = self._judge(field[0].name, log_ratios(field[0], twin))
        self.tell(f"{field[0].name}: {found[clock].verdict} after {found[clock].rounds} rounds, {found[clock]}")
        return found[clock].verdict != UNDECIDED

    def rule(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The gate's part of the JSON: ok, failures, and a row for each recipe."""
        judged, failures = [], []
        for row in rows:
            twin = twin_of(row.recipe, rows)
            if row.name != row.recipe or twin is None:
                continue
            clock, found = self._judge(row.name, log_ratios(row, twin))
            if found[clock].verdict == SLOWER:
                failures.append(f"{row.name} is slower: {found[clock]}, beyond {self.tolerance:.1%}")
            memory, failure = self._memory(row)
            failures += [failure] if failure else []
            clocks = {name: asdict(one) for name, one in found.items()}
            judged.append(
                {"name": row.name, "twin": twin.name, "clock": clock, **clocks[clock], **memory, "clocks": clocks}
            )
        return {"ok": not failures, "tolerance": self.tolerance, "failures": failures, "rows": judged}

    def _judge(self, name: str, ratios: dict[str, list[float]]) -> tuple[str, dict[str, Change]]:
        """What each clock says, and which of them decides: the first, unless only the wall shows a slowdown."""
        before = self.before[name] if self.base else {clock: [] for clock in ratios}
        clocks = [clock for clock in ratios if clock in before]
        miss = level(self.recipes, len(clocks))
        found = {clock: judge(before[clock], ratios[clock], self.tolerance, miss) for clock in clocks}
        return next((clock for clock, one in found.items() if one.verdict == SLOWER), next(iter(found))), found

    def _memory(self, row: Row) -> tuple[dict[str, Any], str | None]:
        """Then and now, and what is wrong with it. Bytes have no noise; a CPU's are not counted."""
        before = self.base.row(row.name).peak_bytes if self.base else None
        if not before or row.peak_bytes is None:
            return {"memory_before": before, "memory_now": row.peak_bytes, "memory_change": None}, None
        growth = row.peak_bytes / before - 1
        memory = {"memory_before": before, "memory_now": row.peak_bytes, "memory_change": growth}
        if growth <= self.tolerance:
            return memory, None
        return memory, (
            f"{row.name} needs more memory: {row.peak_bytes / 2**30:.3f} GiB, {before / 2**30:.3f} before, "
            f"{growth:+.1%}, beyond {self.tolerance:.1%}"
        )


def steady(tolerance: float, tell: Tell) -> Enough:
    """For a base: rounds go on until its ratio is known to a third of the tolerance, as no gate will be surer."""

    def enough(field: Sequence[Contestant]) -> bool:
        twin = _twin(field)
        if twin is None:
            return True
        ratios = log_ratios(field[0], twin)
        middle = Middle.of(next(iter(ratios.values())))
        half = middle.half_width(level(1, len(ratios)))
        known = f"known to {half:.2%}" if math.isfinite(half) else "not known yet"
        rounds = len(twin.times_ms)
        tell(f"{field[0].name}: {math.exp(middle.mean):.4f} of {twin.name}'s time, {known} after {rounds} rounds")
        return half <= tolerance / 3

    return enough


def _twin(field: Sequence[Contestant]) -> Contestant | None:
    return next((one for one in field if one.name.startswith("torch-")), None)
