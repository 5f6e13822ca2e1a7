"""The record has one line per event, tolerates an incomplete last line, and is truncated before a run resumes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.errors import UsageError
from narrowgauge.runs import json_lines as lines
from narrowgauge.runs import record
from pace import at_most


def fill(folder: Path, steps: int) -> None:
    with record.Record(folder) as events:
        for step in range(1, steps + 1):
            events.append("step", step, loss=1 / step, applied=True)
            if step % 2 == 0:
                events.append("eval", step, loss=2 / step)


def test_events_come_back_in_order(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    events = list(record.read(tmp_path))
    assert [(e["kind"], e["step"]) for e in events] == [
        ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4)
    ]  # fmt: skip
    assert events[3]["loss"] == 1 / 3


def test_nan_and_infinity_round_trip(tmp_path: Path) -> None:
    with record.Record(tmp_path) as events:
        events.append("step", 1, loss=math.nan, grad_norm=math.inf, lr=-math.inf)
        events.append("sample", 1, text="nan")
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    step, sample = record.read(tmp_path)
    assert math.isnan(step["loss"]) and step["grad_norm"] == math.inf and step["lr"] == -math.inf
    assert sample["text"] == "nan"


def test_append_writes_before_it_returns(tmp_path: Path) -> None:
    with record.Record(tmp_path) as events:
        events.append("step", 1, loss=0.5)
        assert len(list(record.read(tmp_path))) == 1


def test_an_incomplete_last_line_is_ignored_at_every_length(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    path = tmp_path / "events.jsonl"
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in range(last, len(whole)):
        path.write_bytes(whole[:length])
        assert [e["step"] for e in record.read(tmp_path)] == [1, 2, 2]


def test_damage_error_names_the_line(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    path = tmp_path / "events.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{broken", *lines[1:]]) + "\n")
    with pytest.raises(UsageError, match="damaged in line 2"):
        list(record.read(tmp_path))
    path.write_text("\n".join([lines[0], lines[1] + "," + lines[2], *lines[3:]]) + "\n")
    with pytest.raises(UsageError, match="damaged in line 2"):
        list(record.read(tmp_path))


def test_truncation_removes_later_events(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    with record.Record(tmp_path) as events:
        events.append("end", 5, interrupted=True)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind":"st')
    record.truncate_after(tmp_path, 3)
    fields = [(e["kind"], e["step"]) for e in record.read(tmp_path)]
    assert fields == [("step", 1), ("step", 2), ("eval", 2), ("step", 3)]
    assert (tmp_path / "events.jsonl").read_bytes().endswith(b"}\n")
    assert [p.name for p in tmp_path.iterdir()] == ["events.jsonl"]


def test_truncation_removes_an_end_at_the_same_step(tmp_path: Path) -> None:
    with record.Record(tmp_path) as events:
        events.append("step", 1, loss=1.0)
        events.append("end", 1, interrupted=True)
    record.truncate_after(tmp_path, 1)
    assert [e["kind"] for e in record.read(tmp_path)] == ["step"]


def test_many_events_are_written_and_read_fast_in_little_memory(tmp_path: Path) -> None:
    numbers = {"loss": 2.345678901234, "lr": 0.0001234, "grad_norm": 0.98765432101234, "loss_scale": 65536.0}
    with at_most(2, clock=time.process_time):  # the goal is a million in 10 s
        with record.Record(tmp_path) as events:
            for step in range(100_000):
                events.append("step", step, **numbers, tokens_per_s=123456.789012, applied=True, time=step * 0.0123)
        assert sum(event["step"] for event in record.read(tmp_path)) == 99_999 * 100_000 // 2
    tracemalloc.start()
    for _ in record.read(tmp_path):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30e6  # for any length: all events of this file would take 70 MB


@pytest.mark.parametrize("fast", [True, False])
def test_values_json_cannot_express_with_and_without_orjson(
    tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        monkeypatch.setattr(lines, "orjson", None)
    with record.Record(tmp_path) as events:
        events.append("end", 1, seed=2**70, by_layer={3: 0.5}, lr=np.float64(0.25), none=None, bad=[math.nan])
        events.append("step", 1, loss=math.inf, applied=True)
    end, step = record.read(tmp_path)
    assert end["by_layer"] == {"3": 0.5} and end["lr"] == 0.25 and end["none"] is None and end["bad"] == ["nan"]
    assert end["seed"] == pytest.approx(2.0**70) and step["loss"] == math.inf and step["applied"] is True


def test_configuration_round_trip_and_errors(tmp_path: Path) -> None:
    record.write_configuration(tmp_path, {"task": "tiny", "facts": {"entropy": math.inf}})
    assert record.read_configuration(tmp_path) == {"task": "tiny", "facts": {"entropy": "inf"}}
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        record.read_configuration(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(UsageError, match="holds no run"):
        record.read_configuration(tmp_path)


def test_reading_does_not_import_torch() -> None:
    code = "import sys; import narrowgauge.runs.record; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
