"""Trackers have the recorded metrics, also after resuming and kills. A tracker that fails prints one line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.runs import record, trackers
from narrowgauge.runs.trackers import background
from narrowgauge.runs.trackers.background import BackgroundTracker
from narrowgauge.runs.trackers.base import Notify, Tracker, read_history
from narrowgauge.runs.trackers.registry import TRACKERS, TrackerGroup, parse_names, start_trackers
from pace import at_most

Metrics = dict[tuple[str, int], float]
CONFIGURATION = {"task": "tiny", "settings": {"steps": 9, "learning_rate": 0.1, "odd (name)": None}, "options": {}}
FINDING = {"rule": "r", "severity": "warning", "where": "layer", "detail": "too small", "fix": "scale"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # set here, so that it is unset after the test
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")
    monkeypatch.setattr(background, "CLOSE_TIMEOUT_S", 600.0)  # no time limit of ours under load


def numbers(step: int, attempt: int = 0) -> dict[str, float]:
    """Return difficult numbers: not exact in decimal, not finite, tiny."""
    loss = math.nan if step == 3 else math.inf if step == 4 else 1 / (step + 2) + attempt
    return {"loss": loss, "lr": 0.1 / step, "grad_norm": 1e-300 * step}


def track_steps(
    names: str, folder: Path, steps: range, attempt: int = 0, close: bool = True, lines: list[str] | None = None
) -> TrackerGroup:
    """Use the record and the trackers as Trainer does, over some steps."""
    lines = [] if lines is None else lines
    record.truncate_after(folder, steps.start - 1) if (folder / record.EVENTS).exists() else folder.mkdir(exist_ok=True)
    tracking = start_trackers(parse_names(names), folder, CONFIGURATION, steps.start, lines.append)
    with record.Record(folder) as events:
        for step in steps:
            values = numbers(step, attempt)
            events.append("step", step, **values, tokens_per_s=None, applied=True, time=0.5)
            tracking.log_metrics("train", step, values)
            if step % 4 == 0:
                events.append("eval", step, loss=values["lr"], accuracy=0.25)
                tracking.log_metrics("eval", step, {"loss": values["lr"], "accuracy": 0.25})
                events.append("look", step, applied=True, readings=[])
    if close:
        tracking.log_finding(steps[-1], FINDING)
        tracking.close({"steps": steps[-1], "loss_last": 0.5, "interrupted": False})
    return tracking


def recorded(folder: Path) -> Metrics:
    metrics: Metrics = {}
    for group, step, values in read_history(folder, 10**9):
        metrics |= {(f"{group}/{name}", step): value for name, value in values.items()}
    return metrics


def same(one: Mapping[Any, float], other: Mapping[Any, float]) -> bool:
    """Compare to the last bit. NaN equals NaN."""
    return {key: repr(float(v)) for key, v in one.items()} == {key: repr(float(v)) for key, v in other.items()}


def chunks(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: seven bytes, then a LevelDB log (crc, length, type) in blocks of 32 KiB."""
    data, place, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if kind == 0:
            place += left
            continue
        if place + 7 + length > len(data):  # not written to its end yet
            return
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or its last piece
            yield whole
            whole = b""


def read_wandb(path: Path) -> Metrics:
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    metrics: Metrics = {}
    for chunk in chunks(path):
        entry = internal.Record()
        entry.ParseFromString(chunk)
        if entry.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in entry.history.item}
            step = int(items["_step"])
            metrics |= {(key, step): float(value) for key, value in items.items() if not key.startswith("_")}
    return metrics


