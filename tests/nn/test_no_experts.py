"""Models without experts: nothing of them is called an expert or a router."""

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.nn.experts.routers import find_routers


class Patches(nn.Module):
    """Tokens and positions of a vision transformer, and scales of attention heads."""

    def __init__(self):
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 64)), nn.Parameter(torch.randn(1, 9, 64))
        self.query_scale, self.key_scale = nn.Parameter(torch.ones(4, 1, 64)), nn.Parameter(torch.ones(4, 1, 64))

    def forward(self, x):
        scale = (self.query_scale * self.key_scale).sum(0)
        return torch.cat([self.token.expand(len(x), -1, -1), x * scale], 1) + self.positions


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.body, self.head = Patches(), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.body(self.patches(x)))


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_tokens_and_positions_are_no_experts(recipe):
    model = Regression()
    assert not find_routers(model)
    conversion = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe).conversion
    matrices = {matrix.path: matrix for matrix in conversion.matrices}
    assert {matrices[f"patches.{name}"].kind for name in ("token", "positions", "query_scale", "key_scale")} == {"raw"}
    assert matrices["head"].formats == ("bf16",) * 3
    assert "expert" not in conversion.summary()


class Layer(nn.Module):
    """A block with lists of optional parts, as in x-transformers."""

    def __init__(self, *parts):
        super().__init__()
        self.norms = nn.ModuleList(parts)
        self.products = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        for norm in self.norms:
            x = x if norm is None else norm(x)
        first, second, third = self.products
        return x + third(second(first(self.norm(x))).relu())


class Layers(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.layers = nn.ModuleList(Layer(*parts) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


RECIPES = ["bf16", "fp16", "fp8[products=all]", "bf16[checkpoint=full]", "bf16-lean", "fp8-lean[products=all]"]


@pytest.mark.parametrize("parts", [(None, None), (None, nn.LayerNorm(64)), (nn.LayerNorm(64), None)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_lists_may_contain_none(recipe, parts):
    model = Layers(*parts)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe)
    with engine.forward():
        loss = model(torch.randn(2, 16, 64)).float().square().mean()
    engine.backward(loss)
    engine.step()
    assert engine.updates == 1
