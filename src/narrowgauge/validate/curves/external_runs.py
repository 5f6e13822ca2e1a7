"""Compares finished runs of other tools by their logs, pair by pair, and applies the verdict.

Folders of runs are tested like the pairs of a validation: on the last evaluation loss, or on the end of the training
loss if not all runs were evaluated. A single pair is never equivalent: the noise between steps does not show the noise
between seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.errors import UsageError
from narrowgauge.runs.json_lines import replace_nonfinite
from narrowgauge.validate.curves.external_logs import Curves, Series, natural_sort_key
from narrowgauge.validate.statistics.t_distribution import t_quantile
from narrowgauge.validate.statistics.verdict import ALPHA, Verdict, judge

SMOOTH = 20
"""Points over which curves are averaged before they are compared, or a tenth of a shorter curve."""
LEAST, BLOCKS = 10, 10
"""The least number of points for the end of a training loss; the number of blocks that its noise is estimated from."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs compared over their common steps. In tuples the reference comes first; missing numbers are NaN."""

    name: str
    final: tuple[float, float]
    """The losses that the verdict is about; NaN for a diverged run."""
    best: tuple[float, float]
    """The lowest evaluation losses."""
    area: float
    """The mean absolute gap between the smoothed curves; relative to the reference, like all gaps."""
    gap_mean: float
    """The mean gap, with its sign."""
    gap_largest: float
    """The largest gap between the smoothed curves."""
    gap_largest_step: float
    grad_norm_ratio: float
    """The ratio of the median gradient norms."""
    skipped: tuple[int | None, int | None]
    diverged: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of two sets of runs."""

    what: str
    """The loss that the verdict is about."""
    verdict: Verdict
    pairs: list[Pair]
    overall: Pair
    """Means over the pairs; the largest gap of all; total skipped updates and diverged runs."""
    block_gap: float | None
    """For a single pair, the mean gap of the training loss over the last quarter."""
    block_interval: tuple[float, float] | None
    """The interval of ``block_gap``, from the noise between blocks of steps. It excludes the noise between seeds."""
    notes: list[str]
    sources: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The comparison and its verdict as JSON data."""
        verdict = self.verdict
        more = {"seeds_needed": verdict.seeds_needed, "detectable": verdict.detectable}
        more |= {"diverged_reference": verdict.diverged[0], "diverged": verdict.diverged[1]}
        result: dict[str, Any] = replace_nonfinite(asdict(self) | asdict(verdict) | more)
        return result

    def to_table(self) -> tuple[list[str], list[list[str]]]:
        """The columns and rows of a table for the terminal."""
        columns = ["pair", "reference", "candidate", "gap", "best", "area", "largest gap", "gradients", "skipped"]
        rows = []
        for one in self.pairs if len(self.pairs) == 1 else [*self.pairs, self.overall]:
            row = [one.name, *(f"{loss:.5f}" if math.isfinite(loss) else "diverged" for loss in one.final)]
            row += [_percent(_relative(*one.final)), _percent(_relative(*one.best)), _percent(one.area).lstrip("+")]
            row += [f"{_percent(one.gap_largest)} at {one.gap_largest_step:g}".removesuffix(" at nan")]
            row += [f"{one.grad_norm_ratio:.3f}" if math.isfinite(one.grad_norm_ratio) else "-"]
            row += [" / ".join("-" if count is None else str(count) for count in one.skipped)]
            rows.append([*row, " / ".join(map(str, one.diverged))])
        return [*columns, "diverged"], rows


def pair_runs(references: Sequence[Curves], candidates: Sequence[Curves]) -> list[tuple[Curves, Curves]]:
    """Pairs runs by name, or by order if no name occurs in both sets.

    Raises:
        UsageError: If the numbers of runs differ, or only some names match.
    """
    names = [[run.name for run in runs] for runs in (references, candidates)]
    shared, listed = set(names[0]) & set(names[1]), " against ".join(", ".join(of) or "none" for of in names)
    if len(references) != len(candidates) or not references:
        raise UsageError(f"reference and candidate need the same number of runs, got {listed}")
    if set(names[0]) == set(names[1]) == shared and len(shared) == len(references):
        by_name = {run.name: run for run in candidates}
        return [(run, by_name[run.name]) for run in references]
    if shared and len(shared) < len(references) and len(set(names[0])) == len(references):
        raise UsageError(f"only some run names match, so the other runs cannot be paired: {listed}")
    orders = (sorted(runs, key=lambda run: natural_sort_key(run.name)) for runs in (references, candidates))
    return list(zip(*orders, strict=True))


