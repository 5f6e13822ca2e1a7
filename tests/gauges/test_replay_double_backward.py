"""Replay of losses that contain gradients never ends the process, whatever tensors autograd makes for them.

The double backward of ``abs`` makes zero tensors without memory. Reading one inside a dispatch mode is a segmentation
fault, so each case runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = """
import sys, tempfile
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from replay_steps import capture_and_replay

def make():
    return nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 1))

def gradient_of(penalized):
    def loss(model, batch):
        point = batch.clone().requires_grad_()
        value = model(point)
        (gradient,) = torch.autograd.grad(penalized(value), point, create_graph=True)
        return gradient.abs().mean() + (value - value).sqrt().sum()
    return loss

PENALIZED = {
    "abs": lambda y: y.abs().sum(),
    "l1": lambda y: F.l1_loss(y, torch.zeros_like(y)),
    "l1 sum": lambda y: F.l1_loss(y, y.detach() * 2, reduction="sum"),
    "in place": lambda y: (y * 2).abs_().add_(1).sum(),
    "view": lambda y: y.abs().t().expand(2, -1).sum(),
    "sign": lambda y: (y * y.sign()).sum() + y.relu().sum(),
    "smooth": lambda y: F.smooth_l1_loss(y, torch.ones_like(y)) + F.huber_loss(y, torch.ones_like(y)),
    "clamp": lambda y: y.clamp(-1, 1).abs().sum() + y.abs().amax(),
}
for name, penalized in PENALIZED.items():
    with tempfile.TemporaryDirectory() as folder:
        batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
        found = capture_and_replay(make, Path(folder), batch, gradient_of(penalized))
    print(f"{name}: {found.op} {found.phase} {found.module}")
"""


def test_double_backward_through_abs_in_a_process_of_its_own() -> None:
    source = Path(__file__).parents[2] / "src"
    path = os.pathsep.join([str(source), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", CASES],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    lines = done.stdout.splitlines()
    assert len(lines) == 8 and all(line.endswith(": SqrtBackward0 backward (loss)") for line in lines), done.stdout
