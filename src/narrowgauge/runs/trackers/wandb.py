"""Weights & Biases: one run of one id however often it is resumed, in the run's folder, offline where it must be.

Offline, each life of a run writes a file of its own, and W&B does not say what becomes of two that overlap. A resumed
run therefore writes the whole story, from the record, and sets the older files aside: there is always one to upload.
Online, W&B keeps the first number it got for a step, and is sent what it lacks.
"""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.runs.json_lines import plain
from narrowgauge.runs.trackers.base import Unavailable, history

PROJECT = "narrowgauge"
FOLDER, IDENTITY = "wandb", "run-id"
BLOCK_BYTES = 4096
OFFLINE = ("offline", "dryrun")
SUMMARY = ("steps", "seconds", "tokens_per_s", "loss_first", "loss_last", "loss_eval", "skipped", "interrupted")


class WandB:
    """A run at Weights & Biases."""

    def __init__(
        self, folder: Path, configuration: Mapping[str, Any], first_step: int, note: Callable[[str], None]
    ) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing leaves the machine that was not asked for
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError:
            raise Unavailable("is not installed (pip install wandb)") from None
        self._folder, self._configuration, self._note = folder, configuration, note
        self._id = os.environ.get("WANDB_RUN_ID") or _identity(folder / FOLDER / IDENTITY)
        self._findings: list[str] = []
        self._run = self._begin()
        known = int(self._run.step) if self._run.resumed else 0
        for group, step, values in history(folder, first_step):
            if step >= known:
                self.add(group, step, values)

    def add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{group}/{name}": value for name, value in values.items()}, step=step)

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._findings.append(f"step {step}, {finding['severity']}: {finding['where']}: {finding['detail']}")
        self._run.summary["findings"] = list(self._findings)

    def flush(self) -> None:
        """W&B has a process of its own that sends, and that says nothing when the disk is full: so look."""
        if shutil.disk_usage(self._folder / FOLDER).free < BLOCK_BYTES:
            raise Unavailable("cannot write its files: no space left on the disk; going on without it")

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        for name, value in (result or {}).items():
            if name in SUMMARY and value is not None:
                self._run.summary[f"result/{name}"] = value
        self._run.finish(exit_code=1 if result is None else 0)
        self.flush()

    def _begin(self) -> Any:
        mode = os.environ.get("WANDB_MODE", "").lower()
        if mode in OFFLINE:
            return self._init("offline")
        if mode == "disabled":
            return self._init("disabled")
        if not self._is_logged_in():
            return self._init("offline", "not logged in (wandb login)")
        try:
            return self._init(None)
        except Exception as error:
            return self._init("offline", " ".join(str(error).split())[:200])

    def _init(self, mode: str | None, why: str | None = None) -> Any:
        if why is not None:
            self._note(f"Weights & Biases: {why}; offline: wandb sync {self._folder / FOLDER}/offline-run-* uploads it")
        if mode == "offline":
            _set_aside(self._folder / FOLDER, self._id)
        quiet = self._wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or self._folder.name,
            dir=str(self._folder),
            id=self._id,
            resume="allow",
            # Beside a run of the user's own in the same process, not in its place.
            reinit="create_new",
            config=plain(self._configuration),
            mode=mode,
            settings=quiet,
        )

    def _is_logged_in(self) -> bool:
        """Asks without a prompt, which nobody would see."""
        try:
            return bool(self._wandb.login(prompt=False))
        except TypeError:  # an older wandb, which prompts when asked to log in but not when asked for the key
            return bool(self._wandb.api.api_key)
        except Exception:
            return False


def _identity(path: Path) -> str:
    """The run's id at W&B, made up when the run begins."""
    try:
        known = path.read_text().strip()
    except OSError:
        known = ""
    if known:
        return known
    made = secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{made}\n")
    return made


def _set_aside(folder: Path, identity: str) -> None:
    for old in sorted(folder.glob(f"offline-run-*-{identity}")):
        number = len(list(folder.glob("superseded-*")))
        old.rename(folder / f"superseded-{number}-{old.name}")
