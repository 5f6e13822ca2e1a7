"""Paired runs: the reference and a candidate with the same seeds, data and initial weights, cached by content.

The cache key of a run is everything its numbers depend on (task and its file, options, recipe, seed, steps, versions,
machine). Repeating a validation, or adding seeds or another candidate, only trains the new runs. An interrupted run
resumes from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from narrowgauge import files, own_modules, tasks
from narrowgauge.data import cache, hub
from narrowgauge.errors import UsageError
from narrowgauge.hardware import Device
from narrowgauge.runs import record
from narrowgauge.runs.atomic_files import RESUME
from narrowgauge.runs.checkpoint_times import CheckpointTimes
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import read_versions, train
from narrowgauge.runs.trainer import Observer
from narrowgauge.task import Task
from narrowgauge.tasks.finetune_inputs import fingerprint_inputs

SMOOTH = 20
"""Steps over which curves are averaged before they are compared."""
EVALUATIONS = 3
"""Evaluations per run: the best of them is compared in addition to the last."""
TEMPORARY = {"checkpoint_every": 0, "log": "none"}
"""Settings of runs of which only the numbers are kept."""
FOLDERS = ("data", "tokenizer")
"""Options that may name a folder, all files of which count."""
REPEAT = "repeat the validation"
CHECKPOINT_S = 120.0
"""Runs that take longer than this write checkpoints at this interval, in case they are killed."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The task to train and its settings, without the recipe and the seed."""

    spec: str
    device: Device
    make: Callable[[int], Task] | None = None
    """Creates the task from a seed, if ``spec`` does not name it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the runs: steps, learning_rate, ..."""
    store: Path = Path("validations")
    """The folder of the cached runs."""

    def describe_content(self) -> dict[str, Any]:
        """Everything that the numbers depend on, except the settings of the run."""
        source = self.spec.rpartition(":")[0]
        text = _read_source(Path(source)) if source.endswith(".py") else ""
        versions = read_versions()
        if self.device.kind == "cuda":  # the host's threads only prepare data there
            del versions["threads"]
        known = {"task": self.spec, "file": text, "options": dict(self.options), "versions": versions}
        if imported := own_modules.list_own_files(Path(source)) if text else []:
            known["imports"] = {str(one): _read_source(one) for one in imported}
        if self.spec == tasks.FINETUNE:
            known["inputs"] = fingerprint_inputs(self.options)
        elif found := list_input_files(self.options):
            known["inputs"] = cache.fingerprint(found, "data")
        return known | {"device": self.device.name}


def list_input_files(options: Mapping[str, Any]) -> list[Path]:
    """List the files that a task's options name: those of its data, and any other option that is the path of a file.

    Args:
        options: The options. A dataset on a hub is known by its name only.
    """
    found = []
    for name, value in options.items():
        if not isinstance(value, str | Path):
            continue
        is_dataset = name == "data" and str(value).startswith(hub.PREFIX)
        path = hub.parse(str(value)).folder if is_dataset else Path(value)
        if path is not None and files.is_folder(path) and name in FOLDERS:
            found += sorted(one for one in path.rglob("*") if one.is_file())
        elif path is not None and files.is_file(path):
            found.append(path)
    return found


