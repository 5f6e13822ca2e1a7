"""Chooses the length of validation runs without ``--steps``: the task's own length, or less to fit the time budget.

A pilot run of every recipe measures the time of an update and the overhead of a run: building, compiling, evaluating.
FP8 that is emulated on a CPU takes longer than FP32, so the reference alone would say too little. The length
is the longest in a fixed list with which the first pairs fit into most of the budget. The choice is cached
with the runs, so that repeating a validation uses the same runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.runs.checkpoint_times import CheckpointTimes
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import train
from narrowgauge.task import Task
from narrowgauge.validate.curves.paired_runs import (
    EVALUATIONS,
    TEMPORARY,
    Experiment,
    advise_to_repeat,
    hash_content,
    make_task,
)

LENGTHS = (10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200, 4800)
SHARE = 0.85
"""The share of the budget for the first pairs; the rest is for more pairs if the noise is high."""
LEAST_RATE = 0.25
"""The smallest factor by which the learning rate of shorter runs is reduced."""
_UPDATES = 4
_QUICK_S = 0.25
"""Updates faster than this are timed again over more updates: the first ones are slow, above all on a GPU."""
_SECOND_S = 3.0
_SECOND_SHARE = 0.02
"""The most that timing a recipe again takes, in seconds and of the budget."""
_MOST_UPDATES = 100


@dataclass(frozen=True)
class Pilot:
    """The measured times of a pilot run."""

    update_s: float
    overhead_s: float
    """Seconds of the run outside its updates."""
    evaluations: float
    """The cost of evaluations that is not part of ``overhead_s``, in updates."""

    def seconds_for(self, updates: int) -> float:
        """The time of a run of so many updates."""
        return self.overhead_s + (updates + self.evaluations) * self.update_s


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
    experiments: Sequence[tuple[str, str, Experiment]],
    given: Mapping[str, Any],
    pairs: int,
    left_s: float,
    budget_s: float,
    tell: Callable[[str], None],
) -> int:
    """Chooses the number of updates per run.

    Args:
        experiments: Name, recipe and experiment of the reference and of each candidate.
        given: Settings of the runs that are already fixed.
        pairs: The number of pairs that have to fit.
        left_s: Seconds left in the budget.
        budget_s: The whole budget, which is part of the cache key.
        tell: Called with a line of progress.

    Returns:
        The number of updates.
    """
    start = time.monotonic()
    experiment = experiments[0][2]
    task = make_task(experiment, 0)
    who = [f"{recipe} {one.spec}" for _, recipe, one in experiments]
    key = {**experiment.describe_content(), "contestants": who, "budget": budget_s, "pairs": pairs}
    key["optimizer"] = given.get("optimizer")  # updates of another one take another time
    cached = experiment.store / f"length-{hash_content(key)}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(cached.read_text())
        return int(known["steps"])
    second_s = min(_SECOND_S, _SECOND_SHARE * budget_s)
    pilots = [_run_pilot(one, make_task(one, 0), recipe, given, second_s) for _, recipe, one in experiments]
    room_s = SHARE * (left_s - (time.monotonic() - start))

    def predict_s(updates: int) -> float:
        return pairs * sum(pilot.seconds_for(updates) for pilot in pilots)

    fitting = [length for length in LENGTHS if predict_s(length) <= room_s]
    steps = min(task.steps, fitting[-1] if fitting else LENGTHS[0])
    times = ", ".join(f"{name} {pilot.update_s:.3g} s" for (name, _, _), pilot in zip(experiments, pilots, strict=True))
    tell(
        f"an update takes {times}; a run has up to {max(pilot.overhead_s for pilot in pilots):.3g} s of overhead: "
        f"training runs of {steps} updates, {pairs} {'pair' if pairs == 1 else 'pairs'} first, about "
        f"{predict_s(steps) / 60:.2g} minutes (budget {budget_s / 60:g})"
    )
    if predict_s(steps) > room_s / SHARE:
        tell(f"  even runs of {steps} updates exceed the budget: a longer --budget or fewer --candidates would help")
    with contextlib.suppress(OSError):
        experiment.store.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps({"steps": steps}))
    return steps


def _run_pilot(experiment: Experiment, task: Task, recipe: str, given: Mapping[str, Any], second_s: float) -> Pilot:
    first = _time_run(experiment, task, recipe, {**given, "steps": _UPDATES, "eval_every": 0, "eval_batches": 1})
    if first.update_s >= _QUICK_S or second_s < 2 * _UPDATES * first.update_s:
        return dataclasses.replace(
            first, evaluations=EVALUATIONS * task.eval_batches / 3
        )  # a forward pass is a third of an update
    updates = min(_MOST_UPDATES, max(2 * _UPDATES, int(second_s / max(first.update_s, 1e-6))))
    return _time_run(experiment, task, recipe, {**given, "steps": updates, "eval_every": -(-updates // EVALUATIONS)})


def _time_run(experiment: Experiment, task: Task, recipe: str, given: Mapping[str, Any]) -> Pilot:
    """Times a short run. The rate reported by a run is that of its steady updates, without evaluations."""
    settings = make_settings(task, recipe=recipe, device=experiment.device.torch_device, **given, **TEMPORARY)
    with tempfile.TemporaryDirectory() as folder, advise_to_repeat():
        start = time.monotonic()
        result = train(
            dataclasses.replace(task, sample=None),
            settings,
            Path(folder) / "pilot",
            times=CheckpointTimes(0, at_end=False),
        )
        whole_s = time.monotonic() - start
    update_s = task.items_per_batch / result.tokens_per_s if result.tokens_per_s else whole_s / settings.steps
    return Pilot(update_s, max(0.0, whole_s - settings.steps * update_s), 0.0)
