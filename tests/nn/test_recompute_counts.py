"""Recomputed layers: what FP8 flushes is counted once, and results do not change by a bit."""

import pytest
import torch
from torch import nn

import narrowgauge as ng


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train(fields, mode, accumulate=2):
    """Return loss, gradients and counts of each step. A few columns of the input are too small for FP8."""
    torch.manual_seed(0)
    model = Model()
    recipe = f"fp8[products=all,{fields},checkpoint={mode}]"
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, accumulate=accumulate)
    x = torch.randn(32, 64)
    x[:, :8] *= 1e-9
    steps = []
    for _ in range(3):
        for _ in range(accumulate):
            with engine.forward():
                loss = engine.model(x).float().square().mean()
            engine.backward(loss)
        scales = engine.conversion.scales
        made = [loss.detach(), *(p.grad for p in model.parameters()), scales.counts, scales.amax]
        steps.append([tensor.clone() for tensor in made])
        counts = {name: site.counts.tolist() for name, site in scales.sites.items()}
        assert engine.step().applied
    return steps, counts


@pytest.mark.parametrize("fields", ["scaling=delayed", "scaling=current", "granularity=row", "granularity=block"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_nothing_is_counted_twice(mode, fields):
    (plain, expected), (again, counts) = train(fields, "none"), train(fields, mode)
    assert counts == expected and expected["blocks.0.linear.input"] == [0, 3 * 2 * 32 * 8]
    for one, other in zip(plain, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
