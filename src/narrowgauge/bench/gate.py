"""The performance gate: is a recipe slower, relative to its plain-torch baseline, than in a saved benchmark?

Absolute times of different days are not comparable, but ratios are. Recipe and baseline take turns, round after round,
so that the state of the machine affects both, and the ratios of their times are compared. On a CPU the times are CPU
times, because the wall clock includes other processes, which has ten times the noise. The wall clock is checked too,
because only it shows waiting. Some rounds are off by 20% while the others agree to 1%, so the gate uses trimmed means
of the log ratios (25% are cut at each end). The interval of the change is Yuen's: Student's t for trimmed means with
unequal variances.

    slower      the interval is above 0, and the change is more than the tolerance
    pass        the interval is below the tolerance
    faster      a pass with the interval below 0 and a gain of more than the tolerance
    undecided   none of these after the last round; reported, but not a failure

The results are analyzed after 1, 2, 4 and 8 times the rounds, until there is a verdict. The level of each analysis is
such that all of them together, over all recipes and clocks, give at most one false alarm in a hundred gates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from narrowgauge.bench.compare import Entry, Row, StopRule, plan_analyses
from narrowgauge.bench.saved_benchmark import SavedBenchmark, find_baseline
from narrowgauge.errors import UsageError

Tell = Callable[[str], None]

SLOWER, PASS, FASTER, UNDECIDED = "slower", "pass", "faster", "undecided"
FALSE_ALARMS = 0.01
"""The largest share of gates that fail without a slowdown."""
CUT = 0.25
"""The share of values that is trimmed at each end."""
TOLERANCE = 0.03
ROUNDS = 12
"""Rounds before the first analysis."""


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of the middle half of some values, with its variance and degrees of freedom."""

    mean: float
    variance: float
    df: int

    @classmethod
    def of(cls, values: Sequence[float]) -> TrimmedMean:
        count = len(values)
        cut = int(CUT * count)
        kept = count - 2 * cut
        if kept < 2:
            return cls(float(np.median(values)), math.inf, 1)
        ordered = np.sort(values)
        winsorized = np.clip(ordered, ordered[cut], ordered[count - cut - 1])
        squares = float(np.sum((winsorized - winsorized.mean()) ** 2))
        return cls(float(ordered[cut : count - cut].mean()), squares / (kept * (kept - 1)), kept - 1)

    def half_width(self, miss: float, other: TrimmedMean | None = None) -> float:
        """Half the width of the interval of this mean, or of its difference to another.

        Args:
            miss: The error probability at each end of the interval.
            other: Another mean.
        """
        variance = self.variance + (other.variance if other else 0.0)
        if not 0 < variance < math.inf:
            return variance
        weight = self.variance**2 / self.df + (other.variance**2 / other.df if other else 0.0)
        return t_quantile(miss, round(variance**2 / weight, 1)) * math.sqrt(variance)


