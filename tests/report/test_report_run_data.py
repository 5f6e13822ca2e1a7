"""Downsampling keeps extremes; records are read while they grow, even if damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import example_run
import numpy as np
import pytest

from narrowgauge.errors import UsageError
from narrowgauge.report.downsample import bin_marks, downsample, round_number
from narrowgauge.report.event_reader import EventReader
from narrowgauge.report.run_data import RunData
from narrowgauge.runs import record


def test_short_curve_is_unchanged() -> None:
    curve = downsample(np.array([1.0, 2.0, 3.0]), np.array([5.5, math.nan, 4.25]))
    assert curve == {"x": [1, 2, 3], "y": [5.5, None, 4.25], "per": 1}
    assert downsample(np.array([]), np.array([]))["x"] == []


def test_long_curve_keeps_mean_and_spikes() -> None:
    steps = np.arange(1.0, 100_001.0)
    values = np.ones(100_000)
    values[54_321], values[70_000] = 1e6, -7.0
    values[[10, 11]] = math.inf, math.nan
    curve = downsample(steps, values)
    assert len(curve["x"]) == len(curve["y"]) == 2000 and curve["per"] == 50
    assert max(curve["hi"]) == 1e6 and min(curve["lo"]) == -7
    assert curve["y"][0] == 1, "means ignore values that are not finite"
    assert np.mean(curve["y"]) == pytest.approx((99_996 + 1e6 - 7) / 100_000, rel=1e-3)
    assert curve["x"] == sorted(curve["x"]) and curve["x"][0] == 25.5


def test_stepped_curves_keep_original_values() -> None:
    steps = np.arange(1.0, 5001.0)
    scale = np.where(steps < 2600, 65536.0, 32768.0)
    curve = downsample(steps, scale, 100, last=True)
    assert set(curve["y"]) == {65536, 32768}
    broken = np.full(10, math.nan)
    assert downsample(steps[:10], broken, 2, last=True)["y"] == [None, None]


def test_marks_are_listed_or_binned() -> None:
    steps = np.arange(1.0, 10_001.0)
    few = np.isin(steps, [7, 9000])
    assert bin_marks(steps, few, 100) == [[7, 1], [9000, 1]]
    many = steps % 2 == 0
    counted = bin_marks(steps, many, 100)
    assert len(counted) == 100 and sum(n for _, n in counted) == 5000


@pytest.mark.parametrize(("value", "shown"), [(2.0**20, 1048576), (1 / 3, 0.333333), (math.inf, None), (None, None)])
def test_numbers_are_rounded(value: float | None, shown: float | None) -> None:
    assert round_number(value) == shown


def test_event_reader_continues_and_skips_damaged_lines(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert list(reader.read()) == [] and not reader.was_replaced()
    path = tmp_path / record.EVENTS
    path.write_bytes(b'{"kind":"step","step":1}\nnot json\n[1]\n{"kind":"st')
    reader.was_replaced()
    assert [event["step"] for event in reader.read()] == [1] and reader.damaged == 2
    with path.open("ab") as file:
        file.write(b'ep","step":2}\n')
    assert not reader.was_replaced()
    assert [event["step"] for event in reader.read()] == [2] and list(reader.read()) == []
    other = tmp_path / "other"
    other.write_bytes(b'{"kind":"step","step":9}\n')
    other.replace(path)
    assert reader.was_replaced() and [event["step"] for event in reader.read()] == [9] and reader.damaged == 0


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
