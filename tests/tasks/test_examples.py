"""The examples run as they are, and learn."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

import forked
import narrowgauge as ng
from narrowgauge import tasks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
def test_the_plain_loop_learns(recipe):
    command = [str(EXAMPLES / "plain_loop.py"), "--recipe", recipe, "--steps", "300"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.start(forked.run_script, command, **streams) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    accuracy = float(re.search(r"accuracy ([\d.]+)%", out)[1])
    assert accuracy > 90


def test_the_plain_loop_marks_five_lines():
    text = (EXAMPLES / "plain_loop.py").read_text()
    assert re.findall(r"# (\d)(?:,|$)", text, re.MULTILINE) == list("12345")


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])  # fp32: test_digits_task.py
def test_the_digits_example_reaches_97_percent(recipe):
    pytest.importorskip("sklearn")
    task = tasks.find(f"{EXAMPLES / 'digits.py'}:digits", batch=32)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=task.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps)
    engine = ng.Engine(model, optimizer, recipe=recipe, clip_norm=1.0)
    for step in range(task.steps):
        with engine.forward():
            loss = task.loss(model, task.batch(step, "train"))
        engine.backward(loss)
        engine.step()
        schedule.step()
    with engine.evaluating():
        assert task.metrics(model, task.batch(0, "eval"))["accuracy"].item() >= 0.97
    assert engine.skipped <= 2
