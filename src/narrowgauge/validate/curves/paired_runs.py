"""Paired runs: the reference and a candidate from the same seeds, data and initial weights, kept by what they are.

A run is named by everything its numbers depend on (task and its file, options, recipe, seed, steps, versions, machine),
so that a validation that is asked again, or asked for more seeds or another candidate, only does what is new; one that
was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from narrowgauge import tasks
from narrowgauge.hardware import Device
from narrowgauge.runs import record
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import read_versions, train
from narrowgauge.runs.trainer import Observer
from narrowgauge.task import Task

SMOOTH = 20
"""Steps over which curves are averaged before they are compared."""
EVALUATIONS = 3
"""In a run: the best of them is compared beside the last."""
PASSING = {"checkpoint_every": 0, "log": "none"}
"""Settings of runs that are not kept but for their numbers."""
_AT_RISK_S = 120.0
"""Runs that take longer write checkpoints on the way, as often."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is trained, apart from recipe and seed."""

    spec: str
    device: Device
    make: Callable[[int], Task] | None = None
    """Makes the task from a seed, where ``spec`` does not name it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the task."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """For the run: steps, learning_rate, ..."""
    store: Path = Path("validations")
    update_s: float | None = None
    """Seconds of an update, where they are known."""

    def content(self) -> dict[str, Any]:
        """Everything that numbers depend on, but for the run's own settings."""
        source = self.spec.rpartition(":")[0]
        text = Path(source).read_text() if source.endswith(".py") else ""
        known = {"task": self.spec, "file": text, "options": dict(self.options), "versions": read_versions()}
        return known | {"device": self.device.name}


@dataclass(frozen=True)
class Run:
    """A finished run, as far as it is compared."""

    loss: float
    """The last evaluation's; NaN where the run diverged or stalled."""
    best: float
    """The lowest evaluation's."""
    curve: tuple[float, ...]
    norms: tuple[float, ...]
    skipped: int
    seconds: float
    """From end to end, where it was trained now."""
    fresh: bool
    """Whether it was trained now."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a run; what was trained is kept."""


def make_task(question: Question, seed: int) -> Task:
    """The task, with data by the seed where it knows one."""
    if question.make is not None:
        return question.make(seed)
    return tasks.find(question.spec, **question.options, seed=seed)


def run(question: Question, recipe: str, seed: int, observer: Observer | None = None) -> Run:
    """The run of a recipe and a seed: from the store, or trained now."""
    task = dataclasses.replace(make_task(question, seed), sample=None)
    steps = int(question.settings.get("steps") or task.steps)
    given = {"seed": seed, "eval_every": max(1, -(-steps // EVALUATIONS)), **question.settings, **PASSING}
    settings = make_settings(task, recipe=recipe, device=question.device.torch_device, **given)
    folder = question.store / digest({**question.content(), "settings": settings.__dict__})
    done = _finished(folder)
    if done is not None:
        return done
    start = time.monotonic()
    result = train(
        task,
        dataclasses.replace(settings, checkpoint_every=_checkpoint_every(steps, question.update_s)),
        folder,
        resume=record.holds_run(folder),
        configuration={"task": question.spec},
        observer=observer or Observer(),
    )
    if result.interrupted:
        raise Interrupted
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the numbers are what is kept
    finished = _finished(folder)
    assert finished is not None
    return dataclasses.replace(finished, seconds=time.monotonic() - start, fresh=True)


def _checkpoint_every(steps: int, update_s: float | None) -> int:
    """Whoever interrupts a run has its state saved; these are for runs that are killed."""
    if update_s is None:
        return max(1, steps // 4)
    return 0 if steps * update_s < _AT_RISK_S else max(1, round(_AT_RISK_S / update_s))


def digest(known: Mapping[str, Any]) -> str:
    """A name for what is known of a run."""
    return hashlib.blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _finished(folder: Path) -> Run | None:
    """A run in the store that has come to its end."""
    if not record.holds_run(folder):
        return None
    curve, norms, evaluations, end = [], [], [math.inf], None
    for event in record.read(folder):
        if event["kind"] == "step":
            curve.append(float(event["loss"]))
            norms.append(float(event["grad_norm"]))
        elif event["kind"] == "eval":
            evaluations.append(float(event["loss"]))
        elif event["kind"] == "end" and not event["interrupted"]:
            end = event
    if end is None:
        return None
    loss = float(end["loss_eval"]) if end["loss_eval"] is not None else math.nan
    whole = end["step"] >= end["steps"] and math.isfinite(loss)
    best = min([loss, *(value for value in evaluations if math.isfinite(value))]) if whole else math.nan
    return Run(
        loss if whole else math.nan, best, tuple(curve), tuple(norms), end["skipped"], end["seconds"], fresh=False
    )


def compare(reference: Sequence[Run], candidate: Sequence[Run]) -> dict[str, Any]:
    """What else two sets of paired runs differ in, beside the final loss."""
    area, largest, where = curve_gap(reference, candidate)
    norms = [statistics.median([n for one in runs for n in one.norms] or [math.nan]) for runs in (reference, candidate)]
    pairs = [(r.best, c.best) for r, c in zip(reference, candidate, strict=True) if math.isfinite(r.best - c.best)]
    best = statistics.fmean(c / r - 1 for r, c in pairs if r) if pairs else math.nan
    return {
        "best_gap": best,
        "curve_gap_mean": area,
        "curve_gap_largest": largest,
        "curve_gap_step": where,
        "grad_norm_ratio": norms[1] / norms[0] if norms[0] else math.nan,
        "skipped": sum(one.skipped for one in candidate),
        "skipped_reference": sum(one.skipped for one in reference),
    }


def band(losses: Sequence[float]) -> float | None:
    """How far apart the reference's own runs are: the standard deviation over seeds, relative to their mean."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.stdev(finite) / abs(statistics.fmean(finite)) if len(finite) > 1 and any(finite) else None


def curve_gap(reference: Sequence[Run], candidate: Sequence[Run]) -> tuple[float, float, int | None]:
    """Between the mean curves, smoothed: the mean gap, the largest, and its step; relative to the reference."""
    smooth = []
    for runs in (reference, candidate):
        length = min(len(one.curve) for one in runs)
        mean = [statistics.fmean(one.curve[i] for one in runs) for i in range(length)]
        sums = [0.0, *accumulate(mean)]
        smooth.append([(sums[i + 1] - sums[max(0, i + 1 - SMOOTH)]) / min(i + 1, SMOOTH) for i in range(length)])
    gaps = {
        index + 1: (c - r) / abs(r)
        for index, (r, c) in enumerate(zip(*smooth, strict=False))
        if r and math.isfinite(r) and math.isfinite(c)
    }
    if not gaps:
        return math.nan, math.nan, None
    where = max(gaps, key=lambda step: abs(gaps[step]))
    return statistics.fmean(gaps.values()), gaps[where], where
