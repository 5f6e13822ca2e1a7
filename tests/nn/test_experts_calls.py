"""Calls of experts: arguments by name in any order, and choices that are no experts, such as dropped tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowgauge as ng
from narrowgauge.nn.experts import modules, run, run_wide
from narrowgauge.nn.experts.find import compute_plain, find_experts
from narrowgauge.nn.experts.plan import make_fp32_plan

COUNT, WIDTH, INNER = 4, 128, 128


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(COUNT, 2 * INNER, WIDTH) / 11)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 11)

    def forward(self, tokens, which, weights):
        return compute_plain("swiglu", tokens, which, weights, self.up, self.down)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, COUNT, bias=False), Experts()

    def forward(self, x):
        weights, which = self.router(x).softmax(-1).topk(2)
        return self.experts(x, weights=weights, which=which)


def test_arguments_are_read_by_name(monkeypatch):
    calls = []
    original = modules.run_experts
    monkeypatch.setattr(modules, "run_experts", lambda *args: calls.append(args) or original(*args))
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixture()), torch.randn(40, WIDTH)
    exact = model(x)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), "fp8[products=all]")
    with engine.forward():
        made = model(x)
    engine.backward(made.float().square().mean())
    assert engine.step().applied and len(calls) == 1
    assert F.cosine_similarity(made.float().flatten(), exact.flatten(), 0) > 0.98


@pytest.mark.parametrize("other", [-1, COUNT, COUNT + 5])
@pytest.mark.parametrize("kind", ["fp8", "wide"])
def test_choices_that_are_no_experts_are_ignored(kind, other):
    """compute_plain, as models' own code, looks for the tokens of each expert, and finds none of these."""
    torch.manual_seed(0)
    module = Experts()
    spec = find_experts(nn.ModuleDict({"some": module})).specs["some"]
    x, weights = torch.randn(30, WIDTH, requires_grad=True), torch.rand(30, 2, requires_grad=True)
    index = torch.rand(30, COUNT).topk(2).indices
    index[::3] = other
    index[1::3, 1] = other
    leaves = x, weights, module.up, module.down
    outputs = [module(x, index, weights)]
    if kind == "fp8":
        outputs.append(run.run_experts(make_fp32_plan(spec), x, index, weights, module.up, module.down))
    else:
        outputs.append(run_wide.run_wide("", spec, x, index, weights, module.up, module.down, torch.float32))
    direction = torch.randn(30, WIDTH)
    exact, made = ([out.detach(), *torch.autograd.grad((out * direction).sum(), leaves)] for out in outputs)
    assert not made[0][::3].any()
    for one, two in zip(made, exact, strict=True):
        assert (one - two).abs().max() <= 1e-5 * two.abs().max()