@functools.lru_cache(maxsize=4096)
def t_quantile(miss: float, df: float) -> float:
    """The value that Student's t exceeds with probability ``miss``.

    t is sqrt(df) times the tangent of an angle whose density is a power of its cosine. The density is integrated from
    the far end, where the grid is finest.
    """
    edges = np.linspace(0, 1, 20_001) ** 3 * math.pi / 2
    from_end, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    tail = np.cumsum(np.sin(from_end) ** (df - 1) * widths)
    return math.sqrt(df) / math.tan(float(np.interp(2 * miss * tail[-1], tail, edges[1:])))


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change of a ratio of times."""

    verdict: str
    before: float
    now: float
    """The recipe's time divided by its baseline's."""
    change: float
    """now / before - 1: above 0 is slower."""
    interval: tuple[float, float] | None
    """The interval of the change; None if there are too few rounds."""
    rounds: int

    def __str__(self) -> str:
        low, high = self.interval or (-math.inf, math.inf)
        within = f"{low:+.2%} to {high:+.2%}" if self.interval else "too few rounds for an interval"
        return f"{self.change:+.2%} ({within})"


def judge(before: Sequence[float], now: Sequence[float], tolerance: float, miss: float) -> Change:
    """Compares the log ratios of a saved benchmark and of a new one.

    Args:
        before: Saved log ratios; empty to compare with a ratio of exactly 1, the baseline's own time.
        now: New log ratios.
        tolerance: The relative slowdown that is accepted.
        miss: The error probability at each end of the interval.
    """
    then = TrimmedMean.of(before) if before else TrimmedMean(0.0, 0.0, 1)
    today = TrimmedMean.of(now)
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
    """An entry or its row."""

    @property
    def times_ms(self) -> Sequence[float]: ...
    @property
    def cpu_ms(self) -> Sequence[float]: ...


def log_ratios(candidate: Timed, baseline: Timed) -> dict[str, list[float]]:
    """The log ratio of the times of each round, for each available clock; the first clock decides."""
    pairs = {"cpu": (candidate.cpu_ms, baseline.cpu_ms), "wall": (candidate.times_ms, baseline.times_ms)}
    return {
        clock: [math.log(mine / its) for mine, its in zip(*times, strict=True)]
        for clock, times in pairs.items()
        if all(min(side, default=0.0) > 0 for side in times)
    }


def divide_level(recipes: int, clocks: int) -> float:
    """The error probability at each end of one interval, so that all of them together keep FALSE_ALARMS."""
    return FALSE_ALARMS / (len(plan_analyses(1)) * recipes * clocks)


class Gate:
    """Compares recipes with a saved benchmark, or with their baselines if there is none."""

    def __init__(self, saved: SavedBenchmark | None, recipes: Sequence[str], tolerance: float, tell: Tell) -> None:
        """Creates a gate.

        Args:
            saved: The saved benchmark; None to compare each recipe with its plain-torch baseline.
            recipes: The recipes that will be measured.
            tolerance: The relative slowdown or memory growth that is accepted.
            tell: Called with each line of progress.

        Raises:
            UsageError: If the saved benchmark lacks a recipe or its baseline.
        """
        self.saved, self.recipes, self.tolerance, self.tell = saved, len(recipes), tolerance, tell
        self.before = {name: log_ratios(*saved.pair(name)) for name in recipes} if saved else {}

    def enough(self, entries: Sequence[Entry]) -> bool:
        """A stop rule: whether the first entry, the recipe, is decided."""
        recipe, baseline = entries[0], _find_torch_entry(entries)
        if baseline is None:
            raise UsageError(f"{recipe.name} has no plain-torch baseline on this device: leave it out")
        clock, found = self._judge(recipe.name, log_ratios(recipe, baseline))
        self.tell(f"{recipe.name}: {found[clock].verdict} after {found[clock].rounds} rounds, {found[clock]}")
        return found[clock].verdict != UNDECIDED

    def judge_rows(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The ``gate`` field of the JSON output: ``ok``, ``failures``, and one row for each recipe."""
        judged, failures = [], []
        for row in rows:
            baseline = find_baseline(row.recipe, rows)
            if row.name != row.recipe or baseline is None:
                continue
            clock, found = self._judge(row.name, log_ratios(row, baseline))
            if found[clock].verdict == SLOWER:
                failures.append(f"{row.name} is slower: {found[clock]}, tolerance {self.tolerance:.1%}")
            memory, failure = self._compare_memory(row)
            failures += [failure] if failure else []
            clocks = {name: asdict(one) for name, one in found.items()}
            judged.append(
                {"name": row.name, "twin": baseline.name, "clock": clock, **clocks[clock], **memory, "clocks": clocks}
            )
        return {"ok": not failures, "tolerance": self.tolerance, "failures": failures, "rows": judged}

    def _judge(self, name: str, ratios: dict[str, list[float]]) -> tuple[str, dict[str, Change]]:
        """The change by each clock, and the clock that decides: the first one that shows a slowdown, or the first."""
        before = self.before[name] if self.saved else {clock: [] for clock in ratios}
        clocks = [clock for clock in ratios if clock in before]
        miss = divide_level(self.recipes, len(clocks))
        found = {clock: judge(before[clock], ratios[clock], self.tolerance, miss) for clock in clocks}
        return next((clock for clock, one in found.items() if one.verdict == SLOWER), next(iter(found))), found

    def _compare_memory(self, row: Row) -> tuple[dict[str, Any], str | None]:
        """Peak memory before and now, and the failure, if any. Memory has no noise; on a CPU it is not measured."""
        before = self.saved.row(row.name).peak_bytes if self.saved else None
        if not before or row.peak_bytes is None:
            return {"memory_before": before, "memory_now": row.peak_bytes, "memory_change": None}, None
        growth = row.peak_bytes / before - 1
        memory = {"memory_before": before, "memory_now": row.peak_bytes, "memory_change": growth}
        if growth <= self.tolerance:
            return memory, None
        return memory, (
            f"{row.name} needs more memory: {row.peak_bytes / 2**30:.3f} GiB, {before / 2**30:.3f} before, "
            f"{growth:+.1%}, tolerance {self.tolerance:.1%}"
        )


def make_save_rule(tolerance: float, tell: Tell) -> StopRule:
    """The stop rule for ``--save``: measure until the ratio is known to a third of the tolerance.

    The precision of the saved ratio limits that of every later gate.
    """

    def enough(entries: Sequence[Entry]) -> bool:
        recipe, baseline = entries[0], _find_torch_entry(entries)
        if baseline is None:
            return True
        ratios = log_ratios(recipe, baseline)
        ratio = TrimmedMean.of(next(iter(ratios.values())))
        half = ratio.half_width(divide_level(1, len(ratios)))
        precision = f"±{half:.2%}" if math.isfinite(half) else "no interval yet"
        rounds = len(baseline.times_ms)
        tell(f"{recipe.name}: {math.exp(ratio.mean):.4f} of {baseline.name}'s time, {precision} after {rounds} rounds")
        return half <= tolerance / 3

    return enough


def _find_torch_entry(entries: Sequence[Entry]) -> Entry | None:
    return next((one for one in entries if one.name.startswith("torch-")), None)
