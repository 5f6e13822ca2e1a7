"""bench/muon_convergence.py: gaps between recipes, steps until AdamW's loss, and an end in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "muon_convergence.py"
SMALL = ["--task", "gpt:1x64", "--batch", "2", "--context", "16", "--device", "cpu"]


def run(tmp_path: Path, seconds: float, part: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(seconds), part, *SMALL, *arguments],
        env={**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((tmp_path / f"muon-{part}-gpt-1x64.json").read_text())


@pytest.mark.timeout(300)
def test_gaps_of_recipes_per_seed(tmp_path: Path) -> None:
    text, data = run(tmp_path, 250, "gaps", "--steps", "3", "--seeds", "1", "--recipes", "fp32,bf16-lean")
    losses = {job["recipe"]: job["loss"] for job in data["runs"]}
    (gap,) = data["gaps"]["bf16-lean"]["loss"]["each"]
    assert gap == pytest.approx(losses["bf16-lean"] / losses["fp32"] - 1) and gap != 0
    assert "loss: Muon bf16-lean against fp32" in text
    assert all(job["optimizer"] == "muon" and job["evaluations"][-1][0] == 3 for job in data["runs"])


@pytest.mark.timeout(300)
def test_steps_until_the_loss_of_adamw_on_a_folder_of_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("train", "eval"):
        np.arange(4000, dtype=np.uint16).__mod__(97).astype("<u2").tofile(folder / f"{name}.bin")
    options = ["--steps", "4", "--trials", "1", "--data", str(folder), "--vocab", "128", "--recipe", "fp32"]
    text, data = run(tmp_path, 250, "reach", *options, "--adamw-lrs", "1e-6", "--muon-lrs", "1e-2")
    assert data["goal"] > 0 and data["options"]["data"] == str(folder)
    assert data["reached_in_steps"] == 3, "0.7 of 4 steps at a real learning rate beat AdamW at none"
    assert "in at most 3 steps" in text


@pytest.mark.timeout(300)
def test_runs_end_in_time_and_are_not_taken_for_complete(tmp_path: Path) -> None:
    before = time.monotonic()
    text, data = run(tmp_path, 15, "gaps", "--steps", "100000", "--seeds", "1", "--recipes", "fp32,bf16")
    assert time.monotonic() - before < 15 + 40, "a busy machine takes long to import torch"
    assert [job["error"] for job in data["runs"]] == ["the time is over", "the time was over before it started"]
    assert "no seed of both has ended" in text


def test_a_bad_recipe_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "5", "gaps", *SMALL, "--recipes", "fp32,fp3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 1 and "fp3" in done.stderr and len(done.stderr.splitlines()) == 1
