"""Weights & Biases: one W&B run per run folder, however often it is resumed; offline where there is no network.

Offline, each process writes its own file, and W&B does not document what happens to two files that overlap. A resumed
run therefore writes its whole history again, from the record, and renames the older files. There is always one file to
upload. Online, W&B keeps the first value it received for a step, so it is only sent the missing steps.
"""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.runs.json_lines import replace_nonfinite
from narrowgauge.runs.trackers.base import Notify, Tracker, Unavailable, read_history

PROJECT = "narrowgauge"
FOLDER, IDENTITY = "wandb", "run-id"
MIN_FREE_BYTES = 4096
OFFLINE = ("offline", "dryrun")
PATIENCE_S = 300
"""How long W&B may take to start its process (30 s by default) and a run, for busy machines."""
SUMMARY = ("steps", "seconds", "tokens_per_s", "loss_first", "loss_last", "loss_eval", "skipped", "interrupted")


class WandbTracker(Tracker):
    """Logs to a run of Weights & Biases."""

    label = "Weights & Biases"

    def __init__(self, folder: Path, configuration: Mapping[str, Any], first_step: int, notify: Notify) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # send nothing that the user did not ask for
        os.environ.setdefault("WANDB__SERVICE_WAIT", str(PATIENCE_S))
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError:
            raise Unavailable("is not installed (pip install wandb)") from None
        self._folder, self._configuration, self._notify = folder, configuration, notify
        self._id = os.environ.get("WANDB_RUN_ID") or _read_or_make_id(folder / FOLDER / IDENTITY)
        self._findings: list[str] = []
        self._run = self._start()
        known = int(self._run.step) if self._run.resumed else 0
        for group, step, values in read_history(folder, first_step):
            if step >= known:
                self.log_metrics(group, step, values)

    def log_metrics(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{group}/{name}": value for name, value in values.items()}, step=step)

    def log_finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._findings.append(f"step {step}, {finding['severity']}: {finding['where']}: {finding['detail']}")
        self._run.summary["findings"] = list(self._findings)

    def flush(self) -> None:
        """Check for free disk space. W&B sends from its own process, which reports nothing when the disk is full."""
        if shutil.disk_usage(self._folder / FOLDER).free < MIN_FREE_BYTES:
            raise Unavailable("cannot write its files: no space left on the disk; continuing without it")

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        for name, value in (result or {}).items():
            if name in SUMMARY and value is not None:
                self._run.summary[f"result/{name}"] = value
        self._run.finish(exit_code=1 if result is None else 0)
        self.flush()

    def _start(self) -> Any:
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
            upload = f"wandb sync {self._folder / FOLDER}/offline-run-*"
            self._notify(f"Weights & Biases: {why}; logging offline; upload with: {upload}")
        if mode == "offline":
            _rename_superseded(self._folder / FOLDER, self._id)
        quiet = self._wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, init_timeout=PATIENCE_S
        )
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or self._folder.name,
            dir=str(self._folder),
            id=self._id,
            resume="allow",
            # The user's code may have a W&B run of its own in this process: do not replace it.
            reinit="create_new",
            config=replace_nonfinite(self._configuration),
            mode=mode,
            settings=quiet,
        )

    def _is_logged_in(self) -> bool:
        """Check without a prompt, which would not be visible."""
        try:
            return bool(self._wandb.login(prompt=False))
        except TypeError:  # an older wandb: login() would prompt, reading the key does not
            return bool(self._wandb.api.api_key)
        except Exception:
            return False


def _read_or_make_id(path: Path) -> str:
    """Return the W&B id of the run, which is chosen when the run starts."""
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


def _rename_superseded(folder: Path, identity: str) -> None:
    for old in sorted(folder.glob(f"offline-run-*-{identity}")):
        number = len(list(folder.glob("superseded-*")))
        old.rename(folder / f"superseded-{number}-{old.name}")
