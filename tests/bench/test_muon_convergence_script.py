"""bench/muon_convergence.py: gaps between recipes, steps until AdamW's loss, and an end in time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forked
from pace import at_most

SCRIPT = Path(__file__).parents[2] / "bench" / "muon_convergence.py"
SMALL = ["--task", "gpt:1x64", "--batch", "2", "--context", "16", "--device", "cpu"]


def run(
    tmp_path: Path, seconds: float, part: str, *arguments: str, main: Callable[[list[str]], int]
) -> tuple[str, dict[str, Any]]:
    command = [str(SCRIPT), str(seconds), part, *SMALL, *arguments]
    code, out, err = forked.finish_script(command, 280, main=main, OUT=str(tmp_path))
    assert code == 0, err
    return out, json.loads((tmp_path / f"muon-{part}-gpt-1x64.json").read_text())


@pytest.mark.timeout(300)
def test_gaps_of_recipes_per_seed(tmp_path: Path) -> None:
    options = ["--steps", "3", "--seeds", "1", "--recipes", "fp32,bf16-lean"]
    text, data = run(tmp_path, 250, "gaps", *options, main=forked.run_script)  # the other tests fork, and spawn nothing
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
    options += ["--adamw-lrs", "1e-6", "--muon-lrs", "1e-2"]
    text, data = run(tmp_path, 250, "reach", *options, main=forked.run_forking_script)
    assert data["goal"] > 0 and data["options"]["data"] == str(folder)
    assert data["reached_in_steps"] == 3, "0.7 of 4 steps at a real learning rate beat AdamW at none"
    assert "in at most 3 steps" in text


@pytest.mark.timeout(300)
def test_runs_end_in_time_and_are_not_taken_for_complete(tmp_path: Path) -> None:
    options = ["--steps", "100000", "--seeds", "1", "--recipes", "fp32,bf16"]
    with at_most(3 + 40):  # the first process also imports torch
        text, data = run(tmp_path, 3, "gaps", *options, main=forked.run_forking_script)
    assert [job["error"] for job in data["runs"]] == ["the time is over", "the time was over before it started"]
    assert "no seed of both has ended" in text


def test_a_bad_recipe_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = forked.finish_script([str(SCRIPT), "5", "gaps", *SMALL, "--recipes", "fp32,fp3"], 100)
    assert code == 1 and "fp3" in err and len(err.splitlines()) == 1
