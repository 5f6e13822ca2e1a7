"""Replay of code that calls .half(): the op is named even if the step cannot run in FP32, and the reason is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from replay_steps import capture_and_replay, step_until_captured
from torch import Tensor, nn

from narrowgauge.cli import main
from narrowgauge.gauges.replay.replay import replay


class Scores(nn.Module):
    """Casts by hand: the two formats only fit together under autocast."""

    def __init__(self, fault: bool) -> None:
        super().__init__()
        self.keys, self.out, self.fault = nn.Linear(6, 6), nn.Linear(6, 2), fault

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x).half()
        if self.fault:
            keys = (keys - keys + 300) * 300  # 90,000 in FP16
        return self.out(keys).float()


class InBackward(torch.autograd.Function):
    """Its backward multiplies formats that differ in FP32."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.mm(grad, torch.full((2, 2), 4e4).half()) / torch.zeros((), dtype=grad.dtype)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = InBackward.apply(self.out(x))  # type: ignore[no-untyped-call]
        return result


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def draw() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("recipe", ["fp16", "fp16[loss_scale=1]"])
def test_the_op_is_named_if_the_step_does_not_run_in_fp32(tmp_path: Path, recipe: str) -> None:
    found = capture_and_replay(lambda: Scores(True), tmp_path, draw(), loss, recipe)
    assert (found.module, found.op, found.kind) == ("(model)", "aten.mul", "inf")
    assert found.op_survives_fp32 is True and found.survives_fp32 is True, "this op has an answer"
    assert found.step_survives_fp32 is None and "does not run in FP32 (mat1 and mat2" in str(found.step_fp32_unknown)
    assert "\n" not in str(found.step_fp32_unknown)


def test_a_backward_that_does_not_run_in_fp32(tmp_path: Path) -> None:
    found = capture_and_replay(Custom, tmp_path, draw(), loss, "fp16[loss_scale=1]")
    assert (found.op, found.phase) == ("InBackward", "backward")
    assert found.step_survives_fp32 is None and "does not run in FP32" in str(found.step_fp32_unknown)


def test_a_step_that_runs_in_fp32_has_no_reason(tmp_path: Path) -> None:
    def cast(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch).half() * 0 + 300).square().float().mean()

    found = capture_and_replay(lambda: nn.Linear(6, 2), tmp_path, draw(), cast, "fp16")
    assert found.step_fp32_unknown is None and found.step_survives_fp32 is False


def test_a_model_with_bf16_weights_gives_the_reason(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    path = step_until_captured(model, lambda m, b: loss(m, b) / 0, [draw()], tmp_path, "bf16-lean")
    found = replay(path, model, lambda m, b: loss(m, b) / 0)
    assert found.found and "pass a function that creates the model" in str(found.step_fp32_unknown)


TASK = """
import torch
from narrowgauge import Task

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)

    def forward(self, x):
        return self.b((self.a(x) * 0 + 300).half() * 300).float()

def make():
    return Task(model=Net, batch=lambda step, split: torch.ones(4, 6), loss=lambda m, b: m(b).square().mean(), steps=2)
"""


def test_the_exit_code_is_that_of_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("halves.py").write_text(TASK)
    options = ["--device", "cpu", "--recipe", "fp16", "--out", "run", "--eval-every", "0"]
    main(["train", "halves.py:make", *options])
    capsys.readouterr()
    assert main(["replay", "run", "--json"]) == 1
    out = capsys.readouterr()
    assert json.loads(out.out)["step_survives_fp32"] is None
    assert "the whole step in FP32: unknown" in out.err and "unknown because the step does not run in FP32" in out.err
