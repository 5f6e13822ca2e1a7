"""How long the runs of a validation are, where nobody said: the task's own length, or what the time allows.

A few updates of the reference are timed, and the longest run of a short list taken with which the first pairs fit into
most of the budget. The choice is kept with the runs, so that asking again asks for the same ones.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.runs import record
from narrowgauge.runs.life import Observer
from narrowgauge.runs.loop import train
from narrowgauge.runs.settings import settle
from narrowgauge.task import Task
from narrowgauge.validate.curves import EVALUATIONS, Question, digest, make_task
from narrowgauge.validate.inquiry import FIRST

LENGTHS = (20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200, 4800)
SHARE = 0.85
"""Of the budget that the first pairs may take: noise may ask for more."""
LEAST_RATE = 0.25
_UPDATES = 4
_EVALUATION = EVALUATIONS * 8 / 3
"""What evaluations cost, in updates: forward is a third of one."""


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
    budget_s: float,
    tell: Callable[[str], None],
) -> int:
    """Updates of a run."""
    task = make_task(question, 0)
    kept = question.store / f"length-{digest({**question.content(), 'contestants': contestants, 'budget': budget_s})}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(kept.read_text())["steps"])
    settings = settle(task, recipe=recipe, device=question.device.torch_device, steps=_UPDATES, eval_batches=1, **given)
    with tempfile.TemporaryDirectory() as folder:
        train(task, settings, Path(folder) / "pilot", observer=Observer())
        times = [float(event["time"]) for event in record.read(Path(folder) / "pilot") if event["kind"] == "step"]
    seconds = (times[-1] - times[0]) / (len(times) - 1)  # the first update prepares everything
    room = SHARE * budget_s / (FIRST * contestants * max(seconds, 1e-6)) - _EVALUATION
    fitting = [length for length in LENGTHS if length <= room]
    steps = min(task.steps, fitting[-1] if fitting else LENGTHS[0])
    tell(f"an update takes {seconds:.3g} s: runs of {steps} updates ({FIRST} pairs first, {budget_s / 60:g} minutes)")
    with contextlib.suppress(OSError):
        question.store.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"steps": steps, "update_s": seconds}))
    return steps
