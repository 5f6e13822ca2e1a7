"""Each path is known for what it is, by its fields; what is there is shown, what is not is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import long_run
import pytest
import saved_results

from narrowgauge.errors import UsageError
from narrowgauge.report import layers, words
from narrowgauge.report.pages import collect
from narrowgauge.report.sources import open_all, read_saved, timeline_of


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    kinds = [read_saved(path)[0] for path in saved_results.save_all(tmp_path)]
    assert kinds == ["validation", "bench", "memory", "roofline", "findings"]


@pytest.mark.parametrize("path", sorted(Path("bench/results").glob("h200-*gpt2*.json")), ids=lambda path: path.stem)
def test_benchmarks_of_this_project_are_known(path: Path) -> None:
    kind, data = read_saved(path)
    if "roofline" in path.name:
        assert kind == "roofline" and data["layers"][0]["measured_ms"] > 0
        return
    assert kind == "bench" and data["rows"][0]["tokens_per_s"] > 0


def test_a_validation_without_layers_or_numbers_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    bare = {"reference": "a.csv", "candidates": {"b.csv": {"verdict": "inconclusive", "gap": None, "interval": None}}}
    [path] = saved_results.save(tmp_path, bare=bare)
    kind, data = read_saved(path)
    assert kind == "validation" and data["task"] == "" and data["candidates"]["b.csv"]["interval"] is None
    assert collect(open_all([path]))["told"]["state"] == "warning"


def test_timelines_come_in_several_forms() -> None:
    assert timeline_of([["begin", 5], ["loss", 9]])[1] == {"label": "loss", "parts": {"total": 9}}
    given = [{"at": "loss", "weights": 3, "odd": 4}, ["end", {"weights": 2}], {"label": "x", "bytes": 1}, 7, ["a"]]
    assert [moment["parts"] for moment in timeline_of(given)] == [{"weights": 3}, {"weights": 2}, {"total": 1}]
    assert timeline_of(None) == [] and timeline_of("text") == []


def test_a_roofline_may_be_plainer(tmp_path: Path) -> None:
    plain = {"gpu": {"name": "H100"}, "layers": [{"module": "a", "flops": 10, "bytes": 5, "ms": 2.0}, {"name": "b"}]}
    [path] = saved_results.save(tmp_path, plain=plain)
    kind, data = read_saved(path)
    assert kind == "roofline" and data["gpu"] == "H100"
    assert data["layers"][0]["intensity"] == 2 and data["layers"][0]["ms"] == 2.0
    assert data["layers"][1]["intensity"] is None


def test_the_work_of_a_layer_is_added_up(tmp_path: Path) -> None:
    def work(phase: str, ms: float) -> dict[str, Any]:
        return {
            "path": "up",
            "kind": "product",
            "phase": phase,
            "flops": 8e9,
            "bytes": 1e6,
            "ms": ms,
            "bound": "compute",
        }

    layers_of = {name: {"step_ms": 9.0, "layers": [work("forward", ms), work("backward", 2 * ms)]}
                 for name, ms in (("bf16", 2.0), ("fp8", 1.25))}  # fmt: skip
    [path] = saved_results.save(tmp_path, phases={"gpu": "h200", "layers": [], "recipes": layers_of})
    sources = open_all([path])
    assert [(one["recipe"], one["phase"]) for one in sources.of("roofline")[0]["layers"]][:2] == [
        ("bf16", "forward"), ("bf16", "backward")]  # fmt: skip
    [row] = layers.join_all(sources)[0]["rows"]
    assert (row["ms bf16"], row["ms fp8"], row["saved fp8"], row["bound"]) == (6, 3.75, 2.25, "compute")


def test_layers_of_different_tasks_stay_apart(tmp_path: Path) -> None:
    run = long_run.write_run(tmp_path / "run", 30, tensors=16, every=10)
    other = saved_results.roofline() | {"task": "llama-7b"}
    same = saved_results.roofline()
    same["layers"] = [{"path": "blocks.*.qkv", "ms": {"bf16": 4.0, "fp8": 3.0}}, {"path": "odd.*", "ms": {"bf16": 1.0}}]
    apart = layers.join_all(open_all([run, *saved_results.save(tmp_path, other=other)]))
    assert [table["task"] for table in apart] == ["llama-7b", "gpt:12x768"]
    assert all("ms bf16" not in row for row in apart[1]["rows"])
    [table] = layers.join_all(open_all([run, *saved_results.save(tmp_path, same=same)]))
    rows = {row["module"]: row for row in table["rows"]}
    assert [rows[f"blocks.{i}.qkv"]["saved fp8"] for i in (0, 1, 2)] == [0.333333] * 3, "equal layers share the time"
    assert rows["odd.*"]["ms bf16"] == 1 and "blocks.*.qkv" not in rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "neither a run folder nor JSON"),
        ("[1, 2]", "no kind that report knows"),
        ('"text"', "no kind that report knows"),
        ('{"rows": []}', "no kind that report knows"),
        ('{"candidates": {"a": 3}}', "looks like validation JSON but cannot be read"),
        ('{"candidates": {"a": {}}}', "no 'verdict'"),
    ],
)
def test_other_files_are_refused_in_a_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        open_all([path])
    assert "\n" not in str(caught.value)


def test_paths_that_are_nothing_are_refused(tmp_path: Path) -> None:
    for paths, message in (([], "at least one"), ([tmp_path], "holds no run"), ([tmp_path / "gone"], "is not there")):
        with pytest.raises(UsageError, match=message):
            open_all(paths)


def test_layers_are_joined_and_said_in_words(tmp_path: Path) -> None:
    run = long_run.write_run(tmp_path / "run", 100, tensors=8, every=10)
    sources = open_all([run, *saved_results.save_all(tmp_path)])
    [table] = layers.join_all(sources)
    rows = {row["module"]: row for row in table["rows"]}
    joined = rows["blocks.0.qkv"]
    assert joined["class"] == "Linear" and joined["own fp8"] == 26.4 and joined["end_to_end fp8"] == pytest.approx(21.4)
    assert joined["saved fp8"] == pytest.approx(4e11 / 5e11 - 4e11 / 9e11, rel=1e-5)
    assert 0 <= joined["fp8 forward"] < 1 and joined["bound"] == "compute"
    assert joined["words"].startswith("FP8 saves 0.356 ms, keeps 26.4 dB, underflow 0.0")
    assert "loses nothing" in rows["blocks.0.up"]["words"]
    assert rows[long_run.EVIL]["words"] == ""
    keys = [column["key"] for column in table["columns"]]
    assert "ms fp8" in keys and "saved bf16" not in keys and "saved_ms" not in keys
    assert layers.join_all(open_all(saved_results.save(tmp_path, lint=saved_results.lint()))) == []


def test_findings_are_told_the_serious_first(tmp_path: Path) -> None:
    run = long_run.write_run(tmp_path / "run", 100)
    told = words.tell(open_all([run, *saved_results.save_all(tmp_path)]), ["run"])
    assert told["headline"] == "2 serious findings, 1 warning" and told["state"] == "serious"
    ranks = [one["severity"] for one in told["findings"]]
    assert ranks == ["serious", "serious", "warning", "note", "good"]
    assert {one["rule"] for one in told["findings"]} == {
        "underflow", "verdict-worse", "odd-width", "not-watched", "verdict-equivalent"}  # fmt: skip
    worse = next(one for one in told["findings"] if one["rule"] == "verdict-worse")
    assert "beyond the margin" in worse["detail"] and "keep=blocks.0.qkv" in worse["fix"]


def test_a_healthy_run_is_called_healthy(tmp_path: Path) -> None:
    folder = long_run.write_run(tmp_path / "run", 50, tensors=3, every=10, end=False)
    told = words.tell(open_all([folder]), ["run"])
    assert told["headline"] == "Healthy: nothing to report" and told["state"] == "healthy"
    failing: dict[str, Any] = saved_results.bench() | {"gate": {"failures": ["fp8 is 9% slower"]}}
    [path] = saved_results.save(tmp_path, gate=failing)
    told = words.tell(open_all([path]), [])
    assert told["findings"][0]["detail"] == "fp8 is 9% slower" and told["state"] == "serious"


def test_a_killed_run_is_said_to_be_unfinished(tmp_path: Path) -> None:
    import os

    folder = long_run.write_run(tmp_path / "run", 50, end=False)
    os.utime(folder / "events.jsonl", (1, 1))
    (folder / "captures").mkdir()
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "capture", "step": 50, "path": "captures/step-50"}) + "\nbroken\n")
    os.utime(folder / "events.jsonl", (1, 1))
    rules = {one["rule"]: one for one in words.tell(open_all([folder]), ["run"])["findings"]}
    assert {"captured", "unfinished", "record-damaged", "not-watched"} == set(rules)
    assert rules["captured"]["fix"] == "narrowgauge replay captures/step-50"


def test_one_finding_at_many_places_is_told_once(tmp_path: Path) -> None:
    found = [
        {"rule": "underflow", "severity": "serious", "where": f"m{i}", "detail": f"{i}%", "fix": "f"} for i in range(5)
    ]
    [path] = saved_results.save(tmp_path, many={"findings": found})
    told = words.tell(open_all([path]), [])
    assert told["headline"] == "5 serious findings" and len(told["findings"]) == 1
    assert [place["where"] for place in told["findings"][0]["also"]] == ["m1", "m2", "m3", "m4"]
