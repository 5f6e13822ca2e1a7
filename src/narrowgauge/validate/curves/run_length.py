"""How long the runs of a validation are, where nobody said: the task's own length, or what the time allows.

Some updates of the reference are timed, and what a run costs beside them: building, compiling, evaluating. Then the
longest run of a short list is taken with which the first pairs fit into most of the budget. The choice is kept with the
runs, so that asking again asks for the same ones.
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
from narrowgauge.validate.curves.paired_runs import EVALUATIONS, PASSING, Question, digest, make_task
from narrowgauge.validate.statistics.sample_size import FIRST

LENGTHS = (20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200, 4800)
SHARE = 0.85
"""Of the budget that the first pairs may take: noise may ask for more."""
LEAST_RATE = 0.25
_UPDATES = 4
_QUICK_S = 0.25
"""Updates that take less are timed again by more of them: the first few of a process are slow, above all on a GPU."""
_SECOND_S = 3.0
_MOST_UPDATES = 100


@dataclass(frozen=True)
class Pilot:
    """What a short run cost."""

    update_s: float
    beside_s: float
    """All but its updates."""
    evaluations: float
    """Of a run, that are not in ``beside_s``, in updates."""

    def updates_in(self, seconds: float) -> float:
        """Of a run that may take so long."""
        return (seconds - self.beside_s) / max(self.update_s, 1e-6) - self.evaluations


def rate_for(task: Task, steps: int, tell: Callable[[str], None]) -> float | None:
    """The peak learning rate of runs that are shorter than the task's own: lower in proportion; None: the task's.

    A short run at the full rate ends where the loss still jumps, and a jump parts two runs whatever their formats.
    """
    if steps >= task.steps:
        return None
    rate = task.learning_rate * max(LEAST_RATE, steps / task.steps)
    tell(f"the task's own {task.steps} updates would take longer; for fewer, the peak learning rate is {rate:.3g}")
    return rate


def choose_steps(
    question: Question,
    recipe: str,
    given: Mapping[str, Any],
    contestants: int,
    left_s: float,
    budget_s: float,
    tell: Callable[[str], None],
) -> tuple[int, float]:
    """Updates of a run, and the seconds of one; of the budget so much is left."""
    task = make_task(question, 0)
    kept = question.store / f"length-{digest({**question.content(), 'contestants': contestants, 'budget': budget_s})}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(kept.read_text())
        return int(known["steps"]), float(known["update_s"])
    start = time.monotonic()
    pilot = _fly(question, task, recipe, given)
    room = pilot.updates_in(SHARE * (left_s - (time.monotonic() - start)) / (FIRST * contestants))
    fitting = [length for length in LENGTHS if length <= room]
    steps = min(task.steps, fitting[-1] if fitting else LENGTHS[0])
    tell(
        f"an update takes {pilot.update_s:.3g} s, and a run {pilot.beside_s:.3g} s beside: runs of {steps} updates "
        f"({FIRST} pairs first, {budget_s / 60:g} minutes)"
    )
    with contextlib.suppress(OSError):
        question.store.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"steps": steps, "update_s": pilot.update_s}))
    return steps, pilot.update_s


def _fly(question: Question, task: Task, recipe: str, given: Mapping[str, Any]) -> Pilot:
    first = _time(question, task, recipe, {**given, "steps": _UPDATES, "eval_every": 0, "eval_batches": 1})
    if first.update_s >= _QUICK_S:
        return dataclasses.replace(first, evaluations=EVALUATIONS * task.eval_batches / 3)  # forward: a third of one
    updates = min(_MOST_UPDATES, max(2 * _UPDATES, int(_SECOND_S / max(first.update_s, 1e-6))))
    return _time(question, task, recipe, {**given, "steps": updates, "eval_every": -(-updates // EVALUATIONS)})


def _time(question: Question, task: Task, recipe: str, given: Mapping[str, Any]) -> Pilot:
    """Train for a little. A run's own rate is that of its steady updates, without evaluations."""
    settings = make_settings(task, recipe=recipe, device=question.device.torch_device, **given, **PASSING)
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        result = train(dataclasses.replace(task, sample=None), settings, Path(folder) / "pilot", observer=Observer())
        whole_s = time.monotonic() - start
    update_s = task.items_per_batch / result.tokens_per_s if result.tokens_per_s else whole_s / settings.steps
    return Pilot(update_s, max(0.0, whole_s - settings.steps * update_s), 0.0)
