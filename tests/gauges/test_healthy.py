"""Healthy runs have no serious findings. bench/healthy.py has every recipe, five tasks and three seeds."""

import sys
from pathlib import Path

import pytest

from narrowgauge import tasks
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import train

BENCH = Path(__file__).resolve().parents[2] / "bench"
RECIPES = [
    "fp32",
    "fp16",
    "bf16",
    "fp8",
    "fp8[granularity=row]",
    "fp8[granularity=block]",
    "bf16-lean",
    "fp8-lean",
    "bf16[master=none,moments=bf16]",
]


CASES = [*(("regression", recipe) for recipe in RECIPES), ("llama", "fp16"), ("llama", "fp8-lean")]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_healthy_run_has_no_serious_finding(name, recipe, tmp_path):
    task = tasks.find(f"{BENCH / 'small_tasks.py'}:{name}")
    steps = 40 if name == "regression" else 15
    settings = make_settings(task, recipe=recipe, device="cpu", steps=steps, checkpoint_every=0, watch_every=5)
    result = train(task, settings, tmp_path / "run")
    sys.modules.pop("narrowgauge_task_small_tasks", None)
    assert [finding for finding in result.findings if finding.severity == "serious"] == []
    assert result.loss_last < result.loss_first
