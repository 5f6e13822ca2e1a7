"""Batches: masks of -inf are accepted, other values that are not finite are refused, and leave a capture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from narrowgauge.cli import main
from narrowgauge.runs.finite_batches import BadData, check_finite

INF, NAN = torch.inf, torch.nan


class Sample(NamedTuple):
    x: Tensor
    attn_mask: Tensor


CAUSAL = torch.full((4, 4), -INF).triu(1)
ALIBI = CAUSAL - torch.arange(4.0)


@pytest.mark.parametrize(
    "batch",
    [
        CAUSAL,
        (torch.ones(3), CAUSAL.half()),
        {"x": torch.ones(3), "mask": CAUSAL.bfloat16()},
        {"attention_mask": ALIBI},
        {"position_bias": ALIBI + 1},
        Sample(torch.ones(2), ALIBI),
        {"masks": [ALIBI, (CAUSAL, CAUSAL)]},
        [CAUSAL.expand(2, 3, 4, 4)],
    ],
)
def test_masks_are_accepted(batch: Any) -> None:
    check_finite(batch, "step 1", "batch")


@pytest.mark.parametrize(
    "batch",
    [
        torch.tensor([1.0, NAN]),
        torch.tensor([0.0, INF]),
        torch.tensor([-1.5, -INF]),  # could be the logarithm of 0
        torch.full((3,), -INF),
        {"mask": torch.tensor([0.0, NAN, -INF])},
        {"mask": torch.tensor([0.0, INF, -INF])},
        {"mask": torch.full((3,), -INF)},
        {"features": ALIBI},
        Sample(torch.tensor([2.0, -INF]), CAUSAL),
        (CAUSAL, torch.tensor([NAN])),
    ],
)
def test_other_values_are_refused(batch: Any) -> None:
    with pytest.raises(BadData, match="is not finite"):
        check_finite(batch, "step 1", "batch")


TASK = """
import torch
import torch.nn.functional as F
from narrowgauge import Task

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(4, 12), torch.nn.Linear(4, 1)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

def make(bad: int = 99):
    def batch(step, split):
        x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(step))
        labels = x.sum(-1, keepdim=True)
        if split == "train" and step == bad:
            labels[1, 2] = float("nan")
        return {"x": x, "labels": labels, "mask": torch.full((5, 5), float("-inf")).triu(1)}

    def loss(model, batch):
        return F.mse_loss(model(batch["x"], batch["mask"]), batch["labels"])

    return Task(model=Net, batch=batch, loss=loss, steps=3)

def make_physics():
    def loss(model, x):
        x = x.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (slope - y).square().mean()

    net = lambda: torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return Task(model=net, batch=lambda step, split: torch.rand(16, 1), loss=loss, steps=4)

def make_broken():
    def loss(model, x):
        if not model.training:
            raise RuntimeError("this evaluation is broken")
        return model(x).square().mean()

    return Task(model=lambda: torch.nn.Linear(1, 1), batch=lambda step, split: torch.ones(2, 1), loss=loss, steps=1)
"""
Train = Callable[..., tuple[int, str, str]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    monkeypatch.chdir(tmp_path)
    Path("tasks_here.py").write_text(TASK)

    def run(*argv: str) -> tuple[int, str, str]:
        code = main([*argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


OPTIONS = ("--device", "cpu", "--recipe", "fp32", "--out", "run", "--watch", "0", "--json")


def test_a_run_with_a_mask_trains(train: Train) -> None:
    code, out, _ = train("train", "tasks_here.py:make", *OPTIONS)
    assert code == 0 and json.loads(out)["skipped"] == 0 and json.loads(out)["loss_last"] > 0


def test_a_label_that_is_not_finite_leaves_a_capture(train: Train) -> None:
    code, _, err = train("train", "tasks_here.py:make", "--bad", "1", *OPTIONS)
    assert code == 2 and "train batch 1['labels']" in err.strip().splitlines()[-1]
    assert "captured step 2 because its batch is not finite" in err
    code, out, _ = train("replay", "run", "--json")
    found = json.loads(out)
    assert code == 1 and (found["module"], found["op"], found["exact"]) == ("(batch)", "input", True)
    assert "batch['labels'] contains NaN: it comes from the data" in found["message"]
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "capture"] == [2]


def test_a_loss_that_needs_gradients_is_evaluated(train: Train) -> None:
    code, out, err = train("train", "tasks_here.py:make_physics", "--eval-every", "2", *OPTIONS)
    result = json.loads(out)
    assert code == 0 and result["loss_eval"] > 0
    assert err.count("it is evaluated with gradients") == 1, "it is said once"


def test_other_errors_of_an_evaluation_are_not_repeated(train: Train) -> None:
    code, _, err = train("train", "tasks_here.py:make_broken", *OPTIONS)
    assert code != 0 and "this evaluation is broken" in err and "with gradients" not in err
