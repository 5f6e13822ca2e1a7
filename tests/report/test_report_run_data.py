"""The data of a run: read from its record, updated while it grows, robust against any line."""

from __future__ import annotations

import json
from pathlib import Path

import example_run
import pytest

from narrowgauge.errors import UsageError
from narrowgauge.report.run_data import RunData
from narrowgauge.runs import record


def test_run_data_describes_the_run(tmp_path: Path) -> None:
    run = RunData(example_run.write_run(tmp_path / "run", 400, tensors=6, every=40))
    assert run.update() and not run.update()
    described = run.describe(2000, 10**6, 10**4)
    assert (described["step"], described["planned"], described["state"], described["skipped"]) == (
        400,
        400,
        "finished",
        0,
    )
    assert described["recipe"] == "fp16" and described["summary"]["parameters"] == 124_000_000
    assert len(described["curves"]["loss"]["x"]) == 400 and described["nonfinite"]["loss"] == [[300, 1]]
    assert described["evals"]["accuracy"][-1] == [400, 1] and len(described["evals"]["loss"]) == 20
    assert described["findings"][0]["rule"] == "underflow" and described["findings"][0]["step"] == 400
    json.dumps(described, allow_nan=False)


def test_run_data_grows_and_restarts_after_a_resume(tmp_path: Path) -> None:
    folder = example_run.write_run(tmp_path / "run", 30, end=False)
    run = RunData(folder)
    run.update()
    assert run.state == "running" and run.step == 30
    with record.Record(folder) as book:
        book.append("step", 31, loss=2.0, lr=1.0, grad_norm=1.0, loss_scale=1.0, applied=False, tokens_per_s=None)
    assert run.update() and run.step == 31 and not run.applied[-1]
    record.truncate_after(folder, 10)
    assert run.update() and run.step == 10 and len(run.steps) == 10


def test_run_data_survives_any_line(tmp_path: Path) -> None:
    folder = example_run.write_run(tmp_path / "run", 5, end=False)
    lines = [
        {"kind": "step"},
        {"kind": "step", "step": 6, "loss": [1]},
        {"kind": "step", "step": "x", "loss": 1},
        {"kind": "look", "step": 6, "readings": [{"k": "weight"}, None, 3]},
        {"kind": "look", "step": 6, "readings": None},
        {"kind": "look"},
        {"kind": "finding", "step": None},
        {"kind": "foretelling", "format": "fp16", "breaks": [None, {"module": "a"}]},
        {"kind": "prediction", "format": "fp8", "breaks": []},
        {"kind": "eval", "step": 6, "loss": "nonsense"},
        {"kind": "end", "step": 6, "findings": [3]},
        {"kind": ["odd"]},
        {"kind": "unknown", "step": 1},
        {},
    ]
    with (folder / record.EVENTS).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.write('{"kind":"step","step":7,"lo')
    run = RunData(folder)
    run.update()
    described = run.describe(100, 10**5, 100)
    assert described["step"] >= 5 and run.damaged >= 8 and len(run.steps) == 5
    json.dumps(described, allow_nan=False)


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.json"):
        RunData(tmp_path)
