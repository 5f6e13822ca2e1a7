"""The learning rate rises, then falls along a cosine; vectors are not decayed; tied weights count once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from narrowgauge.runs.optimizers import make_adamw
from narrowgauge.runs.schedule import FLOOR, Schedule, compute_factor


def test_factor_at_known_steps() -> None:
    assert compute_factor(0, 110, 10) == 0.1
    assert compute_factor(9, 110, 10) == 1.0
    assert compute_factor(10, 110, 10) == 1.0
    assert compute_factor(109, 110, 10) == pytest.approx(FLOOR)
    middle = 10 + 99 / 2
    assert compute_factor(int(middle), 110, 10) == pytest.approx(FLOOR + (1 - FLOOR) / 2, abs=0.01)


@given(st.integers(1, 500), st.data())
def test_factor_rises_then_falls(steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps))
    values = [compute_factor(step, steps, warmup) for step in range(steps)]
    assert all(0 < value <= 1 and math.isfinite(value) for value in values)
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def test_weight_decay_groups() -> None:
    model = Tied()
    decayed, free = make_adamw(model, 1e-3, 0.1).param_groups
    assert [id(p) for p in decayed["params"]] == [id(model.embedding.weight)]
    assert {id(p) for p in free["params"]} == {id(model.norm.weight), id(model.norm.bias), id(model.head.bias)}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == (0.9, 0.95) and decayed["fused"]


def test_parameter_groups_keep_their_proportions() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 0.1}])
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=10.0)
    schedule = Schedule([optimizer, other], steps=10, warmup=2)
    assert schedule.set(0) == 0.5
    assert [group["lr"] for one in (optimizer, other) for group in one.param_groups] == [0.5, 0.05, 5.0]
    schedule.set(1)
    assert [group["lr"] for one in (optimizer, other) for group in one.param_groups] == [1.0, 0.1, 10.0]
