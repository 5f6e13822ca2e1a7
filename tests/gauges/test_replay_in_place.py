"""Replay names the op that produced inf or NaN although an in-place op changed its result afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from replay_steps import capture_and_replay
from torch import Tensor, nn

CHANNELS, LENGTH = 4, 6


class Fault(nn.Module):
    """Runs one faulty function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Later(nn.Module):
    """Changes its input in place."""

    def __init__(self, change: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        result = self.change(x)
        return x if result is None else result


class Signal(nn.Module):
    """A convolution, the fault, an in-place op, and a second convolution over (batch, channel, time)."""

    def __init__(self, function: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, CHANNELS, 3, padding=1)
        self.fault = Fault(function)
        self.later = Later(change)
        self.second = nn.Conv1d(CHANNELS, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.later(self.fault(self.first(x)))
        result: Tensor = self.second(hidden)
        return result


def logarithm(x: Tensor) -> Tensor:
    """Is NaN for the first channel and finite for the others."""
    sign = torch.ones(CHANNELS, 1, device=x.device)
    sign[0] = -1
    return ((x.abs() + 0.5) * sign).log()


def square_root(x: Tensor) -> Tensor:
    """Is 0 for the first channel: its derivative is infinite."""
    keep = torch.ones(CHANNELS, 1, device=x.device)
    keep[0] = 0
    return (x.abs() * keep).sqrt() * 1.5


def set_rows(x: Tensor) -> None:
    x[:, 1:3] = 0.25


def set_by_mask(x: Tensor) -> None:
    x[x > 0.1] = 0.1


def set_by_index(x: Tensor) -> None:
    x[:, torch.tensor([2, 3])] = x.detach()[:, :2] * 0 + 1


def add_residual(x: Tensor) -> Tensor:
    residual = torch.linspace(0, 1, LENGTH)
    x += residual
    return x


def scale_view(x: Tensor) -> None:
    x[:, 0].mul_(2)


def scale_transposed(x: Tensor) -> None:
    x.transpose(1, 2).mul_(torch.arange(1.0, CHANNELS + 1))


def change_often(x: Tensor) -> None:
    for _ in range(3):
        x.add_(1).mul_(0.5).clamp_(max=4)


CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "relu module": nn.ReLU(inplace=True),
    "leaky relu": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "elu": lambda x: F.elu(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, -9, 9, inplace=True),
    "add": lambda x: x.add_(1),
    "mul": lambda x: x.mul_(0.5),
    "sub": lambda x: x.sub_(torch.ones(LENGTH)),
    "div": lambda x: x.div_(3),
    "addcmul": lambda x: x.addcmul_(torch.ones(LENGTH), torch.ones(LENGTH)),
    "dropout": lambda x: F.dropout(x, 0.2, inplace=True),
    "clamp": lambda x: x.clamp_(-5, 5),
    "tanh": lambda x: x.tanh_(),
    "masked fill": lambda x: x.masked_fill_(torch.arange(LENGTH) > 3, 0.0),
    "index fill": lambda x: x.index_fill_(1, torch.tensor([2]), 0.0),
    "set rows": set_rows,
    "set by mask": set_by_mask,
    "set by index": set_by_index,
    "residual": add_residual,
    "view": scale_view,
    "transposed": scale_transposed,
    "often": change_often,
}  # fmt: skip


def draw() -> Tensor:
    return torch.randn(3, 2, LENGTH, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", CHANGES)
def test_the_fault_before_an_in_place_op_in_forward(name: str, tmp_path: Path) -> None:
    found = capture_and_replay(lambda: Signal(logarithm, CHANGES[name]), tmp_path, draw())
    assert (found.module, found.op, found.phase, found.kind) == ("fault", "aten.log", "forward", "nan"), found.message


@pytest.mark.parametrize("name", CHANGES)
def test_the_fault_before_an_in_place_op_in_backward(name: str, tmp_path: Path) -> None:
    found = capture_and_replay(lambda: Signal(square_root, CHANGES[name]), tmp_path, draw())
    assert (found.module, found.op, found.phase) == ("fault", "SqrtBackward0", "backward"), found.message


def two_faults(x: Tensor) -> Tensor:
    y = x.abs() + 1
    y[:, 1].sub_(99).log_()
    y[:, 3].div_(0)
    return y


def repaired_then_faulty(x: Tensor) -> Tensor:
    y = x.abs() + 1
    y[:, 1].sub_(99).log_()
    y[:, 1].zero_()
    y[:, 3].div_(0)
    return y


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (two_faults, "aten.log_"),
        (repaired_then_faulty, "aten.div_"),
        (lambda x: x.abs().neg_().log_().add_(1), "aten.log_"),
        (lambda x: x.mul_(1e30).pow_(2).mul_(2), "aten.pow_"),
    ],
)
def test_a_fault_in_place(function: Callable[[Tensor], Tensor], op: str, tmp_path: Path) -> None:
    found = capture_and_replay(lambda: Signal(function, nn.ReLU(inplace=True)), tmp_path, draw())
    assert (found.module, found.op, found.phase) == ("fault", op, "forward"), found.message