def eventually(check: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether a check passes in time: W&B's process is still writing when `finish` returns."""
    end = time.monotonic() + seconds
    while not (passed := check()) and time.monotonic() < end:
        time.sleep(0.1)
    return passed


def wandb_holds_all(path: Path, folder: Path) -> bool:
    return eventually(lambda: same(read_wandb(path), recorded(folder)))


def wandb_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def read_mlflow(folder: Path) -> tuple[Metrics, Any]:
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(tracking_uri=(folder / "mlflow").resolve().as_uri())
    experiment = client.get_experiment_by_name("narrowgauge")
    (run,) = client.search_runs([experiment.experiment_id])
    held = [m for name in run.data.metrics for m in client.get_metric_history(run.info.run_id, name)]
    metrics = {(metric.key, metric.step): metric.value for metric in held}
    assert len(metrics) == len(held)  # none twice
    return metrics, run


def test_every_tracker_module_is_registered() -> None:
    """A new tracker needs its own file and a line in the registry, and nothing else."""
    modules = {path.stem for path in Path(trackers.__path__[0]).glob("*.py")}
    assert modules - {"__init__", "base", "background", "registry"} == set(TRACKERS)
    for name, tracker in TRACKERS.items():
        assert issubclass(tracker, Tracker) and tracker.__module__ == f"narrowgauge.runs.trackers.{name}"
        assert tracker.label


def test_names_are_parsed() -> None:
    assert parse_names("tensorboard") == ("tensorboard",)
    assert parse_names(" WandB, mlflow ,wandb") == ("wandb", "mlflow")
    assert parse_names("none") == ()
    for wrong in ("", "wand", "none,wandb"):
        with pytest.raises(UsageError, match="tensorboard, wandb, mlflow"):
            parse_names(wrong)


def test_wandb_holds_the_recorded_metrics(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    lines: list[str] = []
    folder = tmp_path / "run"
    track_steps("wandb", folder, range(1, 10), lines=lines)
    assert lines == []
    (path,) = wandb_files(folder)
    assert wandb_holds_all(path, folder) and len(recorded(folder)) == 9 * 3 + 2 * 2
    identity = (folder / "wandb" / "run-id").read_text().strip()
    assert path.name == f"run-{identity}.wandb"
    for text in (b"too small", b"learning_rate", b"result/loss_last"):
        assert eventually(lambda text=text: text in b"".join(chunks(path))), text


def test_a_resumed_run_keeps_its_wandb_id_and_one_file(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    track_steps("wandb", folder, range(1, 7), close=True)
    (first,) = wandb_files(folder)
    track_steps("wandb", folder, range(5, 10), attempt=1)  # steps 5 and 6 are repeated
    (second,) = wandb_files(folder)
    assert second.name == first.name
    assert wandb_holds_all(second, folder)
    assert len(list((folder / "wandb").glob("superseded-0-*"))) == 1


def test_mlflow_holds_the_recorded_metrics(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    lines: list[str] = []
    folder = tmp_path / "run"
    track_steps("mlflow", folder, range(1, 10), lines=lines)
    assert lines == []
    metrics, run = read_mlflow(folder)
    assert same(metrics, recorded(folder))
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["settings.learning_rate"] == "0.1" and "settings.odd _name_" in run.data.params
    assert "too small" in run.data.tags["narrowgauge.findings"]


def test_a_resumed_run_continues_its_mlflow_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    track_steps("mlflow", folder, range(1, 6))
    _, first = read_mlflow(folder)
    track_steps("mlflow", folder, range(6, 10), attempt=1)
    metrics, second = read_mlflow(folder)
    assert first.info.run_id == second.info.run_id
    assert same(metrics, recorded(folder))


def test_a_new_mlflow_run_replaces_one_with_dropped_steps(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    track_steps("mlflow", folder, range(1, 8))
    _, first = read_mlflow(folder)
    track_steps("mlflow", folder, range(5, 10), attempt=1)
    metrics, second = read_mlflow(folder)
    assert first.info.run_id != second.info.run_id
    assert same(metrics, recorded(folder))


def test_a_resumed_run_sends_mlflow_the_missing_steps(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    track_steps("mlflow", folder, range(1, 4))
    track_steps("tensorboard", folder, range(4, 7))  # as if killed before anything was sent
    track_steps("mlflow", folder, range(7, 10))
    assert same(read_mlflow(folder)[0], recorded(folder))


def test_a_deleted_mlflow_run_is_created_again(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    folder = tmp_path / "run"
    track_steps("mlflow", folder, range(1, 4))
    client = tracking.MlflowClient(tracking_uri=(folder / "mlflow").resolve().as_uri())
    client.delete_run((folder / "mlflow" / "run-id").read_text().strip())
    track_steps("mlflow", folder, range(4, 7))
    assert same(read_mlflow(folder)[0], recorded(folder))


KILLED = """
import sys, time, os, signal
sys.path[:0] = sys.argv[2].split(os.pathsep)
from pathlib import Path
import test_trackers
folder = Path(sys.argv[1])
test_trackers.background.FLUSH_EVERY_S = 0.05
test_trackers.track_steps("wandb,mlflow,tensorboard", folder, range(1, 8), close=False)
while not any(folder.glob(sys.argv[3])):
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("after", ["*", "mlflow/*/*/metrics/train/loss"], ids=["immediately", "after sending"])
def test_stores_of_a_killed_run_are_completed_on_resume(tmp_path: Path, after: str) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    here = Path(__file__).parent
    command = [sys.executable, "-c", KILLED, str(folder), f"{here}{os.pathsep}{here.parent}", after]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == -9
    lines: list[str] = []
    track_steps("wandb,mlflow,tensorboard", folder, range(5, 10), attempt=1, lines=lines)
    assert lines == []
    assert wandb_holds_all(wandb_files(folder)[-1], folder)
    assert same(read_mlflow(folder)[0], recorded(folder))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    lines: list[str] = []
    track_steps(name, tmp_path / "run", range(1, 5), lines=lines)
    assert len(lines) == 1 and "is not installed" in lines[0] and "events.jsonl" in lines[0]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_an_unwritable_store_is_one_line(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text("in the way")
    lines: list[str] = []
    track_steps(name, folder, range(1, 5), lines=lines)
    assert len(lines) == 1 and "continuing without it" in lines[0] and "\n" not in lines[0]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_full_disk_is_one_line(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    place = tmp_path / "run" / name
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        lines: list[str] = []
        track_steps(name, tmp_path / "run", range(1, 3000), lines=lines)
        assert len(lines) == 1 and "o space left" in lines[0]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_without_a_login_wandb_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    lines: list[str] = []
    track_steps("wandb", tmp_path / "run", range(1, 5), lines=lines)
    assert len(lines) == 1 and "wandb sync" in lines[0]
    assert wandb_holds_all(wandb_files(tmp_path / "run")[0], tmp_path / "run")


def test_without_a_network_wandb_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    lines: list[str] = []
    track_steps("wandb", tmp_path / "run", range(1, 5), lines=lines)
    assert len(lines) == 1 and "wandb sync" in lines[0] and "\n" not in lines[0]
    assert wandb_holds_all(wandb_files(tmp_path / "run")[0], tmp_path / "run")


class Stuck(Tracker):
    """A tracker that waits for its network forever."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.seen: list[int] = []

    def log_metrics(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self.release.wait()
        self.seen.append(step)

    def log_finding(self, step: int, finding: Mapping[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self, result: Mapping[str, Any] | None = None) -> None: ...


def test_training_never_waits_for_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CLOSE_TIMEOUT_S", 0.1)
    stuck, lines = Stuck(), list[str]()
    tracker = BackgroundTracker("Stuck", lambda note: stuck, lines.append)
    with at_most(1):
        for step in range(10_000):
            tracker.log_metrics("train", step, {"loss": 1.0})
    tracker.close({})
    tracker.close({})
    assert len(lines) == 1 and "not waiting for it" in lines[0]
    stuck.release.set()


def test_a_full_queue_drops_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_QUEUED", 100)
    stuck, lines = Stuck(), list[str]()
    tracker = BackgroundTracker("Stuck", lambda note: stuck, lines.append)
    for step in range(1000):
        tracker.log_metrics("train", step, {"loss": 1.0})
    tracker.close()
    assert len(lines) == 1 and "does not accept metrics" in lines[0]
    stuck.release.set()


def test_lines_are_printed_by_the_training_thread() -> None:
    tellers: list[int] = []

    def fail(note: Notify) -> Tracker:
        note("first a note")
        raise SystemExit("then\nthe end")

    tracker = BackgroundTracker("It", fail, lambda line: tellers.append(threading.get_ident()))
    tracker.close()
    assert tellers == [threading.get_ident()] * 2
