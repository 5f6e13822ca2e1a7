"""Saved JSON of other verbs is recognized by its fields and parsed."""

from __future__ import annotations

from pathlib import Path

import example_results
import pytest

from narrowgauge.report.inputs import open_inputs
from narrowgauge.report.pages import collect
from narrowgauge.report.saved_results import parse_timeline, read_result


def test_kinds_are_recognized(tmp_path: Path) -> None:
    kinds = [read_result(path)[0] for path in example_results.save_all(tmp_path)]
    assert kinds == ["validation", "bench", "memory", "roofline", "findings"]


OTHER_SCRIPTS = ("equal-loss", "muon-reach", "loss-gap", "bf16-at-the-end", "gradient-bias", "rounding-noise")
"""Results of scripts that train or measure errors: no benchmarks."""
BENCHMARKS = [
    path
    for path in sorted(Path("bench/results").glob("h200-*gpt2*.json"))
    if not any(name in path.name for name in OTHER_SCRIPTS)
]


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_benchmarks_of_this_repository_are_recognized(path: Path) -> None:
    kind, data = read_result(path)
    if "roofline" in path.name:
        assert kind == "roofline" and data["layers"][0]["measured_ms"] > 0
        return
    assert kind == "bench" and data["rows"][0]["tokens_per_s"] > 0


def test_incomplete_validation_is_accepted(tmp_path: Path) -> None:
    bare = {"reference": "a.csv", "candidates": {"b.csv": {"verdict": "inconclusive", "gap": None, "interval": None}}}
    [path] = example_results.save(tmp_path, bare=bare)
    kind, data = read_result(path)
    assert kind == "validation" and data["task"] == "" and data["candidates"]["b.csv"]["interval"] is None
    assert collect(open_inputs([path]))["summary"]["state"] == "warning"


def test_speed_at_equal_loss_is_read(tmp_path: Path) -> None:
    found = collect(open_inputs(example_results.save_all(tmp_path)))
    candidates, (bf16, fp8) = found["validations"][0]["candidates"], found["benches"][0]["rows"]
    assert found["benches"][0]["reference"] == "bf16"
    for one, ratio in ((candidates["bf16"], 1.43), (candidates["fp8"], None), (fp8, 1.43), (bf16, None)):
        assert one["equal_loss"] == ratio and one["equal_loss_interval"] == (None if ratio is None else [1.38, 1.47])


@pytest.mark.parametrize("speed", [None, [], 3, {}, {"ratio": "fast", "interval": [1]}, {"interval": [None, "nan"]}])
def test_a_damaged_speed_is_none(speed: object, tmp_path: Path) -> None:
    data = example_results.bench()
    data["to_loss"]["candidates"]["fp8"]["speed"] = speed
    [path] = example_results.save(tmp_path, bench=data)
    assert read_result(path)[1]["rows"][1]["equal_loss_interval"] is None
    assert read_result(path)[1]["rows"][1]["equal_loss"] is None
    data["to_loss"] = speed
    [path] = example_results.save(tmp_path, bench=data)
    assert read_result(path)[1]["rows"][1]["equal_loss"] is None


def test_timelines_have_several_forms() -> None:
    assert parse_timeline([["begin", 5], ["loss", 9]])[1] == {"label": "loss", "parts": {"total": 9}}
    given = [{"at": "loss", "weights": 3, "odd": 4}, ["end", {"weights": 2}], {"label": "x", "bytes": 1}, 7, ["a"]]
    assert [moment["parts"] for moment in parse_timeline(given)] == [{"weights": 3}, {"weights": 2}, {"total": 1}]
    assert parse_timeline(None) == [] and parse_timeline("text") == []


def test_minimal_roofline_is_accepted(tmp_path: Path) -> None:
    plain = {"gpu": {"name": "H100"}, "layers": [{"module": "a", "flops": 10, "bytes": 5, "ms": 2.0}, {"name": "b"}]}
    [path] = example_results.save(tmp_path, plain=plain)
    kind, data = read_result(path)
    assert kind == "roofline" and data["gpu"] == "H100"
    assert data["layers"][0]["intensity"] == 2 and data["layers"][0]["ms"] == 2.0
    assert data["layers"][1]["intensity"] is None