class Bottleneck(nn.Module):
    """A residual block whose norm and activations work in place."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.norm = nn.BatchNorm1d(CHANNELS)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        out: Tensor = self.branch(self.relu(self.norm(x)))
        out += shortcut
        return self.relu(out)


def test_residual_blocks_that_work_in_place(tmp_path: Path) -> None:
    def make() -> nn.Module:
        good, bad = nn.Conv1d(CHANNELS, CHANNELS, 1), Fault(lambda x: x / (x - x))
        return nn.Sequential(nn.Conv1d(2, CHANNELS, 1), Bottleneck(good), Bottleneck(bad), Bottleneck(Fault(torch.cos)))

    found = capture_and_replay(make, tmp_path, draw())
    assert (found.module, found.op) == ("2.branch", "aten.div"), found.message


def test_data_and_weights_before_an_in_place_op(tmp_path: Path) -> None:
    """What existed before the step is named, not the in-place op that changed it."""

    def add_one(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch.add_(1)).square().mean()

    batch = draw()
    batch[1, 1, 1] = torch.nan
    found = capture_and_replay(lambda: nn.Conv1d(2, 2, 1), tmp_path, batch, add_one)
    assert (found.module, found.op) == ("(batch)", "input") and "it comes from the data" in found.message


def test_a_mask_that_is_changed_in_place_is_not_blamed(tmp_path: Path) -> None:
    def attend(model: nn.Module, batch: Tensor) -> Tensor:
        scores = model(batch)
        mask = torch.zeros(LENGTH).masked_fill_(torch.arange(LENGTH) > 3, -torch.inf)
        mask += 0.5
        mixed = torch.softmax(scores + mask, -1)
        return ((mixed.sum() - mixed.sum()).sqrt() * 1).add_(2)

    found = capture_and_replay(lambda: nn.Conv1d(2, 2, 1), tmp_path, draw(), attend)
    assert (found.module, found.op, found.phase) == ("(loss)", "SqrtBackward0", "backward"), found.message


def test_in_place_on_a_list_of_tensors(tmp_path: Path) -> None:
    def together(model: nn.Module, batch: Tensor) -> Tensor:
        parts = [model(batch).tanh(), (model(batch).detach() - 99).log()]
        with torch.no_grad():
            torch._foreach_mul_(parts[1:], 2.0)
        return (parts[0] + parts[1]).mean()

    found = capture_and_replay(lambda: nn.Conv1d(2, 2, 1), tmp_path, draw(), together)
    assert (found.module, found.op) == ("(loss)", "aten.log"), found.message


def root_of_a_view(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 2].mul_(0).sqrt_()
    return y


def test_the_derivative_of_an_in_place_op_on_a_view(tmp_path: Path) -> None:
    """Autograd hides it in a node CopySlices."""
    found = capture_and_replay(lambda: Signal(root_of_a_view, torch.cos), tmp_path, draw())
    assert (found.module, found.op, found.phase) == ("fault", "CopySlices of sqrt_", "backward")
    assert "the derivative of a square root" in str(found.advice)
