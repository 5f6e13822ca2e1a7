"""Training keeps its record, resumes exactly after an interruption, and ends with a clear error on bad data."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_task
import torch
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.runs.result import Result
from narrowgauge.runs.settings import Settings, make_settings
from narrowgauge.runs.train import train
from narrowgauge.runs.trainer import Observer
from narrowgauge.task import Task


def cpu_settings(task: Task, recipe: str = "fp32", **given: Any) -> Settings:
    return make_settings(task, recipe=recipe, device="cpu", **{"compile": False, **given})


class StopAt(Observer):
    """Sends the process a signal when the metrics of a step arrive, as a user who presses Ctrl-C would."""

    def __init__(self, step: int, number: int = signal.SIGINT, times: int = 1) -> None:
        self.step, self.number, self.times = step, number, times
        self.lines: list[str] = []

    def notify(self, line: str) -> None:
        self.lines.append(line)

    def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
        if event["kind"] == "step" and event["step"] == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def final_state(folder: Path, step: int) -> dict[str, Tensor]:
    """Collect every tensor of a run's checkpoint: weights, moments, random states."""
    back = checkpoint.load(checkpoint.make_path(folder, step))
    flat: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            flat[path] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                walk(item, f"{path}/{index}")

    walk(back.weights, "weights")
    walk(back.state["engine"], "engine")
    walk(back.state["random"], "random")
    return flat


def assert_same_run(one: Path, other: Path, step: int) -> None:
    first, second = final_state(one, step), final_state(other, step)
    assert first.keys() == second.keys() and len(first) > 12
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    examiners = [checkpoint.load(checkpoint.make_path(run, step)).state["examiner"] for run in (one, other)]
    assert repr(examiners[0]) == repr(examiners[1])  # as text, NaN equals NaN
    assert read_events(one) == read_events(other)


def read_events(folder: Path) -> list[tuple[str, ...]]:
    """Read the events without their times; as text, in which NaN equals NaN."""
    fields = ("kind", "step", "loss", "lr", "grad_norm", "loss_scale", "applied", "accuracy", "text")
    fields += ("rule", "where", "severity", "detail", "readings", "format", "survives", "breaks")
    kinds = ("step", "eval", "sample", "finding", "look", "prediction")
    return [tuple(repr(e.get(name)) for name in fields) for e in record.read(folder) if e["kind"] in kinds]


def test_trains_and_records(tmp_path: Path) -> None:
    task = tiny_task.tiny()
    result = train(task, cpu_settings(task, steps=40), tmp_path / "run", configuration={"task": "tiny"})
    events = list(record.read(tmp_path / "run"))
    steps = [e for e in events if e["kind"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 41))
    assert set(steps[0]) == {
        "kind", "step", "loss", "lr", "grad_norm", "loss_scale", "tokens_per_s", "applied", "time"
    }  # fmt: skip
    assert [e["step"] for e in events if e["kind"] == "eval"] == [10, 20, 30, 40]
    assert [e["step"] for e in events if e["kind"] == "checkpoint"] == [10, 20, 30, 40]
    assert [e["kind"] for e in events[-4:]] == ["sample", "prediction", "prediction", "end"]
    assert [e["step"] for e in events if e["kind"] == "look"] == [1, 11, 21, 31]
    assert checkpoint.list_steps(tmp_path / "run") == [20, 30, 40]
    assert result.loss_last is not None and result.loss_first is not None and result.loss_last < 0.7 * result.loss_first
    assert result.metrics["accuracy"] > 0.6 and result.loss_eval is not None
    assert result.findings == [] and not result.interrupted and result.skipped == 0
    assert result.parameters == 8 * 32 + 32 + 64 + 32 * 32 + 32 + 32 * 4 + 4
    assert result.tokens_per_s is not None and result.tokens_per_s > 0
    configuration = record.read_configuration(tmp_path / "run")
    assert configuration["task"] == "tiny" and configuration["settings"]["steps"] == 40
    assert configuration["facts"] == {"unigram_entropy": 1.386} and "torch" in configuration["versions"]
    assert list((tmp_path / "run" / "tensorboard").iterdir())


RESUMED = [("fp32", 1, signal.SIGINT), ("fp32", 3, signal.SIGTERM), ("fp16", 1, signal.SIGTERM)]
RESUMED += [("fp16", 3, signal.SIGINT), ("fp8", 1, signal.SIGINT), ("fp8", 3, signal.SIGTERM)]


@pytest.mark.parametrize(("recipe", "accumulate", "number"), RESUMED)
def test_resume_continues_bit_exactly(tmp_path: Path, recipe: str, accumulate: int, number: int) -> None:
    task = tiny_task.tiny()
    settings = cpu_settings(task, recipe, steps=12, accumulate=accumulate, eval_every=4, checkpoint_every=5)
    train(task, settings, tmp_path / "whole")
    watcher = StopAt(7, number)
    result = train(task, settings, tmp_path / "parts", observer=watcher)
    assert result.interrupted and result.step == 7 and result.findings == []
    assert any("saving" in line for line in watcher.lines)
    assert checkpoint.list_steps(tmp_path / "parts") == [5, 7]
    assert train(task, settings, tmp_path / "parts", resume=True, observer=StopAt(10)).step == 10
    torch.manual_seed(999)  # the generator of the next process must not matter
    result = train(task, settings, tmp_path / "parts", resume=True)
    assert not result.interrupted and result.step == 12
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 12)
    kinds = [e["kind"] for e in record.read(tmp_path / "parts")]
    assert kinds.count("resume") == 2 and kinds.count("end") == 1


