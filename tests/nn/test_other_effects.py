"""What a block does besides returning a tensor happens in fused models as well, or the block is not fused."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import Engine

WIDTH, SKIPPED = 64, 0.3


class Attention(nn.Module):
    def __init__(self, how: str, fast: bool) -> None:
        super().__init__()
        self.how, self.fast = how, fast
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.penalty, self.calls, self.sizes = torch.zeros(()), 0, []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.how == "penalty":
            self.penalty = q.float().square().mean()
        if self.how == "detached":
            self.penalty = q.detach().float().square().mean()
        if self.how == "attribute":
            self.calls += 1
        if self.how == "list":
            self.sizes.append(x.shape[1])
        if self.how == "buffer" and self.training:
            assert isinstance(self.count, Tensor)
            self.count += 1
        mixed = F.scaled_dot_product_attention(q, k, v) if self.fast else (q @ k.mT / 4).tanh().softmax(-1) @ v
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Block(nn.Module):
    def __init__(self, how: str, fast: bool) -> None:
        super().__init__()
        self.how = how
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(how, fast), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def is_skipped(self) -> bool:
        if not self.training:
            return False
        if self.how == "torch":
            return torch.rand(1).item() < SKIPPED
        if self.how == "python":
            return random.random() < SKIPPED
        return self.how == "numpy" and np.random.rand() < SKIPPED

    def forward(self, x: Tensor) -> Tensor:
        if self.is_skipped():
            return x
        x = x + self.attention(self.norm1(x))
        made: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return made


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def train(model: nn.Sequential, recipe: str, fused: bool) -> tuple[list[float], list[Any], Engine]:
    model = copy.deepcopy(model)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, fused=fused)
    losses, attentions = [], [block.attention for block in model]
    for step in range(6):
        seed(step)
        with engine.forward():
            y = model(torch.randn(2, 12, WIDTH)).float()
            loss = y.square().mean() + sum(attention.penalty for attention in attentions)
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses, [(a.calls, a.sizes, float(a.count), a.penalty.item()) for a in attentions], engine


def make(how: str, fast: bool) -> nn.Sequential:
    seed(0)
    return nn.Sequential(*(Block(how, fast) for _ in range(3)))


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "bf16[checkpoint=full]"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("how", ["attribute", "list", "buffer", "detached"])
def test_what_attention_stores_is_stored(how: str, fast: bool, recipe: str) -> None:
    """Such blocks are fused with attention by their own code."""
    model = make(how, fast)
    losses, states, _ = train(model, "fp32", False)
    found, stored, engine = train(model, recipe, True)
    assert len(engine.conversion.blocks) == 3
    assert found == pytest.approx(losses, rel=0.03)
    for one, other in zip(stored, states, strict=True):
        assert one[:3] == other[:3] and one[3] == pytest.approx(other[3], rel=0.1)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_stored_loss_has_its_gradient(fast: bool, recipe: str) -> None:
    model = make("penalty", fast)
    losses, _, _ = train(model, "fp32", False)
    found, _, engine = train(model, recipe, True)
    reasons = set(engine.conversion.unfused.values())
    assert reasons == {"it stores attention.penalty, whose gradient the fused form would not compute"}
    assert found == pytest.approx(losses, rel=0.03)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "bf16[checkpoint=full]"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("how", ["torch", "python", "numpy"])
def test_blocks_that_are_skipped_at_random_are_skipped(how: str, fast: bool, recipe: str) -> None:
    """Fused or not, the same blocks are skipped as without an engine."""
    model = make(how, fast)
    losses, _, _ = train(model, "fp32", False)
    found, _, engine = train(model, recipe, True)
    assert found == pytest.approx(losses, rel=0.03)
    if how != "torch":
        assert "Python or NumPy" in next(iter(engine.conversion.unfused.values()))


def test_blocks_that_never_skip_differ() -> None:
    """The test above would notice."""
    skipping, plain = make("torch", True), make("plain", True)
    plain.load_state_dict(skipping.state_dict())
    assert train(plain, "fp32", False)[0] != pytest.approx(train(skipping, "fp32", False)[0], rel=0.03)
