"""bench/equal_loss.py: stretches continue one another, keep what is finished, and end with a verdict and a speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "equal_loss.py"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("train", "eval"):
        np.random.default_rng(0).zipf(1.5, 40000).clip(0, 255).astype("<u2").tofile(folder / f"{name}.bin")
    return folder


def run(file: Path, seconds: float, tokens: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(file), str(seconds), "--data", str(tokens), "--task", "gpt:1x64"]
    command += ["--tokens", "6k", "--seeds", "2", "--shorter", "2", "--recipes", "fp32,bf16", "--device", "cpu", *more]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False
    )


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.timeout(300)
def test_stretches_end_with_a_verdict_and_a_speed(tmp_path: Path, tokens: Path) -> None:
    file = tmp_path / "equal.json"
    first = run(file, 0.001, tokens)
    assert first.returncode == 1 and not file.exists()
    assert "missing: fp32 seed 0" in first.stdout
    whole = run(file, 250, tokens)
    assert whole.returncode == 0, whole.stderr
    data = read(file)
    steps, shorter = data["about"]["steps"], round(0.6 * data["about"]["steps"])
    done = {(one["recipe"], one["seed"], one["steps"]) for one in data["runs"]}
    expected = {(recipe, seed, steps) for recipe in ("fp32", "bf16") for seed in (0, 1)}
    assert done == expected | {("fp32", seed, shorter) for seed in (0, 1)} and len(data["runs"]) == 6
    result = data["results"]["bf16"]
    assert result["verdict"]["seeds"] == 2 and result["verdict"]["margin"] == 0.0025
    assert result["speed"]["step_ratio"] > 0 and set(data["times_ms"]) == {"fp32", "bf16", "plain PyTorch"}

    data["runs"] = [one for one in data["runs"] if one["seed"] == 0]  # as if the first stretch had ended there
    before = {(one["recipe"], one["steps"]): one["loss"] for one in data["runs"]}
    file.write_text(json.dumps(data))
    again = run(file, 250, tokens)
    assert again.returncode == 0 and "seed 1" in again.stdout and "seed 0" not in again.stdout
    after = {(one["recipe"], one["steps"]): one["loss"] for one in read(file)["runs"] if one["seed"] == 0}
    assert after == before


@pytest.mark.timeout(300)
def test_other_data_and_bad_arguments_are_refused(tmp_path: Path, tokens: Path) -> None:
    file = tmp_path / "equal.json"
    file.write_text(json.dumps({"about": {}, "runs": [], "times_ms": {}, "results": {}}))
    other = run(file, 10, tokens)
    assert other.returncode == 2 and "runs with another task" in other.stderr and "Traceback" not in other.stderr
    file.write_text("[1]")
    wrong = run(file, 10, tokens)
    assert wrong.returncode == 2 and "no runs of this script" in wrong.stderr and "Traceback" not in wrong.stderr
    missing = run(file, 10, tmp_path / "nothing")
    assert missing.returncode == 2 and "Traceback" not in missing.stderr
    few = run(file, 10, tokens, "--recipes", "bf16")
    assert few.returncode == 2 and "two recipes" in few.stderr
