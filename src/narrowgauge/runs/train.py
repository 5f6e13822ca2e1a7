"""Trains a task in a run folder: locks it, starts or resumes the run, and refuses to mix two runs."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from narrowgauge.errors import UsageError
from narrowgauge.ranks.world import SINGLE_PROCESS, World
from narrowgauge.runs import lock, record
from narrowgauge.runs.batches import make_isolated_batch
from narrowgauge.runs.checkpoint_times import CheckpointTimes
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.runs.fit_memory import plan_memory
from narrowgauge.runs.optimizers import describe_optimizers, with_optimizer
from narrowgauge.runs.result import Result
from narrowgauge.runs.settings import Settings
from narrowgauge.runs.sources import compare_sources
from narrowgauge.runs.trainer import Observer, Trainer
from narrowgauge.task import Task
from narrowgauge.version import __version__


def train(
    task: Task,
    settings: Settings,
    folder: Path,
    *,
    resume: bool = False,
    configuration: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    capture: int | None = None,
    world: World = SINGLE_PROCESS,
    times: CheckpointTimes | None = None,
) -> Result:
    """Train a task in a run folder, from the start or from its newest intact checkpoint.

    Args:
        task: What is trained.
        settings: How it is trained.
        folder: The run folder. It is created if it is missing.
        resume: Whether to resume the run in ``folder``. A finished run is not trained further; its result is returned.
        configuration: Further entries for run.json, besides the settings.
        observer: Receives progress and messages.
        capture: A step to capture for replay, besides the first step in which a number goes wrong.
        world: The ranks that train together. Rank 0 writes the folder.
        times: When to write checkpoints. By default as the settings say, and at the end.

    Returns:
        The summary of the run.

    Raises:
        UsageError: The folder holds another run or is in use, a checkpoint does not fit, or the data is bad.
    """
    observer, task = observer or Observer(), with_optimizer(task, settings.optimizer)
    if not world.is_single and capture is not None:
        raise UsageError("--capture: one process cannot replay a step of several ranks; capture it in one process")
    with contextlib.ExitStack() as stack:
        with world.fail_together():
            path = None
            if world.is_first:
                stack.enter_context(_remove_if_unused(folder))
                stack.enter_context(lock.hold(folder))
                path = _prepare(task, folder, settings, resume, observer)
        path = world.broadcast(path)
        if isinstance(path, Result):
            return path
        with world.fail_together():
            budget = plan_memory(task, settings, world, observer.notify)
        trainer = Trainer(task, settings, folder, observer, world, times, budget)
        if resume:
            trainer.resume_from(path)
        if capture is not None and trainer.recorder is not None:
            done = trainer.result.step
            if not done < capture <= settings.steps:
                raise UsageError(f"--capture {capture}: expected a step of this run, {done + 1} to {settings.steps}")
            trainer.recorder.request(capture)
        if not resume:
            with world.fail_together():  # refuses bad data before training, and lets tasks fill in their facts
                trainer.rank_batches.select_rows(make_isolated_batch(task, 0, "train", "step 1", settings.seed))
        if not resume and world.is_first:
            used: dict[str, Any] = {
                "settings": dataclasses.asdict(trainer.settings),
                "facts": dict(task.facts),
                "versions": read_versions(),
                "optimizers": describe_optimizers(trainer.engine.optimizers),
            }
            if trainer.engine.recipe_reason is not None:
                used["recipe_reason"] = trainer.engine.recipe_reason
            record.write_configuration(folder, {**(configuration or {}), **used})
        return trainer.train()


def _prepare(task: Task, folder: Path, settings: Settings, resume: bool, observer: Observer) -> Path | Result | None:
    """Return the checkpoint to resume from, the result of a finished run, or None to start from scratch."""
    if not resume and record.holds_run(folder):
        raise UsageError(f"{folder} already holds a run; continue it with --resume {folder}, or choose another --out")
    checkpoint.clean(folder)
    if not resume:
        return None
    configuration = record.read_configuration(folder)
    facts = configuration.get("facts")
    recorded = facts.get("sources") if isinstance(facts, dict) else None
    compare_sources(recorded, task.facts.get("sources"), "restore it to resume the run, or start a new run")
    _compare_versions(configuration, observer)
    return _read_finished(folder, settings) or checkpoint.find_newest(folder, observer.notify)


def read_versions() -> dict[str, Any]:
    """Read what the numbers of a run depend on besides its settings: versions, machine, threads."""
    return {
        "narrowgauge": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def _compare_versions(configuration: Mapping[str, Any], observer: Observer) -> None:
    then, now = configuration.get("versions", {}), read_versions()
    changed = [f"{name} {then[name]} -> {now[name]}" for name in now if name in then and then[name] != now[name]]
    if changed:
        listed = ", ".join(changed)
        observer.notify(f"the environment changed since the run started, so its last bits may differ: {listed}")


def _read_finished(folder: Path, settings: Settings) -> Result | None:
    last = None
    for event in record.read(folder):
        last = event
    if last is None or last["kind"] != "end" or last.get("interrupted") or last["step"] < settings.steps:
        return None
    try:
        return Result.from_event(last)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"the last event of {folder / record.EVENTS} is not a summary ({error}); remove it") from None


@contextlib.contextmanager
def _remove_if_unused(folder: Path) -> Iterator[None]:
    """Remove a folder that this process created if the run is refused before it starts."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        if not existed and not record.holds_run(folder):
            with contextlib.suppress(OSError):
                (folder / ".lock").unlink(missing_ok=True)
                folder.rmdir()
        raise
