"""``--fit`` on the command line: memory and roofline predict one plan; bad sizes and small budgets are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.cli import main

SIZE = ["gpt:4x128", "--batch", "16", "--context", "128"]
FIT = "115MB"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the JSON, and the lines for the user."""
    code = main([*arguments, "--json"])
    out, told = capsys.readouterr()
    return code, json.loads(out) if out else {}, told


def test_memory_and_roofline_predict_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, memory, _ = run(capsys, "memory", *SIZE, "--recipes", "bf16", "--gpu", "h200", "--fit", FIT)
    assert code == 0
    row = memory["recipes"]["bf16"]
    plan = row["plan"]
    assert (
        plan["fits"] and row["fits"] and plan["budget"] == 115 * 10**6 and plan["peak"] == row["peak"] <= plan["budget"]
    )
    assert sum(plan["options"].values()) == len(plan["blocks"]) == 4 and len(plan["options"]) > 1
    assert plan["cost_ms"] > 0 and plan["smallest"] < plan["peak"] and row["largest_batch"] is None
    code, roofline, _ = run(capsys, "roofline", *SIZE, "--recipes", "bf16", "--gpu", "h200", "--fit", FIT)
    assert code == 0 and roofline["recipes"]["bf16"]["plan"] == plan and roofline["recipes"]["bf16"]["fits"]


def test_the_plan_is_one_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("memory", "roofline"):
        assert main([verb, *SIZE, "--recipes", "bf16", "--gpu", "h200", "--fit", FIT]) == 0
        assert "memory plan for 115.0 MB: activations of blocks: " in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["memory", "roofline"])
def test_if_nothing_fits_one_line_says_what_is_needed(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, data, told = run(capsys, verb, *SIZE, "--recipes", "bf16,bf16-lean", "--gpu", "h200", "--fit", "20MB")
    assert code == 2 and not data
    line = told.strip().splitlines()[-1]
    assert line.startswith("narrowgauge: --fit 20MB: nothing fits; the smallest peak is ") and "bf16-lean" in line


def test_a_recipe_that_does_not_fit_besides_one_that_does_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    code, data, _ = run(capsys, "memory", *SIZE, "--recipes", "bf16,bf16-lean", "--gpu", "h200", "--fit", "93MB")
    plans = {name: row["plan"]["fits"] for name, row in data["recipes"].items()}
    assert code == 1 and plans == {"bf16": False, "bf16-lean": True}


@pytest.mark.parametrize(
    "arguments",
    [
        ["memory", *SIZE, "--fit", "80"],
        ["roofline", *SIZE, "--fit", "lots"],
        ["memory", *SIZE, "--fit", "1GB", "--gpus", "4"],
        ["memory", *SIZE, "--fit", "1GB", "--shards", "2"],
        ["bench", *SIZE, "--device", "cpu", "--recipes", "fp32", "--fit", "1GB"],
    ],
)
def test_bad_sizes_and_places_are_refused_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, _, told = run(capsys, *arguments)
    line = told.strip().splitlines()[-1]
    assert code == 2 and line.startswith("narrowgauge: ") and ("--fit" in line or "memory_budget" in line)


def test_a_run_on_a_cpu_has_no_budget_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "gpt-tiny", "--device", "cpu", "--steps", "1", "--out", str(folder), "--fit", "2GB"]
    code, _, told = run(capsys, *arguments)
    assert code == 2 and not folder.exists()
    assert told.strip().splitlines()[-1] == (
        "narrowgauge: --fit 2GB: torch does not count what a CPU allocates; train on a GPU"
    )


def test_default_recipes_that_cannot_be_planned_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    """torch.compile plans the memory of blocks that are not fused, as in fp32."""
    code, data, told = run(capsys, "memory", *SIZE, "--gpu", "h200", "--fit", "1GB")
    assert code == 0 and "fp32: skipped: memory_budget: torch.compile plans the memory" in told
    assert list(data["recipes"]) == ["bf16", "fp8", "bf16-lean", "fp8-lean"]


def test_a_saved_benchmark_is_repeated_with_its_budget_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "base.json")
    task = ["bench", "gpt:1x64", "--batch", "2", "--context", "16", "--device", "cpu", "--recipes", "fp32"]
    quick = ["--steps", "1", "--rounds", "2", "--peers", "torch", "--no-compile"]
    code, data, _ = run(capsys, *task, *quick, "--save", saved)
    assert code == 0 and data["fit"] is None and data["rows"][0]["memory_plan"] is None
    code, _, told = run(capsys, "bench", "--against", saved, "--fit", "1GB", "--device", "cpu")
    assert code == 2 and "was measured with fit unset, not 1GB" in told.strip().splitlines()[-1]
