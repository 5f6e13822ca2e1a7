"""Compares finished runs of other tools by their logs, pair by pair, and puts them to the verdict.

Folders of runs are judged as a validation's own pairs are: on the last evaluation, or where not all were evaluated on
the end of the training loss. One pair alone is never called equivalent: how its losses differ from step to step says
nothing of how they would differ from seed to seed.
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
from narrowgauge.validate.curves.external_logs import Curves, Series, natural, read, read_all
from narrowgauge.validate.statistics.t_distribution import t_quantile
from narrowgauge.validate.statistics.verdict import ALPHA, Verdict, judge

__all__ = ["Comparison", "Curves", "Pair", "Series", "compare", "pair", "read", "read_all"]

SMOOTH = 20
"""Points over which curves are averaged before they are compared, where there are ten times as many."""
LEAST, BLOCKS = 10, 10
"""Points that stand for the end of a training loss, at least; and blocks of steps that its noise is taken from."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs over the steps they share; of two numbers the first is the reference's, what is not there is NaN."""

    name: str
    final: tuple[float, float]
    """Of what the comparison says it is about; NaN for a run that diverged."""
    best: tuple[float, float]
    """Of the evaluations."""
    area: float
    """Between the smoothed curves, by size; relative to the reference's, as all gaps."""
    gap_mean: float
    """The same with its sign."""
    gap_largest: float
    """Between the smoothed curves."""
    gap_largest_step: float
    grad_norm_ratio: float
    """Of the medians."""
    skipped: tuple[int | None, int | None]
    diverged: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two sets of runs show."""

    what: str
    """What the verdict is about."""
    verdict: Verdict
    pairs: list[Pair]
    overall: Pair
    """Means over the pairs; the largest gap of all; skips and diverged runs in all."""
    block_gap: float | None
    """Of a single pair: the mean gap of the training loss over its last quarter,"""
    block_interval: tuple[float, float] | None
    """and how well the noise between blocks of steps lets it be known. It does not hold the noise between seeds."""
    notes: list[str]
    sources: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the verdict's numbers beside the comparison's own."""
        verdict = self.verdict
        more = {"seeds_needed": verdict.seeds_needed, "detectable": verdict.detectable}
        more |= {"diverged_reference": verdict.diverged[0], "diverged": verdict.diverged[1]}
        result: dict[str, Any] = replace_nonfinite(asdict(self) | asdict(verdict) | more)
        return result

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows for a terminal."""
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


def pair(references: Sequence[Curves], candidates: Sequence[Curves]) -> list[tuple[Curves, Curves]]:
    """Runs of one name; where all names differ, by their order."""
    names = [[run.name for run in runs] for runs in (references, candidates)]
    shared, told = set(names[0]) & set(names[1]), " against ".join(", ".join(of) or "none" for of in names)
    if len(references) != len(candidates) or not references:
        raise UsageError(f"as many runs of the reference as of the candidate are needed, got {told}")
    if set(names[0]) == set(names[1]) == shared and len(shared) == len(references):
        by_name = {run.name: run for run in candidates}
        return [(run, by_name[run.name]) for run in references]
    if shared and len(shared) < len(references) and len(set(names[0])) == len(references):
        raise UsageError(f"only some names of runs agree, which leaves the others without a partner: {told}")
    orders = (sorted(runs, key=lambda run: natural(run.name)) for runs in (references, candidates))
    return list(zip(*orders, strict=True))


@np.errstate(all="ignore")
def compare(references: Sequence[Curves], candidates: Sequence[Curves], margin: float = 0.005) -> Comparison:
    """The verdict on the candidate's runs."""
    paired = pair(references, candidates)
    ends = [max(run.loss.steps[-1] for run in runs) for runs in (references, candidates)]
    lost = [(_gave_up(r, c, ends[0]), _gave_up(c, r, ends[1])) for r, c in paired]
    whole = [runs for runs, gone in zip(paired, lost, strict=True) if not any(gone)] or paired
    evaluated = all(_shared(r.eval, c.eval) is not None for r, c in whole)
    what = "the final evaluation loss" if evaluated else "the mean of the last tenth of the training loss"
    notes = [note for r, c in paired for note in _notes(r, c, evaluated)]
    notes += [
        f"{run.name} of the {who} stopped at step {run.loss.steps[-1]:g}: counted as diverged"
        for runs, gone in zip(paired, lost, strict=True)
        for run, is_gone, who in zip(runs, gone, ("reference", "candidate"), strict=True)
        if is_gone and not run.diverged
    ]
    pairs = [_measure(r, c, evaluated, gone) for (r, c), gone in zip(paired, lost, strict=True)]
    verdict = judge([one.final[0] for one in pairs], [one.final[1] for one in pairs], margin)
    block_gap, interval = None, None
    if len(pairs) == 1 and not any(pairs[0].diverged):
        block_gap, interval = _blocks(*paired[0])
        gap = _relative(*pairs[0].final)
        reason = f"one pair has no spread between seeds, so nothing is shown: {what} differs by {gap:+.3%}"
        if interval is not None:
            reason += (
                f"; over the last quarter the training loss differs by {block_gap:+.3%}, by the noise from step to"
            )
            reason += f" step alone between {interval[0]:+.3%} and {interval[1]:+.3%}"
        verdict = replace(verdict, gap=gap, reason=reason)
    return Comparison(
        what=what,
        verdict=verdict,
        pairs=pairs,
        overall=_overall(pairs),
        block_gap=block_gap,
        block_interval=interval,
        notes=notes,
        sources=[run.source for runs in paired for run in runs],
    )


