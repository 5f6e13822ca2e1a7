"""bench/equal_loss.py: stretches continue one another, keep what is finished, and end with a verdict and a speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forked

SCRIPT = Path(__file__).parents[2] / "bench" / "equal_loss.py"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("train", "eval"):
        np.random.default_rng(0).zipf(1.5, 40000).clip(0, 255).astype("<u2").tofile(folder / f"{name}.bin")
    return folder


def run(file: Path, seconds: float, tokens: Path, *more: str) -> tuple[int, str, str]:
    command = [str(SCRIPT), str(file), str(seconds), "--data", str(tokens), "--task", "gpt:1x64"]
    command += ["--tokens", "6k", "--seeds", "2", "--shorter", "2", "--recipes", "fp32,bf16", "--device", "cpu", *more]
    return forked.finish_script(command, 280)


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.timeout(300)
def test_stretches_end_with_a_verdict_and_a_speed(tmp_path: Path, tokens: Path) -> None:
    file = tmp_path / "equal.json"
    code, out, _ = run(file, 0.001, tokens)
    assert code == 1 and not file.exists()
    assert "missing: fp32 seed 0" in out
    code, _, err = run(file, 250, tokens)
    assert code == 0, err
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
    code, out, _ = run(file, 250, tokens)
    assert code == 0 and "seed 1" in out and "seed 0" not in out
    after = {(one["recipe"], one["steps"]): one["loss"] for one in read(file)["runs"] if one["seed"] == 0}
    assert after == before


@pytest.mark.timeout(300)
def test_a_run_that_does_not_fit_leaves_its_time_to_others(tmp_path: Path, tokens: Path) -> None:
    file = tmp_path / "equal.json"
    code, _, err = run(file, 250, tokens, "--recipes", "bf16,fp32")
    assert code == 0, err
    data = read(file)
    data["runs"] = [one for one in data["runs"] if one["seed"] == 0]
    for one in data["runs"]:
        one["seconds"] = 1e4 if one["recipe"] == "bf16" else 0.1  # the reference's next run takes too long
    file.write_text(json.dumps(data))
    code, out, _ = run(file, 250, tokens, "--recipes", "bf16,fp32")
    assert code == 1 and "missing: bf16 seed 1" in out and "missing: fp32" not in out
    done = {(one["recipe"], one["seed"]) for one in read(file)["runs"]}
    assert done == {("bf16", 0), ("fp32", 0), ("fp32", 1)}


@pytest.mark.timeout(300)
def test_other_data_and_bad_arguments_are_refused(tmp_path: Path, tokens: Path) -> None:
    file = tmp_path / "equal.json"
    file.write_text(json.dumps({"about": {}, "runs": [], "times_ms": {}, "results": {}}))
    code, _, err = run(file, 10, tokens)
    assert code == 2 and "runs with another task" in err and "Traceback" not in err
    file.write_text("[1]")
    code, _, err = run(file, 10, tokens)
    assert code == 2 and "no runs of this script" in err and "Traceback" not in err
    code, _, err = run(file, 10, tmp_path / "nothing")
    assert code == 2 and "Traceback" not in err
    code, _, err = run(file, 10, tokens, "--recipes", "bf16")
    assert code == 2 and "two recipes" in err