@np.errstate(all="ignore")
def compare_runs(references: Sequence[Curves], candidates: Sequence[Curves], margin: float = 0.005) -> Comparison:
    """Compares runs and tests the candidate's final losses.

    Args:
        references: Runs of the reference.
        candidates: Runs of the candidate, paired with the references by ``pair_runs``.
        margin: The largest relative gap that counts as equivalent.

    Raises:
        UsageError: If the runs cannot be paired or have no steps in common.
    """
    paired = pair_runs(references, candidates)
    ends = [max(run.loss.steps[-1] for run in runs) for runs in (references, candidates)]
    failed = [(_has_failed(r, c, ends[0]), _has_failed(c, r, ends[1])) for r, c in paired]
    complete = [runs for runs, flags in zip(paired, failed, strict=True) if not any(flags)] or paired
    evaluated = all(_shared(r.eval, c.eval) is not None for r, c in complete)
    what = "the final evaluation loss" if evaluated else "the mean of the last tenth of the training loss"
    notes = [note for r, c in paired for note in _notes(r, c, evaluated)]
    notes += [
        f"{run.name} of the {side} stopped at step {run.loss.steps[-1]:g} and counts as diverged"
        for runs, flags in zip(paired, failed, strict=True)
        for run, has_failed, side in zip(runs, flags, ("reference", "candidate"), strict=True)
        if has_failed and not run.diverged
    ]
    pairs = [_measure(r, c, evaluated, flags) for (r, c), flags in zip(paired, failed, strict=True)]
    verdict = judge([one.final[0] for one in pairs], [one.final[1] for one in pairs], margin)
    block_gap, interval = None, None
    if len(pairs) == 1 and not any(pairs[0].diverged):
        block_gap, interval = _measure_block_gap(*paired[0])
        gap = _relative(*pairs[0].final)
        differs = f"differs by {gap:+.3%}" if math.isfinite(gap) else f"is 0 and {pairs[0].final[1]:.5g}"
        reason = f"a single pair does not show the noise between seeds; {what} {differs}"
        if interval is not None:
            reason += f"; the training loss of the last quarter differs by {block_gap:+.3%}, with an interval of "
            reason += f"{interval[0]:+.3%} to {interval[1]:+.3%} from the noise between steps"
        verdict = replace(verdict, gap=gap if math.isfinite(gap) else None, reason=reason)
    return Comparison(
        what=what,
        verdict=verdict,
        pairs=pairs,
        overall=_summarize(pairs),
        block_gap=block_gap,
        block_interval=interval,
        notes=notes,
        sources=[run.source for runs in paired for run in runs],
    )


def _has_failed(run: Curves, partner: Curves, end: float) -> bool:
    """Whether a run diverged, or stopped before half the steps of its partner and of the longest run on its side."""
    return run.diverged or bool(2 * run.loss.steps[-1] < min(partner.loss.steps[-1], end))


def _notes(r: Curves, c: Curves, evaluated: bool) -> Iterator[str]:
    """Notes on how a pair was compared."""
    shared = _shared(r.loss, c.loss)
    if shared is None:
        spans = " and ".join(f"{run.loss.steps[0]:g} to {run.loss.steps[-1]:g} of {run.name}" for run in (r, c))
        raise UsageError(f"the runs have no steps in common: {spans}")
    if (r.loss.by == "epoch") != (c.loss.by == "epoch"):
        raise UsageError(f"steps cannot be compared with epochs: {r.source}; {c.source}")
    if r.name != c.name:
        yield f"{r.name} is compared with {c.name}"
    for side, run in (("reference", r), ("candidate", c)):
        if run.loss.steps[-1] > shared[1]:
            yield f"{r.name}: compared up to step {shared[1]:g}, but the {side} continues to {run.loss.steps[-1]:g}"
    for ours, theirs in ((r.loss, c.loss), (r.eval, c.eval)):
        if ours is not None and theirs is not None and ours.tag != theirs.tag:
            yield f"{r.name}: {ours.tag!r} is compared with {theirs.tag!r}"
    at = _align(r.eval, c.eval)[0]
    if evaluated and len(at) and at[-1] < shared[1]:
        yield f"{r.name}: the last common evaluation is at step {at[-1]:g}"