def test_accumulation_is_the_mean_of_its_batches(tmp_path: Path) -> None:
    """Two accumulated batches train like one batch that holds both."""

    def joined(step: int, split: str) -> tuple[Tensor, Tensor]:
        parts = [tiny_task.draw(2 * step + i, split) for i in range(2)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def model() -> nn.Module:
        return nn.Linear(8, 4)

    small, large = tiny_task.tiny(model=model), tiny_task.tiny(model=model, batch=joined)
    one = train(small, cpu_settings(small, steps=10, accumulate=2), tmp_path / "accumulated")
    two = train(large, cpu_settings(large, steps=10), tmp_path / "joined")
    assert one.loss_last == pytest.approx(two.loss_last, rel=1e-4)
    accumulated = final_state(tmp_path / "accumulated", 10)["weights/weight"]
    torch.testing.assert_close(
        accumulated, final_state(tmp_path / "joined", 10)["weights/weight"], rtol=1e-3, atol=1e-4
    )


def test_resume_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    task = tiny_task.tiny()
    settings = cpu_settings(task, steps=6, checkpoint_every=0)

    class Killed(StopAt):
        def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
            if event["step"] == 3:
                raise SystemExit("killed")

    with pytest.raises(SystemExit):
        train(task, settings, tmp_path / "run", observer=Killed(3))
    watcher = StopAt(-1)
    assert train(task, settings, tmp_path / "run", resume=True, observer=watcher).step == 6
    assert watcher.lines == ["no checkpoint was written yet: starting again"]
    train(task, settings, tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole", 6)


def test_resume_skips_a_damaged_checkpoint(tmp_path: Path) -> None:
    task = tiny_task.tiny()
    settings = cpu_settings(task, steps=12, checkpoint_every=3)
    train(task, settings, tmp_path / "whole")
    train(task, settings, tmp_path / "run", observer=StopAt(8))
    weights = checkpoint.make_path(tmp_path / "run", 8) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    watcher = StopAt(-1)
    train(task, settings, tmp_path / "run", resume=True, observer=watcher)
    assert len(watcher.lines) == 1 and "step-00000008 is damaged (weights.safetensors has" in watcher.lines[0]
    assert_same_run(tmp_path / "whole", tmp_path / "run", 12)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    task = tiny_task.tiny()
    settings = cpu_settings(task, steps=5)
    first = train(task, settings, tmp_path / "run")
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    assert train(task, settings, tmp_path / "run", resume=True) == first
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


def test_resume_after_a_kill_between_last_checkpoint_and_end(tmp_path: Path) -> None:
    task = tiny_task.tiny()
    settings = cpu_settings(task, steps=5)
    first = train(task, settings, tmp_path / "run")
    record.truncate_after(tmp_path / "run", 5)
    again = train(task, settings, tmp_path / "run", resume=True)
    assert (again.loss_eval, again.loss_last, again.sample) == (first.loss_eval, first.loss_last, first.sample)


def test_a_second_ctrl_c_quits_immediately(tmp_path: Path) -> None:
    task = tiny_task.tiny()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(task, cpu_settings(task, steps=10, checkpoint_every=2), tmp_path / "run", observer=StopAt(3, times=2))
    assert checkpoint.list_steps(tmp_path / "run") == [2]
    assert signal.getsignal(signal.SIGINT) is handler


def test_nan_in_the_data_stops_the_run_and_saves_it(tmp_path: Path) -> None:
    task = tiny_task.poisoned(at=7)
    settings = cpu_settings(task, steps=10, checkpoint_every=5)
    with pytest.raises(UsageError, match=r"data of step 8 is not finite: train batch 7\[0\]"):
        train(task, settings, tmp_path / "run")
    assert checkpoint.list_steps(tmp_path / "run") == [5, 7]  # the good steps are saved
    finding = list(record.read(tmp_path / "run"))[-1]
    assert finding["kind"] == "finding" and finding["rule"] == "bad-data"
    fixed = tiny_task.tiny()
    train(fixed, settings, tmp_path / "run", resume=True)
    train(fixed, settings, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run", 10)


def test_bad_data_at_the_start_leaves_no_folder(tmp_path: Path) -> None:
    task = tiny_task.poisoned(at=0)
    with pytest.raises(UsageError, match="step 1 is not finite"):
        train(task, cpu_settings(task), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_stalled_run_is_a_finding_and_saves_no_checkpoint(tmp_path: Path) -> None:
    task = tiny_task.diverging()
    result = train(task, cpu_settings(task, checkpoint_every=0, eval_every=0), tmp_path / "run")
    stalled = next(finding for finding in result.findings if finding.rule == "training-stalled")
    assert result.serious and "inner.weight" in stalled.detail
    assert checkpoint.list_steps(tmp_path / "run") == []
    events = list(record.read(tmp_path / "run"))
    assert events[-1]["kind"] == "end" and not any(e["applied"] for e in events if e["kind"] == "step")


def test_a_final_loss_of_nan_is_a_serious_finding(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return tiny_task.loss(model, batch) * (float("nan") if not model.training else 1.0)

    task = tiny_task.tiny(loss=loss)
    result = train(task, cpu_settings(task, steps=3), tmp_path / "run")
    assert [f.rule for f in result.findings] == ["loss-not-finite"] and result.serious
    assert math.isnan(result.loss_eval or 0)
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))
    again = train(task, cpu_settings(task, steps=3), tmp_path / "run", resume=True)
    assert math.isnan(again.loss_eval or 0) and again.serious


def test_skipped_updates_are_counted_across_processes(tmp_path: Path) -> None:
    """An FP16 run whose initial loss scale is far too high skips updates, backs off, and records it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return tiny_task.loss(model, batch) * 1e36  # times the initial scale of 65536 this exceeds FP32

    task = tiny_task.tiny(loss=loss)
    settings = cpu_settings(task, "fp16", steps=30, checkpoint_every=4)
    train(task, settings, tmp_path / "run", observer=StopAt(6))
    result = train(task, settings, tmp_path / "run", resume=True)
    skipped = [e["step"] for e in record.read(tmp_path / "run") if e["kind"] == "step" and not e["applied"]]
    assert result.skipped == len(skipped) > 6
    whole = train(task, settings, tmp_path / "whole")
    assert whole.skipped == result.skipped
    assert_same_run(tmp_path / "whole", tmp_path / "run", 30)


def test_a_failing_sample_function_is_only_a_warning(tmp_path: Path) -> None:
    task = tiny_task.tiny(sample=lambda model: str(1 / 0))
    result = train(task, cpu_settings(task, steps=3), tmp_path / "run")
    assert result.step == 3 and [f.rule for f in result.findings] == ["sample-failed"] and not result.serious


def test_a_task_with_its_own_optimizer(tmp_path: Path) -> None:
    task = tiny_task.tiny(optimizer=lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9))
    settings = cpu_settings(task, steps=8)
    train(task, settings, tmp_path / "whole")
    train(task, settings, tmp_path / "run", observer=StopAt(3))
    train(task, settings, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 8)


def test_evaluation_does_not_change_the_training(tmp_path: Path) -> None:
    def batch(step: int, split: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(step)  # changes the generator that dropout uses
        return tiny_task.draw(step, split)

    task = tiny_task.tiny(batch=batch)
    often = train(task, cpu_settings(task, steps=8, eval_every=1), tmp_path / "often")
    never = train(task, cpu_settings(task, steps=8, eval_every=0), tmp_path / "never")
    assert often.loss_last == never.loss_last and often.loss_eval == never.loss_eval


def test_resume_after_a_kill_during_evaluation(tmp_path: Path) -> None:
    """The checkpoint of a step is saved after its evaluation, so that no evaluation is missing from the record."""
    attempt = 0

    def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if attempt == 1:
            raise SystemExit("killed")
        return tiny_task.accuracy(model, batch)

    task = tiny_task.tiny(metrics=metrics)
    settings = cpu_settings(task, steps=8, eval_every=4, checkpoint_every=4)
    train(task, settings, tmp_path / "whole")
    attempt = 1
    with pytest.raises(SystemExit):
        train(task, settings, tmp_path / "run")
    attempt = 2
    train(task, settings, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 8)


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    task = tiny_task.tiny()
    train(task, cpu_settings(task, steps=2), tmp_path / "run")
    with pytest.raises(UsageError, match="already holds a run; continue it with --resume"):
        train(task, cpu_settings(task, steps=2), tmp_path / "run")


def test_a_recipe_the_engine_refuses_leaves_no_folder(tmp_path: Path) -> None:
    task = tiny_task.tiny()
    with pytest.raises(UsageError, match="TF32"):
        train(task, cpu_settings(task, "tf32"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_result_is_read_back_from_its_event(tmp_path: Path) -> None:
    task = tiny_task.tiny()
    result = train(task, cpu_settings(task, steps=2), tmp_path / "run")
    *_, end = record.read(tmp_path / "run")
    assert Result.from_event(end) == result


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "--steps 0: expected a whole number of at least 1"),
        ({"learning_rate": -1.0}, "--lr -1.0"),
        ({"learning_rate": math.nan}, "--lr nan"),
        ({"clip_norm": -2.0}, "--clip -2.0"),
        ({"steps": 5, "warmup": 6}, "--warmup 6 is longer than the run"),
        ({"accumulate": 0}, "--accumulate 0"),
        ({"keep": 0}, "--keep 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cpu_settings(tiny_task.tiny(), **given)
