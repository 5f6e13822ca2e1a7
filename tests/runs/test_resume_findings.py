"""A resumed run has the findings, and so the exit code, of an uninterrupted one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_task
import torch
from test_train import StopAt, assert_same_run, cpu_settings
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.runs.result import Result
from narrowgauge.runs.settings import Settings
from narrowgauge.runs.train import train
from narrowgauge.task import Task

STEPS = 80
STOPS = (13, 30, 32, 60)
"""Before, during and after the events of the curves; 32 soon after 30."""


def numbered(step: int, split: str) -> tuple[Tensor, Tensor, Tensor]:
    return *tiny_task.draw(step, split), torch.tensor(float(step))


def falls_then_rises(model: nn.Module, step: float) -> float:
    """Stay below half of the first loss: only a run that lost its first loss would report divergence."""
    return (
        2.0 if step < 15 else max(0.3, 2.0 - (step - 15) * 0.1) if step < 40 else 0.3 + 0.6 * min(1, (step - 40) / 25)
    )


def diverges(model: nn.Module, step: float) -> float:
    return 2.0 - 0.04 * step if step < 25 else 1.0 + 0.2 * (step - 25)


def is_nan_once(model: nn.Module, step: float) -> float:
    return float("nan") if step == 12 and model.training else 2.0 - 0.01 * step


def is_nan_for_long(model: nn.Module, step: float) -> float:
    return float("nan") if 29 <= step < 34 and model.training else 2.0 - 0.01 * step


def spikes(model: nn.Module, step: float) -> float:
    return 2.0 - 0.01 * step + (5.0 if step in (23, 45) and model.training else 0.0)


def skips(model: nn.Module, step: float) -> float:
    """Gradients of inf at every fourth step: too many updates are skipped."""
    return float("inf") if step % 4 == 0 and model.training else 1.0


def task_of(curve: Callable[[nn.Module, float], float]) -> Task:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        real = tiny_task.loss(model, batch)
        if curve is skips:
            return real * curve(model, float(batch[2]))
        return real - real.detach() + curve(model, float(batch[2]))

    return tiny_task.tiny(batch=numbered, loss=loss, metrics=None, steps=STEPS)


def findings(result: Result) -> list[tuple[str, str, str, str]]:
    return [(f.rule, f.severity, f.where, f.detail) for f in result.findings]


CASES = [("fp32", curve) for curve in (diverges, is_nan_once, spikes)]
CASES += [("fp16", is_nan_for_long), ("fp16", skips), ("fp8", skips), ("bf16-lean", falls_then_rises)]


@pytest.mark.parametrize(("recipe", "curve"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_findings_do_not_depend_on_interruptions(tmp_path: Path, recipe: str, curve: Any) -> None:
    task = task_of(curve)
    settings = cpu_settings(task, recipe, checkpoint_every=25, eval_every=0, watch_every=10)
    whole = train(task, settings, tmp_path / "whole")
    result = train(task, settings, tmp_path / "often", observer=StopAt(STOPS[0]))
    for stop in [*STOPS[1:], STEPS + 1]:
        assert result.interrupted
        result = train(task, settings, tmp_path / "often", resume=True, observer=StopAt(stop))
    assert findings(result) == findings(whole) and result.serious == whole.serious
    assert result.predictions == whole.predictions and len(result.captures) == len(whole.captures)
    assert_same_run(tmp_path / "whole", tmp_path / "often", STEPS)
    if curve is falls_then_rises:
        assert not whole.serious
    elif curve is diverges:  # small updates, as in Q-learning, whose targets move: not certain enough to be serious
        assert "loss-diverging" in {finding.rule for finding in whole.findings}
    elif curve is not spikes:
        assert whole.serious


def test_findings_after_the_checkpoint_are_found_again(tmp_path: Path) -> None:
    task = task_of(is_nan_for_long)
    settings = cpu_settings(task, checkpoint_every=25, eval_every=0, keep=9)
    whole = train(task, settings, tmp_path / "whole")
    run = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in (50, 75, STEPS):
        shutil.rmtree(checkpoint.make_path(run, step))
    events = (run / record.EVENTS).read_text().splitlines(keepends=True)
    (run / record.EVENTS).write_text("".join(events[:-1]))  # the end
    result = train(task, settings, run, resume=True)
    assert findings(result) == findings(whole)
    assert_same_run(tmp_path / "whole", run, STEPS)


def test_a_checkpoint_of_an_earlier_version_loads(tmp_path: Path) -> None:
    """Earlier versions did not save the state of the rules."""
    task = task_of(falls_then_rises)
    settings = cpu_settings(task, eval_every=0, checkpoint_every=0)
    train(task, settings, tmp_path / "run", observer=StopAt(10))
    path = checkpoint.make_path(tmp_path / "run", 10)
    old = checkpoint.load(path)
    state = {name: value for name, value in old.state.items() if name not in ("examiner", "recorder")}
    state["result"] = {n: v for n, v in state["result"].items() if n not in ("findings", "captures")}
    checkpoint.save(tmp_path / "run", 10, old.weights, state)
    result = train(task, settings, tmp_path / "run", resume=True)
    assert result.step == STEPS and not result.interrupted


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Path]:
    """A run that was stopped at step 8 of 12; each test resumes a copy."""
    task, run = tiny_task.tiny(), tmp_path_factory.mktemp("stopped") / "run"
    settings = cpu_settings(task, steps=12, checkpoint_every=5)
    train(task, settings, run, observer=StopAt(8))
    return settings, run


def reshaped() -> Task:
    return tiny_task.tiny(width=16)


def renamed() -> Task:
    def model() -> nn.Module:
        made = tiny_task.Classifier(32)
        made.other, made.outer = made.outer, nn.Identity()  # type: ignore[assignment]
        return made

    return tiny_task.tiny(model=model)


def reordered() -> Task:
    """Keep names and shapes, but change the order: the optimizer would swap the moments of two weights."""

    class Reordered(tiny_task.Classifier):
        def __init__(self) -> None:
            super().__init__(32)
            self._modules["inner"] = self._modules.pop("inner")

    return tiny_task.tiny(model=Reordered)


def with_sgd() -> Task:
    return tiny_task.tiny(optimizer=lambda model, rate: torch.optim.SGD([model.inner.weight], lr=rate))


@pytest.mark.parametrize("changed", [reshaped, renamed, reordered, with_sgd])
def test_a_changed_task_is_a_one_line_error_and_keeps_the_run(
    tmp_path: Path, stopped: tuple[Settings, Path], changed: Callable[[], Task]
) -> None:
    settings, run = stopped[0], shutil.copytree(stopped[1], tmp_path / "run")
    before = (run / record.EVENTS).read_bytes()
    with pytest.raises(UsageError, match=r"does not fit the task, which has changed since") as caught:
        train(changed(), settings, run, resume=True)
    assert "\n" not in str(caught.value)
    assert (run / record.EVENTS).read_bytes() == before
    assert train(tiny_task.tiny(), settings, run, resume=True).step == 12


NO_EVENTS = (
    "null",
    "[]",
    "7",
    '"text"',
    '{"kind":"note"}',
    '{"step":3}',
    '{"kind":"x","step":"3"}',
    '{"kind":3,"step":3}',
)


@pytest.mark.parametrize("line", NO_EVENTS)
def test_an_invalid_event_is_a_one_line_error(tmp_path: Path, stopped: tuple[Settings, Path], line: str) -> None:
    settings, run = stopped[0], shutil.copytree(stopped[1], tmp_path / "run")
    path = run / record.EVENTS
    count = len(path.read_text().splitlines())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UsageError, match=rf"damaged in line {count + 1}: not an event"):
        train(tiny_task.tiny(), settings, run, resume=True)


@pytest.mark.parametrize("end", [{}, {"interrupted": False, "findings": 3}, {"metrics": [], "loss_last": "low"}])
def test_an_invalid_summary_is_a_one_line_error(tmp_path: Path, end: dict[str, Any]) -> None:
    task = tiny_task.tiny()
    settings = cpu_settings(task, steps=4)
    train(task, settings, tmp_path / "run")
    path = tmp_path / "run" / record.EVENTS
    path.write_text(path.read_text() + json.dumps({"kind": "end", "step": 4, **end}) + "\n")
    with pytest.raises(UsageError, match="is not a summary"):
        train(task, settings, tmp_path / "run", resume=True)
