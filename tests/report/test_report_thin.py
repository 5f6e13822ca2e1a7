"""Curves are thinned without losing their extremes, and records are read as they grow, damaged or not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import long_run
import numpy as np
import pytest

from narrowgauge.errors import UsageError
from narrowgauge.report import thin
from narrowgauge.report.story import Story
from narrowgauge.report.tail import Tail
from narrowgauge.runs import record


def test_a_short_curve_is_kept_as_it_is() -> None:
    curve = thin.thin(np.array([1.0, 2.0, 3.0]), np.array([5.5, math.nan, 4.25]))
    assert curve == {"x": [1, 2, 3], "y": [5.5, None, 4.25], "per": 1}
    assert thin.thin(np.array([]), np.array([]))["x"] == []


def test_a_long_curve_keeps_its_mean_and_every_spike() -> None:
    steps = np.arange(1.0, 100_001.0)
    values = np.ones(100_000)
    values[54_321], values[70_000] = 1e6, -7.0
    values[[10, 11]] = math.inf, math.nan
    curve = thin.thin(steps, values)
    assert len(curve["x"]) == len(curve["y"]) == 2000 and curve["per"] == 50
    assert max(curve["hi"]) == 1e6 and min(curve["lo"]) == -7
    assert curve["y"][0] == 1, "what is not finite takes no part in a mean"
    assert np.mean(curve["y"]) == pytest.approx((99_996 + 1e6 - 7) / 100_000, rel=1e-3)
    assert curve["x"] == sorted(curve["x"]) and curve["x"][0] == 25.5


def test_jumps_keep_values_that_were_there() -> None:
    steps = np.arange(1.0, 5001.0)
    scale = np.where(steps < 2600, 65536.0, 32768.0)
    curve = thin.thin(steps, scale, 100, last=True)
    assert set(curve["y"]) == {65536, 32768}
    broken = np.full(10, math.nan)
    assert thin.thin(steps[:10], broken, 2, last=True)["y"] == [None, None]


def test_marks_are_single_or_counted() -> None:
    steps = np.arange(1.0, 10_001.0)
    few = np.isin(steps, [7, 9000])
    assert thin.rug(steps, few, 100) == [[7, 1], [9000, 1]]
    many = steps % 2 == 0
    counted = thin.rug(steps, many, 100)
    assert len(counted) == 100 and sum(n for _, n in counted) == 5000


@pytest.mark.parametrize(("value", "shown"), [(2.0**20, 1048576), (1 / 3, 0.333333), (math.inf, None), (None, None)])
def test_numbers_are_short(value: float | None, shown: float | None) -> None:
    assert thin.short(value) == shown


def test_a_tail_reads_on_and_passes_over_what_is_damaged(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    assert list(tail.read()) == [] and not tail.was_replaced()
    path = tmp_path / record.EVENTS
    path.write_bytes(b'{"kind":"step","step":1}\nnot json\n[1]\n{"kind":"st')
    tail.was_replaced()
    assert [event["step"] for event in tail.read()] == [1] and tail.damaged == 2
    with path.open("ab") as file:
        file.write(b'ep","step":2}\n')
    assert not tail.was_replaced()
    assert [event["step"] for event in tail.read()] == [2] and list(tail.read()) == []
    other = tmp_path / "other"
    other.write_bytes(b'{"kind":"step","step":9}\n')
    other.replace(path)
    assert tail.was_replaced() and [event["step"] for event in tail.read()] == [9] and tail.damaged == 0


def test_a_story_tells_the_run(tmp_path: Path) -> None:
    story = Story(long_run.write_run(tmp_path / "run", 400, tensors=6, every=40))
    assert story.update() and not story.update()
    told = story.describe(2000, 10**6, 10**4)
    assert (told["step"], told["planned"], told["state"], told["skipped"]) == (400, 400, "finished", 0)
    assert told["recipe"] == "fp16" and told["summary"]["parameters"] == 124_000_000
    assert len(told["curves"]["loss"]["x"]) == 400 and told["broken"]["loss"] == [[300, 1]]
    assert told["evals"]["accuracy"][-1] == [400, 1] and len(told["evals"]["loss"]) == 20
    assert told["findings"][0]["rule"] == "underflow" and told["findings"][0]["step"] == 400
    json.dumps(told, allow_nan=False)


def test_a_story_grows_and_starts_anew_after_a_resume(tmp_path: Path) -> None:
    folder = long_run.write_run(tmp_path / "run", 30, end=False)
    story = Story(folder)
    story.update()
    assert story.state == "running" and story.step == 30
    with record.Record(folder) as book:
        book.append("step", 31, loss=2.0, lr=1.0, grad_norm=1.0, loss_scale=1.0, applied=False, tokens_per_s=None)
    assert story.update() and story.step == 31 and not story.applied[-1]
    record.truncate_after(folder, 10)
    assert story.update() and story.step == 10 and len(story.steps) == 10


def test_a_story_survives_any_line(tmp_path: Path) -> None:
    folder = long_run.write_run(tmp_path / "run", 5, end=False)
    lines = [
        {"kind": "step"},
        {"kind": "step", "step": 6, "loss": [1]},
        {"kind": "step", "step": "x", "loss": 1},
        {"kind": "look", "step": 6, "readings": [{"k": "weight"}, None, 3]},
        {"kind": "look", "step": 6, "readings": None},
        {"kind": "look"},
        {"kind": "finding", "step": None},
        {"kind": "foretelling", "format": "fp16", "breaks": [None, {"module": "a"}]},
        {"kind": "eval", "step": 6, "loss": "nonsense"},
        {"kind": "end", "step": 6, "findings": [3]},
        {"kind": ["odd"]},
        {"kind": "unknown", "step": 1},
        {},
    ]
    with (folder / record.EVENTS).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.write('{"kind":"step","step":7,"lo')
    story = Story(folder)
    story.update()
    told = story.describe(100, 10**5, 100)
    assert told["step"] >= 5 and story.damaged >= 8 and len(story.steps) == 5
    json.dumps(told, allow_nan=False)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        Story(tmp_path)
