"""A run with a memory plan records it, reports it once, and resumes with it exactly."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from narrowgauge import tasks
from narrowgauge.nn.memory_plan import MemoryPlan
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.runs.result import Result
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.trainer import Observer, Trainer

PLAN = MemoryPlan(
    budget=10**9, blocks={"blocks.0": "full", "blocks.1": "8bit", "blocks.2": "none"}, peak=10**8, cost_ms=1.0
)
RECIPE = "fp8[products=all]"


class Lines(Observer):
    """Keeps what a run reports, and may interrupt it after a step."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.lines: list[str] = []

    def notify(self, line: str) -> None:
        self.lines.append(line)

    def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
        if event["kind"] == "step" and event["step"] == self.stop:
            os.kill(os.getpid(), signal.SIGINT)


def run(
    folder: Path, plan: MemoryPlan | None = PLAN, stop: int | None = None, resume: bool = False
) -> tuple[Result, Any, list[str]]:
    """Train on a CPU, where a plan is used as it is."""
    task = tasks.find("gpt:3x64", batch=2, context=16)
    settings = make_settings(
        task, recipe=RECIPE, device="cpu", steps=6, warmup=1, fit="1GB", watch_every=0, eval_every=0, log="none"
    )
    folder.mkdir(exist_ok=True)
    if not resume:
        record.write_configuration(folder, {"settings": dataclasses.asdict(settings)})
    seen = Lines(stop)
    trainer = Trainer(task, settings, folder, seen, budget=plan)
    if resume:
        trainer.resume_from(checkpoint.find_newest(folder, seen.notify))
    return trainer.train(), trainer.engine, seen.lines


def test_the_plan_is_in_the_record_and_reported_once(tmp_path: Path) -> None:
    result, engine, lines = run(tmp_path / "run")
    assert result.memory_plan == engine.memory_plan.describe() and result.memory_plan["blocks"] == PLAN.blocks
    (end,) = [event for event in record.read(tmp_path / "run") if event["kind"] == "end"]
    assert end["memory_plan"] == result.memory_plan
    assert Result.from_event(end).memory_plan == result.memory_plan
    assert [line for line in lines if "memory plan" in line] == [f"measured: {engine.memory_plan}"]
    assert run(tmp_path / "other", None)[0].memory_plan is None


def test_a_resumed_run_computes_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """Also in the first step after it, in which a new run would recompute all blocks."""
    _, whole, _ = run(tmp_path / "whole")
    part, *_ = run(tmp_path / "parts", stop=3)
    assert part.interrupted and 3 <= part.step < 6
    _, resumed, _ = run(tmp_path / "parts", resume=True)
    ours, theirs = whole.state_dict(), resumed.state_dict()
    assert ours["memory_plan"] == theirs["memory_plan"]
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"])
