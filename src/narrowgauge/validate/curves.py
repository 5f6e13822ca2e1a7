"""Paired runs: the reference and a candidate from the same seeds, data and initial weights, kept by what they are.

A run is named by everything its numbers depend on (task and its file, options, recipe, seed, steps, versions, machine),
so that a validation that is asked again, or asked for more seeds or another candidate, only does what is new; one that
was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge import tasks
from narrowgauge.hardware import Device
from narrowgauge.runs import record
from narrowgauge.runs.life import Observer
from narrowgauge.runs.loop import train, versions
from narrowgauge.runs.settings import settle

SMOOTH = 20
"""Steps over which curves are averaged before they are compared."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is trained, apart from recipe and seed."""

    spec: str
    device: Device
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the task."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """For the run: steps, learning_rate, ..."""
    store: Path = Path("validations")


@dataclass(frozen=True)
class Run:
    """A finished run, as far as it is compared."""

    loss: float
    """The last evaluation's; NaN where the run diverged or stalled."""
    curve: tuple[float, ...]
    skipped: int
    seconds: float
    fresh: bool
    """Whether it was trained now."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a run; what was trained is kept."""


def run(question: Question, recipe: str, seed: int) -> Run:
    """The run of a recipe and a seed: from the store, or trained now."""
    own_seed = {} if ".py:" in question.spec else {"seed": seed}
    task = tasks.find(question.spec, **question.options, **own_seed)
    settings = settle(
        task, recipe=recipe, device=question.device.torch_device, seed=seed, eval_every=0, **question.settings
    )
    folder = question.store / _name(question, settings.__dict__)
    done = _finished(folder)
    if done is not None:
        return done
    going_on = record.holds_run(folder)
    result = train(task, settings, folder, resume=going_on, configuration={"task": question.spec}, observer=Observer())
    if result.interrupted:
        raise Interrupted
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the numbers are what is kept
    finished = _finished(folder, fresh=True)
    assert finished is not None
    return finished


def _name(question: Question, settings: Mapping[str, Any]) -> str:
    source = question.spec.rpartition(":")[0]
    text = Path(source).read_text() if source.endswith(".py") else ""
    known = {"task": question.spec, "file": text, "options": dict(question.options), "settings": dict(settings)}
    known |= {"versions": versions(), "device": question.device.name}
    digest = hashlib.blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=12)
    return digest.hexdigest()


def _finished(folder: Path, fresh: bool = False) -> Run | None:
    """A run in the store that has come to its end."""
    if not record.holds_run(folder):
        return None
    curve, end = [], None
    for event in record.read(folder):
        if event["kind"] == "step":
            curve.append(float(event["loss"]))
        elif event["kind"] == "end" and not event["interrupted"]:
            end = event
    if end is None:
        return None
    loss = end["loss_eval"]
    whole = end["step"] >= end["steps"] and loss is not None and math.isfinite(float(loss))
    return Run(float(loss) if whole else math.nan, tuple(curve), end["skipped"], end["seconds"], fresh)


def largest_gap(reference: Sequence[Run], candidate: Sequence[Run]) -> tuple[float, float]:
    """Between the mean curves, smoothed: the mean gap and the largest, relative to the reference."""
    means = []
    for runs in (reference, candidate):
        length = min(len(one.curve) for one in runs)
        mean = [statistics.fmean(one.curve[i] for one in runs) for i in range(length)]
        means.append([statistics.fmean(mean[max(0, i - SMOOTH + 1) : i + 1]) for i in range(length)])
    gaps = [(c - r) / abs(r) for r, c in zip(*means, strict=False) if r and math.isfinite(r) and math.isfinite(c)]
    return (statistics.fmean(gaps), max(gaps, key=abs)) if gaps else (math.nan, math.nan)
