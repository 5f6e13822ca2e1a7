"""Models inside of wrappers, called by the wrapper's own methods outside of a step."""

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.step_context import OpensStepContext


class Wrapper(nn.Module):
    """Holds a model, and calls it in a method of its own, as x-transformers' AutoregressiveWrapper does."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.drop = net, nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(self.net(x)).float().square().mean()

    def generate(self, x):
        return self.net(x)


class Mixed(nn.Module):
    """Multiplies the output of a layer with a parameter: their dtypes differ outside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return self.layer(x) @ self.weight


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "bf16-lean", "fp8-lean[products=all]"])
def test_a_wrapped_model_enters_the_precision_in_methods_of_the_wrapper(recipe):
    model = Wrapper(Wrapper(Mixed()))
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe)
    x = torch.randn(16, 64)
    with torch.no_grad():
        assert model.net.generate(x).dtype is torch.bfloat16
        with engine.forward():
            expected = model.net.net(x)
        assert torch.equal(model.net.generate(x), expected)
        assert model.generate(x).isfinite()


def test_members_of_lists_and_parts_do_not_enter_the_precision():
    model = nn.ModuleDict(
        {"body": nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU())), "head": nn.Linear(64, 64)}
    )
    ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16-lean")
    assert [path for path, part in model.named_modules() if find_change(part, OpensStepContext)] == [""]
    body = model["body"]
    ng.Engine(body, torch.optim.AdamW(body.parameters()), recipe="bf16-lean")
    assert [path for path, part in body.named_modules() if find_change(part, OpensStepContext)] == [""]
