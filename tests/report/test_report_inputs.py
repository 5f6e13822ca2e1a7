"""Inputs of a report: kinds are recognized by their fields, layers are joined, findings are summarized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import example_results
import example_run
import pytest

from narrowgauge.errors import UsageError
from narrowgauge.report import headline, layer_table
from narrowgauge.report.inputs import open_inputs
from narrowgauge.report.pages import collect
from narrowgauge.report.saved_results import parse_timeline, read_result


def test_kinds_are_recognized(tmp_path: Path) -> None:
    kinds = [read_result(path)[0] for path in example_results.save_all(tmp_path)]
    assert kinds == ["validation", "bench", "memory", "roofline", "findings"]


@pytest.mark.parametrize("path", sorted(Path("bench/results").glob("h200-*gpt2*.json")), ids=lambda path: path.stem)
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


def test_times_of_a_layer_are_summed(tmp_path: Path) -> None:
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
    [path] = example_results.save(tmp_path, phases={"gpu": "h200", "layers": [], "recipes": layers_of})
    sources = open_inputs([path])
    assert [(one["recipe"], one["phase"]) for one in sources.of("roofline")[0]["layers"]][:2] == [
        ("bf16", "forward"), ("bf16", "backward")]  # fmt: skip
    [row] = layer_table.build_tables(sources)[0]["rows"]
    assert (row["ms bf16"], row["ms fp8"], row["saved fp8"], row["bound"]) == (6, 3.75, 2.25, "compute")


def test_layers_of_different_tasks_are_not_joined(tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "run", 30, tensors=16, every=10)
    other = example_results.roofline() | {"task": "llama-7b"}
    same = example_results.roofline()
    same["layers"] = [{"path": "blocks.*.qkv", "ms": {"bf16": 4.0, "fp8": 3.0}}, {"path": "odd.*", "ms": {"bf16": 1.0}}]
    apart = layer_table.build_tables(open_inputs([run, *example_results.save(tmp_path, other=other)]))
    assert [table["task"] for table in apart] == ["llama-7b", "gpt:12x768"]
    assert all("ms bf16" not in row for row in apart[1]["rows"])
    [table] = layer_table.build_tables(open_inputs([run, *example_results.save(tmp_path, same=same)]))
    rows = {row["module"]: row for row in table["rows"]}
    assert [rows[f"blocks.{i}.qkv"]["saved fp8"] for i in (0, 1, 2)] == [0.333333] * 3, (
        "equal layers divide the time equally"
    )
    assert rows["odd.*"]["ms bf16"] == 1 and "blocks.*.qkv" not in rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "neither a run folder nor JSON"),
        ("[1, 2]", "unknown kind"),
        ('"text"', "unknown kind"),
        ('{"rows": []}', "unknown kind"),
        ('{"candidates": {"a": 3}}', "looks like validation JSON but cannot be read"),
        ('{"candidates": {"a": {}}}', "no 'verdict'"),
    ],
)
def test_other_files_give_a_one_line_error(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        open_inputs([path])
    assert "\n" not in str(caught.value)


def test_bad_paths_are_refused(tmp_path: Path) -> None:
    for paths, message in (
        ([], "at least one"),
        ([tmp_path], "contains no run"),
        ([tmp_path / "gone"], "does not exist"),
    ):
        with pytest.raises(UsageError, match=message):
            open_inputs(paths)


def test_layers_are_joined_and_summarized(tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "run", 100, tensors=8, every=10)
    sources = open_inputs([run, *example_results.save_all(tmp_path)])
    [table] = layer_table.build_tables(sources)
    rows = {row["module"]: row for row in table["rows"]}
    joined = rows["blocks.0.qkv"]
    assert joined["class"] == "Linear" and joined["own fp8"] == 26.4 and joined["end_to_end fp8"] == pytest.approx(21.4)
    assert joined["saved fp8"] == pytest.approx(4e11 / 5e11 - 4e11 / 9e11, rel=1e-5)
    assert 0 <= joined["fp8 forward"] < 1 and joined["bound"] == "compute"
    assert joined["summary"].startswith("FP8 saves 0.356 ms, SQNR 26.4 dB, underflow 0.0")
    assert "no error" in rows["blocks.0.up"]["summary"]
    assert rows[example_run.EVIL]["summary"] == ""
    keys = [column["key"] for column in table["columns"]]
    assert "ms fp8" in keys and "saved bf16" not in keys and "saved_ms" not in keys
    assert layer_table.build_tables(open_inputs(example_results.save(tmp_path, lint=example_results.lint()))) == []


def test_serious_findings_come_first(tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "run", 100)
    summary = headline.summarize(open_inputs([run, *example_results.save_all(tmp_path)]), ["run"])
    assert summary["headline"] == "2 serious findings, 1 warning" and summary["state"] == "serious"
    ranks = [one["severity"] for one in summary["findings"]]
    assert ranks == ["serious", "serious", "warning", "note", "good"]
    assert {one["rule"] for one in summary["findings"]} == {
        "underflow", "verdict-worse", "odd-width", "not-watched", "verdict-equivalent"}  # fmt: skip
    worse = next(one for one in summary["findings"] if one["rule"] == "verdict-worse")
    assert "beyond the margin" in worse["detail"] and "keep=blocks.0.qkv" in worse["fix"]


def test_healthy_run_is_reported_as_healthy(tmp_path: Path) -> None:
    folder = example_run.write_run(tmp_path / "run", 50, tensors=3, every=10, end=False)
    summary = headline.summarize(open_inputs([folder]), ["run"])
    assert summary["headline"] == "Healthy: no findings" and summary["state"] == "healthy"
    failing: dict[str, Any] = example_results.bench() | {"gate": {"failures": ["fp8 is 9% slower"]}}
    [path] = example_results.save(tmp_path, gate=failing)
    summary = headline.summarize(open_inputs([path]), [])
    assert summary["findings"][0]["detail"] == "fp8 is 9% slower" and summary["state"] == "serious"


def test_killed_run_is_reported_as_unfinished(tmp_path: Path) -> None:
    import os

    folder = example_run.write_run(tmp_path / "run", 50, end=False)
    os.utime(folder / "events.jsonl", (1, 1))
    (folder / "captures").mkdir()
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "capture", "step": 50, "path": "captures/step-50"}) + "\nbroken\n")
    os.utime(folder / "events.jsonl", (1, 1))
    rules = {one["rule"]: one for one in headline.summarize(open_inputs([folder]), ["run"])["findings"]}
    assert {"captured", "unfinished", "record-damaged", "not-watched"} == set(rules)
    assert rules["captured"]["fix"] == "narrowgauge replay captures/step-50"


def test_equal_findings_are_grouped(tmp_path: Path) -> None:
    found = [
        {"rule": "underflow", "severity": "serious", "where": f"m{i}", "detail": f"{i}%", "fix": "f"} for i in range(5)
    ]
    [path] = example_results.save(tmp_path, many={"findings": found})
    summary = headline.summarize(open_inputs([path]), [])
    assert summary["headline"] == "5 serious findings" and len(summary["findings"]) == 1
    assert [place["where"] for place in summary["findings"][0]["also"]] == ["m1", "m2", "m3", "m4"]
