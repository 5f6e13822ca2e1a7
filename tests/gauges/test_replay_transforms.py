"""Replay names module and op inside torch.func's transforms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from replay_steps import capture_and_replay
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap


class Distance(nn.Module):
    """Its derivative is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x - x).sqrt()


class Entropy(nn.Module):
    """Infinite in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x).log()


def make(fault: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 4), fault(), nn.Hardtanh(-3, 3, inplace=True), nn.Linear(4, 2))


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap": lambda model, x: vmap(model)(x).square().mean(),
    "vmap of vmap": lambda model, x: vmap(vmap(model))(x[:, None]).square().mean(),
    "gradient of each row": lambda model, x: vmap(grad(lambda row: model(row).sum()))(x).square().mean(),
    "jacobian of each row": lambda model, x: vmap(jacrev(model))(x).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_derivative_inside_transforms(name: str, tmp_path: Path) -> None:
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(6))
    found = capture_and_replay(make(Distance), tmp_path, batch, LOSSES[name])
    assert (found.module, found.op, found.phase) == ("1", "SqrtBackward0", "backward"), found.message


def test_an_op_inside_vmap(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = vmap(lambda row: model[1](model[0](row)))(x)  # type: ignore[index]
        return result.mean()

    found = capture_and_replay(make(Entropy), tmp_path, torch.ones(4, 3), loss)
    assert (found.module, found.op, found.phase) == ("1", "aten.log", "forward"), found.message