def _gave_up(run: Curves, partner: Curves, end: float) -> bool:
    """Whether a run diverged, or stopped half-way where its partner and others of its kind went on."""
    return run.diverged or bool(2 * run.loss.steps[-1] < min(partner.loss.steps[-1], end))


def _notes(r: Curves, c: Curves, evaluated: bool) -> Iterator[str]:
    """What a reader has to know about how a pair was compared."""
    shared = _shared(r.loss, c.loss)
    if shared is None:
        spans = " and ".join(f"{run.loss.steps[0]:g} to {run.loss.steps[-1]:g} of {run.name}" for run in (r, c))
        raise UsageError(f"the runs have no steps in common: {spans}")
    if (r.loss.by == "epoch") != (c.loss.by == "epoch"):
        raise UsageError(f"steps cannot be held against epochs: {r.source}; {c.source}")
    if r.name != c.name:
        yield f"{r.name} is held against {c.name}"
    for who, run in (("reference", r), ("candidate", c)):
        if run.loss.steps[-1] > shared[1]:
            yield f"{r.name}: compared up to step {shared[1]:g}, though the {who} goes on to {run.loss.steps[-1]:g}"
    for ours, theirs in ((r.loss, c.loss), (r.eval, c.eval)):
        if ours is not None and theirs is not None and ours.tag != theirs.tag:
            yield f"{r.name}: {ours.tag!r} is held against {theirs.tag!r}"
    at = _aligned(r.eval, c.eval)[0]
    if evaluated and len(at) and at[-1] < shared[1]:
        yield f"{r.name}: the last evaluation to compare is at step {at[-1]:g}"


def _measure(r: Curves, c: Curves, evaluated: bool, diverged: tuple[bool, bool]) -> Pair:
    first, last = _shared(r.loss, c.loss) or (math.nan, math.nan)
    steps, ours, theirs = _aligned(r.loss, c.loss)
    if evaluated:
        final = [float(values[-1]) if len(values) else math.nan for values in _aligned(r.eval, c.eval)[1:]]
    else:
        count = min(len(steps), max(LEAST, len(steps) // 10))
        start = steps[-count] if count else last - (last - first) / 10
        final = [_over(np.mean, run.loss, (start, last)) for run in (r, c)]
    evaluations = _shared(r.eval, c.eval)
    norms = [_over(np.median, run.grad_norm, (first, last)) for run in (r, c)]
    return Pair(
        name=r.name,
        final=(math.nan if diverged[0] else final[0], math.nan if diverged[1] else final[1]),
        best=(_over(np.min, r.eval, evaluations), _over(np.min, c.eval, evaluations)),
        **_gaps(steps, _smooth(ours), _smooth(theirs)),
        grad_norm_ratio=norms[1] / norms[0] if norms[0] else math.nan,
        skipped=(r.skipped, c.skipped),
        diverged=(int(diverged[0]), int(diverged[1])),
    )


def _gaps(steps: Floats, ours: Floats, theirs: Floats) -> dict[str, float]:
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


def _overall(pairs: Sequence[Pair]) -> Pair:
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


def _blocks(r: Curves, c: Curves) -> tuple[float, tuple[float, float]] | tuple[None, None]:
    """The mean gap of the training loss over the last quarter, and its interval by the means of blocks of steps."""
    _, ours, theirs = _aligned(r.loss, c.loss)
    quarter = len(ours) // 4
    blocks = min(BLOCKS, quarter // 2)
    if blocks < 2 or r.loss is r.eval or not ours[-quarter:].any():
        return None, None
    gaps = (theirs - ours)[-quarter:] / abs(ours[-quarter:]).mean()
    error = float(np.std([block.mean() for block in np.array_split(gaps, blocks)], ddof=1)) / math.sqrt(blocks)
    gap, half = float(gaps.mean()), t_quantile(1 - ALPHA, blocks - 1) * error
    return gap, (gap - half, gap + half)


def _shared(one: Series | None, other: Series | None) -> tuple[float, float] | None:
    """The range of steps that both have."""
    if one is None or other is None or not len(one.steps) or not len(other.steps):
        return None
    first, last = max(one.steps[0], other.steps[0]), min(one.steps[-1], other.steps[-1])
    return (float(first), float(last)) if first <= last else None


def _aligned(one: Series | None, other: Series | None) -> tuple[Floats, Floats, Floats]:
    """Both at the steps of the one with fewer, in the range where both are finite."""
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
    """Each with those before it, as many as SMOOTH or a tenth of all."""
    if not len(values):
        return values
    window = min(SMOOTH, max(1, len(values) // 10))
    return np.convolve(values, np.ones(window))[: len(values)] / np.minimum(np.arange(1, len(values) + 1), window)


def _over(function: Callable[[Floats], Any], series: Series | None, steps: tuple[float, float] | None) -> float:
    """Of the finite values in this range."""
    values = series.between(*steps).values if series is not None and steps is not None else ()
    return float(function(np.asarray(values))) if len(values) else math.nan


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _relative(reference: float, candidate: float) -> float:
    return (candidate - reference) / abs(reference) if reference else math.nan


def _percent(share: float) -> str:
    return f"{share:+.3%}" if math.isfinite(share) else "-"
