"""MLflow: a run in a store inside the run's folder, or wherever MLFLOW_TRACKING_URI points.

Numbers are sent in batches. A resumed run goes on in its MLflow run. Where a killed life got further than the
checkpoint that is taken up, MLflow holds numbers that the record has taken back, and has no way to do the same: a new
run takes the old one's place, which is deleted (as MLflow deletes: it can be restored).
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.runs.trackers.base import Unavailable, history

EXPERIMENT = "narrowgauge"
FOLDER, IDENTITY = "mlflow", "run-id"
MOST_METRICS, MOST_PARAMETERS, MOST_CHARS = 1000, 100, 5000
"""What MLflow takes in one call, and in one value."""
_ODD = re.compile(r"[^/\w.\- ]")


class MLflow:
    """A run of MLflow's."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any], first_step: int) -> None:
        # MLflow would rather have a database, for which its small package lacks the libraries; and it reports its use.
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
        for group, step, values in history(folder, first_step):
            lacking = {name: v for name, v in values.items() if step > held.get(_key(group, name), -1)}
            self.add(group, step, lacking)

    def add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        for name, value in values.items():
            self._pending.append(self._entities.Metric(_key(group, name), float(value), now, step))
        if len(self._pending) >= MOST_METRICS:
            self.flush()

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._findings.append(f"step {step}, {finding['severity']}: {finding['where']}: {finding['detail']}")
        self._client.set_tag(self._id, "narrowgauge.findings", "\n".join(self._findings)[:MOST_CHARS])

    def flush(self) -> None:
        while self._pending:
            self._client.log_batch(self._id, metrics=self._pending[:MOST_METRICS])
            del self._pending[:MOST_METRICS]

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        self.flush()
        status = "FAILED" if result is None else "KILLED" if result.get("interrupted") else "FINISHED"
        self._client.set_terminated(self._id, status)

    def _find_run(self, folder: Path, configuration: Mapping[str, Any], first_step: int) -> tuple[str, dict[str, int]]:
        """The run to go on with, and the last step it holds of each number."""
        old = self._path.read_text().strip() if self._path.is_file() else ""
        held = self._held(old) if old else None
        if held is not None:
            if max(held.values(), default=-1) < first_step:
                self._client.update_run(old, status="RUNNING")
                return old, held
            self._client.set_tag(old, "narrowgauge.superseded", "the run was taken up from an earlier step")
            self._client.delete_run(old)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        known = self._client.get_experiment_by_name(experiment)
        home = known.experiment_id if known else self._client.create_experiment(experiment)
        made = str(self._client.create_run(home, run_name=folder.name).info.run_id)
        self._path.write_text(f"{made}\n")
        parameters = [self._entities.Param(name, text) for name, text in _flat(configuration)]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(made, params=parameters[start : start + MOST_PARAMETERS])
        return made, {}

    def _held(self, run: str) -> dict[str, int] | None:
        """The last step of each number; None where the user has removed the run."""
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


def _key(group: str, name: str) -> str:
    """A name that MLflow takes: a task's own metric may be called anything."""
    return _ODD.sub("_", f"{group}/{name}")


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = before + _ODD.sub("_", str(name))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key[:250], str(value)[:MOST_CHARS]