def _read_source(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class Run:
    """The numbers of a finished run that are compared."""

    loss: float
    """The last evaluation loss; NaN if the run diverged or stalled."""
    best: float
    """The lowest evaluation loss."""
    curve: tuple[float, ...]
    norms: tuple[float, ...]
    skipped: int
    seconds: float
    """Wall-clock time of the whole run."""
    fresh: bool
    """Whether the run was trained now instead of read from the cache."""
    conversion: str | None = None
    """What was multiplied in which format, in one line."""
    format_share: float | None = None
    """The share of multiplied parameters in the recipe's format; None in runs of earlier versions."""


class Interrupted(KeyboardInterrupt):
    """The user interrupted a run; its progress is saved."""


def make_task(experiment: Experiment, seed: int) -> Task:
    """Creates the task; the seed determines its data."""
    if experiment.make is not None:
        return experiment.make(seed)
    return tasks.find(experiment.spec, **experiment.options, seed=seed)


def get_run(experiment: Experiment, recipe: str, seed: int, observer: Observer | None = None) -> Run:
    """Reads the run of a recipe and a seed from the cache, or trains it.

    Raises:
        Interrupted: If the user interrupts the training.
    """
    task = dataclasses.replace(make_task(experiment, seed), sample=None)
    steps = int(experiment.settings.get("steps") or task.steps)
    given = {"seed": seed, "eval_every": max(1, -(-steps // EVALUATIONS)), **experiment.settings, **TEMPORARY}
    settings = make_settings(task, recipe=recipe, device=experiment.device.torch_device, **given)
    known = {name: value for name, value in vars(settings).items() if name != "predict"}  # it changes no number
    folder = experiment.store / hash_content({**experiment.describe_content(), "settings": known})
    done = _read_finished(folder)
    if done is not None:
        return done
    start = time.monotonic()
    with advise_to_repeat():
        result = train(
            task,
            settings,
            folder,
            resume=record.holds_run(folder),
            configuration={"task": experiment.spec},
            observer=observer or Observer(),
            times=CheckpointTimes(1, CHECKPOINT_S, at_end=False),
        )
    if result.interrupted:
        raise Interrupted
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # only the numbers are kept
    finished = _read_finished(folder)
    assert finished is not None
    return dataclasses.replace(finished, seconds=time.monotonic() - start, fresh=True)


@contextlib.contextmanager
def advise_to_repeat() -> Iterator[None]:
    """In errors of a run, replace the advice of ``train`` to resume it: a repeated validation does so by itself."""
    try:
        yield
    except UsageError as error:
        if RESUME not in str(error):
            raise
        raise UsageError(str(error).replace(f"train again or {RESUME}", REPEAT).replace(RESUME, REPEAT)) from error


def hash_content(content: Mapping[str, Any]) -> str:
    """A file name from the content that identifies a run."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _read_finished(folder: Path) -> Run | None:
    """Reads a finished run from the cache; None if there is none."""
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
        loss if whole else math.nan,
        best,
        tuple(curve),
        tuple(norms),
        end["skipped"],
        end["seconds"],
        fresh=False,
        conversion=end.get("conversion"),
        format_share=end.get("format_share"),
    )


def compare_runs(reference: Sequence[Run], candidate: Sequence[Run]) -> dict[str, Any]:
    """Compares paired runs in everything but the final loss: best loss, curves, gradient norms, skipped updates."""
    area, largest, where = measure_curve_gap(reference, candidate)
    norms = [statistics.median([n for one in runs for n in one.norms] or [math.nan]) for runs in (reference, candidate)]
    pairs = [(r.best, c.best) for r, c in zip(reference, candidate, strict=True) if math.isfinite(r.best - c.best)]
    level = abs(statistics.fmean(r for r, _ in pairs)) if pairs else 0.0
    best = statistics.fmean(c - r for r, c in pairs) / level if level else math.nan
    return {
        "best_gap": best,
        "curve_gap_mean": area,
        "curve_gap_largest": largest,
        "curve_gap_step": where,
        "grad_norm_ratio": norms[1] / norms[0] if norms[0] else math.nan,
        "skipped": sum(one.skipped for one in candidate),
        "skipped_reference": sum(one.skipped for one in reference),
    }


def measure_noise_band(losses: Sequence[float]) -> float | None:
    """The standard deviation of the reference's losses over seeds, relative to their mean."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.stdev(finite) / abs(statistics.fmean(finite)) if len(finite) > 1 and any(finite) else None


def measure_curve_gap(reference: Sequence[Run], candidate: Sequence[Run]) -> tuple[float, float, int | None]:
    """The mean gap between the smoothed mean curves, the largest gap, and its step; relative to the reference."""
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
