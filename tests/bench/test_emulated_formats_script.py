"""bench/emulated_formats.py: it ends in time whatever it does, and its file has what was done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "emulated_formats.py"
SMALL = ["--tasks", "gpt:1x64,gpt:2x64", "--steps", "3,2", "--batch", "2,3", "--context", "32", "--device", "cpu"]


def run(tmp_path: Path, seconds: float, *arguments: str) -> tuple[str, dict[str, Any], float]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(seconds), *SMALL, *arguments],
        env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    took = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((tmp_path / "emulated-formats.json").read_text()), took


def test_a_table_of_gaps_and_verdicts(tmp_path: Path) -> None:
    text, data, _ = run(tmp_path, 250, "--seeds", "2", "--candidates", "bf16,emulated-nvfp4", "--processes", "2")
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


@pytest.mark.parametrize("seconds", [2.0, 14.0])
def test_it_stops_in_time(seconds: float, tmp_path: Path) -> None:
    """Two seconds end while modules are imported or the first run is made, the others between pairs."""
    text, data, took = run(tmp_path, seconds, "--seeds", "400")
    assert took < seconds + 20, "a busy machine takes seconds to import torch"
    assert f"of {seconds:.0f} s; written to" in text
    assert all(0 < one["seeds"] < 400 for own in data["tasks"].values() for one in own["candidates"].values())
