"""Trains a task in a run folder: takes the lock, begins a run or takes one up, and refuses what would mix two."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from narrowgauge import __version__
from narrowgauge.errors import UsageError
from narrowgauge.ranks.world import ALONE, World
from narrowgauge.runs import lock, record
from narrowgauge.runs.batches import make_alone
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.runs.result import Result
from narrowgauge.runs.settings import Settings
from narrowgauge.runs.trainer import Observer, Trainer
from narrowgauge.task import Task


def train(
    task: Task,
    settings: Settings,
    folder: Path,
    *,
    resume: bool = False,
    configuration: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    capture: int | None = None,
    world: World = ALONE,
) -> Result:
    """Train in ``folder``, from the start or from its newest whole checkpoint.

    ``configuration`` is written to run.json beside the settings. A run that is finished is reported, not trained.
    ``capture`` is a step to keep for replay whatever comes of it, beside the first in which a number goes wrong.
    ``world``: the ranks that train together, of which the first keeps the folder.
    """
    watcher = observer or Observer()
    if not world.alone and capture is not None:
        raise UsageError("--capture: a step of several ranks cannot be run again by one; capture it in one process")
    with contextlib.ExitStack() as stack:
        with world.together():  # what the first rank refuses, all refuse
            path = None
            if world.first:
                stack.enter_context(_tidy_if_unused(folder))
                stack.enter_context(lock.hold(folder))
                path = _prepare(folder, settings, resume, watcher)
        path = world.told(path)
        if isinstance(path, Result):
            return path
        run = Trainer(task, settings, folder, watcher, world)
        if resume:
            run.go_on_from(path)
        if capture is not None and run.recorder is not None:
            if not run.result.step < capture <= settings.steps:
                raise UsageError(
                    f"--capture {capture}: expected a step from {run.result.step + 1} to {settings.steps} of this run"
                )
            run.recorder.request(capture)
        if not resume:
            with world.together():  # bad data is refused now, and tasks learn their facts
                run.share.cut(make_alone(task, 0, "train", "step 1", settings.seed))
        if not resume and world.first:
            asked = {"settings": dataclasses.asdict(settings), "facts": dict(task.facts), "versions": versions()}
            record.write_configuration(folder, {**(configuration or {}), **asked})
        return run.train()


def _prepare(folder: Path, settings: Settings, resume: bool, watcher: Observer) -> Path | Result | None:
    """What to take up: a checkpoint, the result of a run that is finished, or nothing."""
    if not resume and record.holds_run(folder):
        raise UsageError(f"{folder} already holds a run; go on with --resume {folder}, or take another --out")
    checkpoint.clean(folder)
    if not resume:
        return None
    _compare_versions(record.read_configuration(folder), watcher)
    return _finished(folder, settings) or checkpoint.newest_path(folder, watcher.tell)


def versions() -> dict[str, Any]:
    """What the numbers of a run depend on beside its settings."""
    return {
        "narrowgauge": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def _compare_versions(configuration: Mapping[str, Any], observer: Observer) -> None:
    then, now = configuration.get("versions", {}), versions()
    changed = [f"{name} {then[name]} -> {now[name]}" for name in now if name in then and then[name] != now[name]]
    if changed:
        observer.tell(f"not all is as it was when the run began, so its last bits may differ: {', '.join(changed)}")


def _finished(folder: Path, settings: Settings) -> Result | None:
    last = None
    for event in record.read(folder):
        last = event
    if last is None or last["kind"] != "end" or last.get("interrupted") or last["step"] < settings.steps:
        return None
    try:
        return Result.reread(last)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"the last event of {folder / record.EVENTS} is no summary ({error}); remove it") from None


@contextlib.contextmanager
def _tidy_if_unused(folder: Path) -> Iterator[None]:
    """Leave no empty folder behind where a run was refused before it began."""
    was_there = folder.exists()
    try:
        yield
    except BaseException:
        if not was_there and not record.holds_run(folder):
            with contextlib.suppress(OSError):
                (folder / ".lock").unlink(missing_ok=True)
                folder.rmdir()
        raise