def _measure(r: Curves, c: Curves, evaluated: bool, diverged: tuple[bool, bool]) -> Pair:
    first, last = _shared(r.loss, c.loss) or (math.nan, math.nan)
    steps, ours, theirs = _align(r.loss, c.loss)
    if evaluated:
        final = [float(values[-1]) if len(values) else math.nan for values in _align(r.eval, c.eval)[1:]]
    else:
        count = min(len(steps), max(LEAST, len(steps) // 10))
        start = steps[-count] if count else last - (last - first) / 10
        final = [_reduce(np.mean, run.loss, (start, last)) for run in (r, c)]
    evaluations = _shared(r.eval, c.eval)
    norms = [_reduce(np.median, run.grad_norm, (first, last)) for run in (r, c)]
    return Pair(
        name=r.name,
        final=(math.nan if diverged[0] else final[0], math.nan if diverged[1] else final[1]),
        best=(_reduce(np.min, r.eval, evaluations), _reduce(np.min, c.eval, evaluations)),
        **_measure_gaps(steps, _smooth(ours), _smooth(theirs)),
        grad_norm_ratio=norms[1] / norms[0] if norms[0] else math.nan,
        skipped=(r.skipped, c.skipped),
        diverged=(int(diverged[0]), int(diverged[1])),
    )


def _measure_gaps(steps: Floats, ours: Floats, theirs: Floats) -> dict[str, float]:
    widths = np.diff(steps, prepend=steps[:1]) + np.diff(steps, append=steps[-1:]) if len(steps) > 1 else np.ones(1)
    level = float((widths * abs(ours)).sum()) if len(steps) else 0.0
    if level == 0:
        return dict.fromkeys(("area", "gap_mean", "gap_largest", "gap_largest_step"), math.nan)
    gaps = np.divide(theirs - ours, abs(ours), out=np.zeros_like(ours), where=ours != 0)
    largest = int(abs(gaps).argmax())
    return {
        "area": float((widths * abs(theirs - ours)).sum()) / level,
        "gap_mean": float((widths * (theirs - ours)).sum()) / level,
        "gap_largest": float(gaps[largest]),
        "gap_largest_step": float(steps[largest]),
    }


def _summarize(pairs: Sequence[Pair]) -> Pair:
    largest = max(pairs, key=lambda one: abs(one.gap_largest) if math.isfinite(one.gap_largest) else -1.0)
    counts = [[one.skipped[side] for one in pairs] for side in (0, 1)]
    skipped = [None if None in of else sum(count for count in of if count is not None) for of in counts]
    whole = [one.final for one in pairs if all(map(math.isfinite, one.final))]
    return Pair(
        name="all",
        final=(_mean(final[0] for final in whole), _mean(final[1] for final in whole)),
        best=(_mean(one.best[0] for one in pairs), _mean(one.best[1] for one in pairs)),
        area=_mean(one.area for one in pairs),
        gap_mean=_mean(one.gap_mean for one in pairs),
        gap_largest=largest.gap_largest,
        gap_largest_step=largest.gap_largest_step,
        grad_norm_ratio=_mean(one.grad_norm_ratio for one in pairs),
        skipped=(skipped[0], skipped[1]),
        diverged=(sum(one.diverged[0] for one in pairs), sum(one.diverged[1] for one in pairs)),
    )


def _measure_block_gap(r: Curves, c: Curves) -> tuple[float, tuple[float, float]] | tuple[None, None]:
    """The mean gap of the training loss over the last quarter, and its interval from the means of blocks of steps."""
    _, ours, theirs = _align(r.loss, c.loss)
    quarter = len(ours) // 4
    blocks = min(BLOCKS, quarter // 2)
    if blocks < 2 or r.loss is r.eval or not ours[-quarter:].any():
        return None, None
    gaps = (theirs - ours)[-quarter:] / abs(ours[-quarter:]).mean()
    error = float(np.std([block.mean() for block in np.array_split(gaps, blocks)], ddof=1)) / math.sqrt(blocks)
    gap, half = float(gaps.mean()), t_quantile(1 - ALPHA, blocks - 1) * error
    return gap, (gap - half, gap + half)


def _shared(one: Series | None, other: Series | None) -> tuple[float, float] | None:
    """The range of steps common to both."""
    if one is None or other is None or not len(one.steps) or not len(other.steps):
        return None
    first, last = max(one.steps[0], other.steps[0]), min(one.steps[-1], other.steps[-1])
    return (float(first), float(last)) if first <= last else None


def _align(one: Series | None, other: Series | None) -> tuple[Floats, Floats, Floats]:
    """Both series at the steps of the shorter one, in the range where both are finite."""
    none = np.zeros(0)
    if one is None or other is None:
        return none, none, none
    one, other = (series.between(-math.inf, math.inf) for series in (one, other))
    shared = _shared(one, other)
    if shared is None:
        return none, none, none
    inside = [series.between(*shared).steps for series in (one, other)]
    steps = min((of for of in inside if len(of)), key=len)
    return steps, np.interp(steps, one.steps, one.values), np.interp(steps, other.steps, other.values)


def _smooth(values: Floats) -> Floats:
    """A trailing moving average over SMOOTH points, or a tenth of all."""
    if not len(values):
        return values
    window = min(SMOOTH, max(1, len(values) // 10))
    return np.convolve(values, np.ones(window))[: len(values)] / np.minimum(np.arange(1, len(values) + 1), window)


def _reduce(function: Callable[[Floats], Any], series: Series | None, steps: tuple[float, float] | None) -> float:
    """Applies a function to the finite values in a range of steps; NaN if there are none."""
    values = series.between(*steps).values if series is not None and steps is not None else ()
    return float(function(np.asarray(values))) if len(values) else math.nan


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _relative(reference: float, candidate: float) -> float:
    return (candidate - reference) / abs(reference) if reference else math.nan


def _percent(share: float) -> str:
    return f"{share:+.3%}" if math.isfinite(share) else "-"
