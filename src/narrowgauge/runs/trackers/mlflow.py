"""MLflow: logs to a store inside the run folder, or to MLFLOW_TRACKING_URI.

Metrics are sent in batches. A resumed run continues its MLflow run, with one exception. If the killed process got
further than the checkpoint, MLflow holds steps that the record has dropped, and MLflow cannot drop them. Then a new
MLflow run replaces the old one, which is deleted (as MLflow deletes: it can be restored).
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.runs.trackers.base import Notify, Tracker, Unavailable, read_history

EXPERIMENT = "narrowgauge"
FOLDER, IDENTITY = "mlflow", "run-id"
MAX_METRICS, MAX_PARAMETERS, MAX_CHARS = 1000, 100, 5000
"""MLflow's limits for one call (metrics, parameters) and for one value (characters)."""
_NOT_ALLOWED = re.compile(r"[^/\w.\- ]")


class MLflowTracker(Tracker):
    """Logs to a run of MLflow."""

    label = "MLflow"

    def __init__(self, folder: Path, configuration: Mapping[str, Any], first_step: int, notify: Notify) -> None:
        # MLflow prefers a database, but mlflow-skinny lacks the libraries for one. It also sends telemetry by default.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            self._entities = importlib.import_module("mlflow.entities")
            self._error = importlib.import_module("mlflow.exceptions").MlflowException
            client = importlib.import_module("mlflow.tracking").MlflowClient
        except ImportError:
            raise Unavailable("is not installed (pip install mlflow-skinny)") from None
        self._pending: list[Any] = []
        self._findings: list[str] = []
        self._path = folder / FOLDER / IDENTITY
        self._path.parent.mkdir(parents=True, exist_ok=True)
        place = os.environ.get("MLFLOW_TRACKING_URI") or (folder / FOLDER).resolve().as_uri()
        self._client = client(tracking_uri=place)
        self._id, held = self._find_run(folder, configuration, first_step)
        for group, step, values in read_history(folder, first_step):
            missing = {name: v for name, v in values.items() if step > held.get(_make_key(group, name), -1)}
            self.log_metrics(group, step, missing)

    def log_metrics(self, group: str, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        for name, value in values.items():
            self._pending.append(self._entities.Metric(_make_key(group, name), float(value), now, step))
        if len(self._pending) >= MAX_METRICS:
            self.flush()

    def log_finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._findings.append(f"step {step}, {finding['severity']}: {finding['where']}: {finding['detail']}")
        self._client.set_tag(self._id, "narrowgauge.findings", "\n".join(self._findings)[:MAX_CHARS])

    def flush(self) -> None:
        while self._pending:
            self._client.log_batch(self._id, metrics=self._pending[:MAX_METRICS])
            del self._pending[:MAX_METRICS]

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        self.flush()
        status = "FAILED" if result is None else "KILLED" if result.get("interrupted") else "FINISHED"
        self._client.set_terminated(self._id, status)

    def _find_run(self, folder: Path, configuration: Mapping[str, Any], first_step: int) -> tuple[str, dict[str, int]]:
        """Find or create the MLflow run; return its id and the last step it holds of each metric."""
        old = self._path.read_text().strip() if self._path.is_file() else ""
        held = self._read_last_steps(old) if old else None
        if held is not None:
            if max(held.values(), default=-1) < first_step:
                self._client.update_run(old, status="RUNNING")
                return old, held
            self._client.set_tag(old, "narrowgauge.superseded", "the run was resumed from an earlier step")
            self._client.delete_run(old)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(experiment)
        made = str(self._client.create_run(experiment_id, run_name=folder.name).info.run_id)
        self._path.write_text(f"{made}\n")
        parameters = [self._entities.Param(name, text) for name, text in _flatten(configuration)]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(made, params=parameters[start : start + MAX_PARAMETERS])
        return made, {}

    def _read_last_steps(self, run: str) -> dict[str, int] | None:
        """Read the last step of each metric. None: the user has removed the run."""
        try:
            found = self._client.get_run(run)
        except self._error as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if found.info.lifecycle_stage != "active":
            return None
        names = found.data.metrics
        return {name: max(m.step for m in self._client.get_metric_history(run, name)) for name in names}


def _make_key(group: str, name: str) -> str:
    """Replace characters that MLflow does not allow: a task may give its metrics any name."""
    return _NOT_ALLOWED.sub("_", f"{group}/{name}")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = prefix + _NOT_ALLOWED.sub("_", str(name))
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        else:
            yield key[:250], str(value)[:MAX_CHARS]
