"""Chooses the length of validation runs without ``--steps``: the task's own length, or less to fit the time budget.

A pilot run of the reference measures the time of an update and the overhead of a run: building, compiling, evaluating.
The length is the longest in a fixed list with which the first pairs fit into most of the budget. The choice is cached
with the runs, so that repeating a validation uses the same runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import train
from narrowgauge.runs.trainer import Observer
from narrowgauge.task import Task
from narrowgauge.validate.curves.paired_runs import EVALUATIONS, TEMPORARY, Experiment, hash_content, make_task
from narrowgauge.validate.statistics.sequential_test import FIRST

LENGTHS = (20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200, 4800)
SHARE = 0.85
"""The share of the budget for the first pairs; the rest is for more pairs if the noise is high."""
LEAST_RATE = 0.25
"""The smallest factor by which the learning rate of shorter runs is reduced."""
_UPDATES = 4
_QUICK_S = 0.25
"""Updates faster than this are timed again over more updates: the first ones are slow, above all on a GPU."""
_SECOND_S = 3.0
_MOST_UPDATES = 100


@dataclass(frozen=True)
class Pilot:
    """The measured times of a pilot run."""

    update_s: float
    overhead_s: float
    """Seconds of the run outside its updates."""
    evaluations: float
    """The cost of evaluations that is not part of ``overhead_s``, in updates."""

    def updates_within(self, seconds: float) -> float:
        """The number of updates of a run that takes this long."""
        return (seconds - self.overhead_s) / max(self.update_s, 1e-6) - self.evaluations


def choose_learning_rate(task: Task, steps: int, tell: Callable[[str], None]) -> float | None:
    """The peak learning rate for runs shorter than the task's own, reduced in proportion; None for the task's own.

    At the full rate a short run ends while the loss is still unstable, and instability separates two runs whatever
    their formats.
    """
    if steps >= task.steps:
        return None
    rate = task.learning_rate * max(LEAST_RATE, steps / task.steps)
    tell(f"the task's {task.steps} updates exceed the budget; the shorter runs use a peak learning rate of {rate:.3g}")
    return rate


def choose_steps(
    experiment: Experiment,
    recipe: str,
    given: Mapping[str, Any],
    recipes: int,
    left_s: float,
    budget_s: float,
    tell: Callable[[str], None],
) -> tuple[int, float]:
    """Chooses the number of updates per run.

    Args:
        experiment: The task and its settings.
        recipe: The recipe of the pilot run.
        given: Settings of the runs that are already fixed.
        recipes: The number of recipes to train, including the reference.
        left_s: Seconds left in the budget.
        budget_s: The whole budget, which is part of the cache key.
        tell: Called with a line of progress.

    Returns:
        The number of updates, and the seconds per update.
    """
    task = make_task(experiment, 0)
    key = {**experiment.describe_content(), "contestants": recipes, "budget": budget_s}
    cached = experiment.store / f"length-{hash_content(key)}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(cached.read_text())
        return int(known["steps"]), float(known["update_s"])
    start = time.monotonic()
    pilot = _run_pilot(experiment, task, recipe, given)
    room = pilot.updates_within(SHARE * (left_s - (time.monotonic() - start)) / (FIRST * recipes))
    fitting = [length for length in LENGTHS if length <= room]
    steps = min(task.steps, fitting[-1] if fitting else LENGTHS[0])
    tell(
        f"an update takes {pilot.update_s:.3g} s, and a run has {pilot.overhead_s:.3g} s of overhead: training runs of "
        f"{steps} updates ({FIRST} pairs first, budget {budget_s / 60:g} minutes)"
    )
    with contextlib.suppress(OSError):
        experiment.store.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps({"steps": steps, "update_s": pilot.update_s}))
    return steps, pilot.update_s


def _run_pilot(experiment: Experiment, task: Task, recipe: str, given: Mapping[str, Any]) -> Pilot:
    first = _time_run(experiment, task, recipe, {**given, "steps": _UPDATES, "eval_every": 0, "eval_batches": 1})
    if first.update_s >= _QUICK_S:
        return dataclasses.replace(
            first, evaluations=EVALUATIONS * task.eval_batches / 3
        )  # a forward pass is a third of an update
    updates = min(_MOST_UPDATES, max(2 * _UPDATES, int(_SECOND_S / max(first.update_s, 1e-6))))
    return _time_run(experiment, task, recipe, {**given, "steps": updates, "eval_every": -(-updates // EVALUATIONS)})


def _time_run(experiment: Experiment, task: Task, recipe: str, given: Mapping[str, Any]) -> Pilot:
    """Times a short run. The rate reported by a run is that of its steady updates, without evaluations."""
    settings = make_settings(task, recipe=recipe, device=experiment.device.torch_device, **given, **TEMPORARY)
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        result = train(dataclasses.replace(task, sample=None), settings, Path(folder) / "pilot", observer=Observer())
        whole_s = time.monotonic() - start
    update_s = task.items_per_batch / result.tokens_per_s if result.tokens_per_s else whole_s / settings.steps
    return Pilot(update_s, max(0.0, whole_s - settings.steps * update_s), 0.0)
