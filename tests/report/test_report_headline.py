"""The headline and the findings of all inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import example_results
import example_run

from narrowgauge.report import headline
from narrowgauge.report.inputs import open_inputs


def test_serious_findings_come_first(tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "run", 100)
    summary = headline.summarize(open_inputs([run, *example_results.save_all(tmp_path)]), ["run"])
    assert (
        summary["headline"] == ("2 serious findings, 1 warning: verdict worse in fp8 of validation, and others")
        and summary["state"] == "serious"
    )
    ranks = [one["severity"] for one in summary["findings"]]
    assert ranks == ["serious", "serious", "warning", "note", "good"]
    assert {one["rule"] for one in summary["findings"]} == {
        "underflow", "verdict-worse", "odd-width", "not-watched", "verdict-equivalent"}  # fmt: skip
    worse = next(one for one in summary["findings"] if one["rule"] == "verdict-worse")
    assert "beyond the margin" in worse["detail"] and "keep=blocks.0.qkv" in worse["fix"]


def test_healthy_run_is_reported_as_healthy(tmp_path: Path) -> None:
    folder = example_run.write_run(tmp_path / "run", 50, tensors=3, every=10, end=False)
    summary = headline.summarize(open_inputs([folder]), ["run"])
    assert summary["headline"] == "Healthy: no findings in run" and summary["state"] == "healthy"
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
    assert (
        summary["headline"] == "5 serious findings: underflow in m0 of many, and others"
        and len(summary["findings"]) == 1
    )
    assert [place["where"] for place in summary["findings"][0]["also"]] == ["m1", "m2", "m3", "m4"]
