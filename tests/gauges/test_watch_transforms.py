"""Watching works inside torch.func's transforms, and changes no result there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

import narrowgauge as ng

Loss = Callable[[nn.Module, Tensor], Tensor]


def make() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 7), nn.SiLU(), nn.Linear(7, 2))


def per_row(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = vmap(model)(x)
    return result.square().mean()


def nested(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = vmap(vmap(model))(x.view(3, 2, 3))
    return result.square().mean()


def of_gradients(model: nn.Module, x: Tensor) -> Tensor:
    slopes: Tensor = vmap(grad(lambda row: model(row).sum()))(x)
    return slopes.square().mean()


def of_jacobians(model: nn.Module, x: Tensor) -> Tensor:
    jacobians: Tensor = vmap(jacrev(model))(x)
    return jacobians.square().mean()


def functional(model: nn.Module, x: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    result: Tensor = vmap(lambda row: functional_call(model, weights, (row,)))(x)
    return result.square().mean()


def train(loss_of: Loss, watched: bool) -> tuple[list[Tensor], dict[tuple[str, str], int]]:
    model = make()
    engine = ng.Engine(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    watching = ng.watch(engine, every=1) if watched else None
    with engine.forward():
        loss = loss_of(model, torch.linspace(-1, 1, 18).view(6, 3))
    engine.backward(loss)
    engine.step()
    readings = watching.snapshots(wait=True)[0].readings if watching is not None else []
    return [p.detach() for p in model.parameters()], {(r.kind, r.module): r.count for r in readings}


@pytest.mark.parametrize("loss_of", [per_row, nested, of_gradients, of_jacobians, functional])
def test_watching_inside_transforms(loss_of: Loss) -> None:
    weights, counts = train(loss_of, watched=True)
    plain, _ = train(loss_of, watched=False)
    assert all(map(torch.equal, weights, plain)), "watching changes no result"
    assert counts["activation", "0"] == 6 * 7 and counts["activation", "2"] == 6 * 2, "all samples are read"
    assert counts["weight_gradient", "0.weight"] == 21


@pytest.mark.parametrize("loss_of", [per_row, nested, functional])
def test_gradients_of_activations_inside_vmap(loss_of: Loss) -> None:
    _, counts = train(loss_of, watched=True)
    assert counts["gradient", "0"] == 6 * 7 and counts["gradient", "2"] == 6 * 2
