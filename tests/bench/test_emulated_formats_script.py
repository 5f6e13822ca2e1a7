"""bench/emulated_formats.py: it ends in time whatever it does, and its file has what was done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forked
from pace import at_most

SCRIPT = Path(__file__).parents[2] / "bench" / "emulated_formats.py"
SMALL = ["--tasks", "gpt:1x64,gpt:2x64", "--steps", "3,2", "--batch", "2,3", "--context", "32", "--device", "cpu"]


def run(
    tmp_path: Path, main: Callable[[list[str]], int], seconds: float, *arguments: str
) -> tuple[str, dict[str, Any]]:
    code, out, err = forked.finish_script(
        [str(SCRIPT), str(seconds), *SMALL, *arguments], 300, main=main, OUT=str(tmp_path)
    )
    assert code == 0, err
    return out, json.loads((tmp_path / "emulated-formats.json").read_text())


def test_a_table_of_gaps_and_verdicts(tmp_path: Path) -> None:
    text, data = run(tmp_path, forked.run_script, 250, "--seeds", "2", "--candidates", "bf16,emulated-nvfp4")
    assert list(data["tasks"]) == ["gpt:1x64", "gpt:2x64"]
    for own in data["tasks"].values():
        assert len(own["losses"]) == 2 and own["options"] == {"batch": 5 - own["steps"], "context": 32}
        for name, one in own["candidates"].items():
            assert one["seeds"] == len(one["losses"]) == 2 and one["verdict"] and len(one["interval"]) == 2
            assert ("Would it train in NVFP4?" in (one["answer"] or "")) == (name != "bf16")
    assert data["emulated"] == {"bf16": None, "emulated-nvfp4": "NVFP4"}
    assert (
        "gpt:1x64, 3 steps, up to 2 pairs, compared with fp32" in text and "in the mean gaps of 2 common pairs" in text
    )


@pytest.mark.parametrize(("seconds", "main"), [(1.0, forked.run_script), (4.0, forked.run_forking_script)])
def test_it_stops_in_time(seconds: float, main: Callable[[list[str]], int], tmp_path: Path) -> None:
    """A second ends while a new process imports modules, the others between pairs of two processes."""
    with at_most(seconds + 20):  # a new process imports torch
        text, data = run(tmp_path, main, seconds, "--seeds", "400", "--processes", "2")
    assert f"of {seconds:.0f} s; written to" in text
    assert all(0 < one["seeds"] < 400 for own in data["tasks"].values() for one in own["candidates"].values())
