"""Trackers: their stores hold the numbers of the record, through resumption and kills; their failures cost a line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.runs import record
from narrowgauge.runs.trackers import base

Story = dict[tuple[str, int], float]
CONFIGURATION = {"task": "tiny", "settings": {"steps": 9, "learning_rate": 0.1, "odd (name)": None}, "options": {}}
FINDING = {"rule": "r", "severity": "warning", "where": "layer", "detail": "too small", "fix": "scale"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # set here so that it is taken back
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def numbers(step: int, life: int = 0) -> dict[str, float]:
    """Awkward ones: not exact in decimal, not finite, tiny."""
    loss = math.nan if step == 3 else math.inf if step == 4 else 1 / (step + 2) + life
    return {"loss": loss, "lr": 0.1 / step, "grad_norm": 1e-300 * step}


def live(
    names: str, folder: Path, steps: range, life: int = 0, close: bool = True, told: list[str] | None = None
) -> base.Trackers:
    """What Trainer does with the record and the trackers, over some steps."""
    lines: list[str] = [] if told is None else told
    record.cut_after(folder, steps.start - 1) if (folder / record.EVENTS).exists() else folder.mkdir(exist_ok=True)
    tracking = base.begin(base.parse(names), folder, CONFIGURATION, steps.start, lines.append)
    with record.Record(folder) as events:
        for step in steps:
            values = numbers(step, life)
            events.append("step", step, **values, tokens_per_s=None, applied=True, time=0.5)
            tracking.add("train", step, values)
            if step % 4 == 0:
                events.append("eval", step, loss=values["lr"], accuracy=0.25)
                tracking.add("eval", step, {"loss": values["lr"], "accuracy": 0.25})
                events.append("look", step, applied=True, readings=[])
    if close:
        tracking.finding(steps[-1], FINDING)
        tracking.close({"steps": steps[-1], "loss_last": 0.5, "interrupted": False})
    return tracking


def recorded(folder: Path) -> Story:
    story: Story = {}
    for group, step, values in base.history(folder, 10**9):
        story |= {(f"{group}/{name}", step): value for name, value in values.items()}
    return story


def same(one: Mapping[Any, float], other: Mapping[Any, float]) -> bool:
    """To the last bit, NaN included."""
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
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def read_wandb(path: Path) -> Story:
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    story: Story = {}
    for chunk in chunks(path):
        entry = internal.Record()
        entry.ParseFromString(chunk)
        if entry.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in entry.history.item}
            step = int(items["_step"])
            story |= {(key, step): float(value) for key, value in items.items() if not key.startswith("_")}
    return story


def wandb_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def read_mlflow(folder: Path) -> tuple[Story, Any]:
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(tracking_uri=(folder / "mlflow").resolve().as_uri())
    experiment = client.get_experiment_by_name("narrowgauge")
    (run,) = client.search_runs([experiment.experiment_id])
    held = [m for name in run.data.metrics for m in client.get_metric_history(run.info.run_id, name)]
    story = {(metric.key, metric.step): metric.value for metric in held}
    assert len(story) == len(held)  # none twice
    return story, run


def test_names_are_parsed() -> None:
    assert base.parse("tensorboard") == ("tensorboard",)
    assert base.parse(" WandB, mlflow ,wandb") == ("wandb", "mlflow")
    assert base.parse("none") == ()
    for wrong in ("", "wand", "none,wandb"):
        with pytest.raises(UsageError, match="tensorboard, wandb, mlflow"):
            base.parse(wrong)


def test_wandb_holds_the_numbers_of_the_record(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    told: list[str] = []
    folder = tmp_path / "run"
    live("wandb", folder, range(1, 10), told=told)
    assert told == []
    (path,) = wandb_files(folder)
    assert same(read_wandb(path), recorded(folder)) and len(recorded(folder)) == 9 * 3 + 2 * 2
    identity = (folder / "wandb" / "run-id").read_text().strip()
    assert path.name == f"run-{identity}.wandb"
    content = b"".join(chunks(path))
    assert b"too small" in content and b"learning_rate" in content and b"result/loss_last" in content


def test_a_resumed_run_at_wandb_has_the_same_id_and_one_story(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    live("wandb", folder, range(1, 7), close=True)
    (first,) = wandb_files(folder)
    live("wandb", folder, range(5, 10), life=1)  # steps 5 and 6 are taken back
    (second,) = wandb_files(folder)
    assert second.name == first.name
    assert same(read_wandb(second), recorded(folder))
    assert len(list((folder / "wandb").glob("superseded-0-*"))) == 1


def test_mlflow_holds_the_numbers_of_the_record(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    told: list[str] = []
    folder = tmp_path / "run"
    live("mlflow", folder, range(1, 10), told=told)
    assert told == []
    story, run = read_mlflow(folder)
    assert same(story, recorded(folder))
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["settings.learning_rate"] == "0.1" and "settings.odd _name_" in run.data.params
    assert "too small" in run.data.tags["narrowgauge.findings"]


def test_a_resumed_run_goes_on_in_its_mlflow_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    live("mlflow", folder, range(1, 6))
    _, first = read_mlflow(folder)
    live("mlflow", folder, range(6, 10), life=1)
    story, second = read_mlflow(folder)
    assert first.info.run_id == second.info.run_id
    assert same(story, recorded(folder))


def test_what_mlflow_cannot_take_back_a_new_run_leaves_out(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    live("mlflow", folder, range(1, 8))
    _, first = read_mlflow(folder)
    live("mlflow", folder, range(5, 10), life=1)
    story, second = read_mlflow(folder)
    assert first.info.run_id != second.info.run_id
    assert same(story, recorded(folder))


def test_what_mlflow_did_not_get_is_sent_by_the_next_life(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    live("mlflow", folder, range(1, 4))
    live("tensorboard", folder, range(4, 7))  # as if killed before anything was sent
    live("mlflow", folder, range(7, 10))
    assert same(read_mlflow(folder)[0], recorded(folder))


def test_a_run_that_was_removed_from_mlflow_is_made_again(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    folder = tmp_path / "run"
    live("mlflow", folder, range(1, 4))
    client = tracking.MlflowClient(tracking_uri=(folder / "mlflow").resolve().as_uri())
    client.delete_run((folder / "mlflow" / "run-id").read_text().strip())
    live("mlflow", folder, range(4, 7))
    assert same(read_mlflow(folder)[0], recorded(folder))


KILLED = """
import sys, time, os, signal
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_trackers
folder = Path(sys.argv[1])
test_trackers.trackers.SEND_EVERY_S = 0.05
test_trackers.live("wandb,mlflow,tensorboard", folder, range(1, 8), close=False)
while not any(folder.glob(sys.argv[3])):
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("after", ["*", "mlflow/*/*/metrics/train/loss"], ids=["at once", "when numbers were sent"])
def test_a_killed_life_leaves_stores_that_the_next_one_completes(tmp_path: Path, after: str) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    folder = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent), after]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == -9
    told: list[str] = []
    live("wandb,mlflow,tensorboard", folder, range(5, 10), life=1, told=told)
    assert told == []
    assert same(read_wandb(wandb_files(folder)[-1]), recorded(folder))
    assert same(read_mlflow(folder)[0], recorded(folder))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_the_package_it_costs_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    told: list[str] = []
    live(name, tmp_path / "run", range(1, 5), told=told)
    assert len(told) == 1 and "is not installed" in told[0] and "events.jsonl" in told[0]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_store_that_cannot_be_written_costs_a_line(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text("in the way")
    told: list[str] = []
    live(name, folder, range(1, 5), told=told)
    assert len(told) == 1 and "going on without it" in told[0] and "\n" not in told[0]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_full_disk_costs_a_line(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    place = tmp_path / "run" / name
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        told: list[str] = []
        live(name, tmp_path / "run", range(1, 3000), told=told)
        assert len(told) == 1 and "o space left" in told[0]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_nobody_logged_in_means_offline_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    told: list[str] = []
    live("wandb", tmp_path / "run", range(1, 5), told=told)
    assert len(told) == 1 and "wandb sync" in told[0]
    assert same(read_wandb(wandb_files(tmp_path / "run")[0]), recorded(tmp_path / "run"))


def test_without_a_network_it_goes_on_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    told: list[str] = []
    live("wandb", tmp_path / "run", range(1, 5), told=told)
    assert len(told) == 1 and "wandb sync" in told[0] and "\n" not in told[0]
    assert same(read_wandb(wandb_files(tmp_path / "run")[0]), recorded(tmp_path / "run"))


class Stuck:
    """A tracker whose network does not answer."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.seen: list[int] = []

    def add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self.release.wait()
        self.seen.append(step)

    def finding(self, step: int, finding: Mapping[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self, result: Mapping[str, Any] | None = None) -> None: ...


def test_training_never_waits_for_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PATIENCE_S", 0.1)
    stuck, told = Stuck(), list[str]()
    posted = base.Posted("Stuck", lambda note: stuck, told.append)
    began = time.perf_counter()
    for step in range(10_000):
        posted.add("train", step, {"loss": 1.0})
    assert time.perf_counter() - began < 1
    posted.close({})
    posted.close({})
    assert len(told) == 1 and "left behind" in told[0]
    stuck.release.set()


def test_numbers_that_nobody_takes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MOST_WAITING", 100)
    stuck, told = Stuck(), list[str]()
    posted = base.Posted("Stuck", lambda note: stuck, told.append)
    for step in range(1000):
        posted.add("train", step, {"loss": 1.0})
    posted.close()
    assert len(told) == 1 and "takes no numbers" in told[0]
    stuck.release.set()


def test_lines_are_told_by_the_thread_that_trains() -> None:
    tellers: list[int] = []

    def fail(note: base.Tell) -> base.Sender:
        note("first a note")
        raise SystemExit("then\nthe end")

    posted = base.Posted("It", fail, lambda line: tellers.append(threading.get_ident()))
    posted.close()
    assert tellers == [threading.get_ident()] * 2
