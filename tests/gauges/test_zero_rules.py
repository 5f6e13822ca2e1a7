"""Zeros are reported if they last: branches that start at zero are healthy, those that stay zero are not."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zero_start_models import ZERO_START, Adapter, ZeroOutput, make_batch, train, zero

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.rules.lasting import LastingFindings


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "fp8[products=all]"])
@pytest.mark.parametrize("model", ZERO_START)
def test_branches_that_start_at_zero_are_healthy(model, recipe):
    torch.manual_seed(0)
    assert train(model(), recipe) == {}


@pytest.mark.parametrize("model", ZERO_START)
@pytest.mark.parametrize("steps", [1, 2])
def test_short_runs_of_them_are_healthy(model, steps):
    torch.manual_seed(0)
    assert train(model(), "fp16", steps=steps) == {}


@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
def test_a_branch_that_stays_zero_is_found(recipe):
    torch.manual_seed(0)
    model = Adapter()
    model.up.requires_grad_(False)
    model.base.requires_grad_(True)
    found = train(model, recipe)
    assert found["dead-layer", "up"].severity == SERIOUS
    assert found["no-gradient", "down.weight"].severity == WARNING
    assert found["dead-layer", "up"].step == 1


def test_a_weight_that_starts_at_zero_does_not_hide_others():
    """Another layer is dead, in the same model as a branch that starts at zero."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.healthy, self.first = Adapter(), nn.Linear(16, 16)
            self.dead, self.output = zero(nn.Linear(16, 16)).requires_grad_(False), nn.Linear(16, 16)

        def forward(self, x):
            x = self.healthy(x)
            return self.output(x + self.dead(self.first(x)))

    torch.manual_seed(0)
    places = {where for _, where in train(Both())}
    assert places == {"dead", "first.weight", "first.bias"}
    torch.manual_seed(0)
    single = train(Both(), steps=1)  # one snapshot: a warning, and not for what the adapter explains
    assert set(single) == {("dead-layer", "dead"), ("no-gradient", "first.weight"), ("no-gradient", "first.bias")}
    assert {finding.severity for finding in single.values()} == {WARNING}


def test_an_input_that_some_batches_do_not_have():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.relu = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False), nn.ReLU()
            self.output = nn.Linear(16, 16)

        def forward(self, x):
            return self.output(self.relu(self.left(x[:, :8])) + self.relu(self.right(x[:, 8:])))

    def some(step, absent=lambda step: step % 4 != 0):
        x, y = make_batch(step)
        return (torch.cat([x[:, :8], torch.zeros(64, 8)], 1) if absent(step) else x), y

    torch.manual_seed(0)
    assert train(TwoInputs(), "fp16", batch=some) == {}
    assert ("dead-layer", "right") in train(TwoInputs(), batch=lambda step: some(step, lambda _: True))


@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
def test_a_hinge_loss_that_reaches_zero_is_healthy(recipe):
    def hinge(model, x, y):
        return F.relu(0.3 - model(x)[:, 0] * torch.where(x[:, 0] > 0, 1.0, -1.0)).float().mean()

    def separable(step):
        x, y = make_batch(step)
        x[:, 0] = torch.where(x[:, 0] > 0, 3.0, -3.0)
        return x, y

    torch.manual_seed(0)
    assert train(nn.Linear(16, 4), recipe, steps=90, every=5, loss=hinge, batch=separable, lr=1e-2) == {}


def test_fp16_gradients_that_are_all_flushed():
    torch.manual_seed(0)
    tiny = train(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), "fp16[loss_scale=none]",
                 loss=lambda model, x, y: F.mse_loss(model(x).float(), y) * 1e-9)  # fmt: skip
    assert tiny["underflow", "2"].severity == SERIOUS
    torch.manual_seed(0)
    assert train(ZeroOutput(), "fp16", loss=lambda model, x, y: F.mse_loss(model(x).float(), y) * 1e-3) == {}


def test_state_of_lasting_findings_round_trips():
    finding = Finding(rule="dead-layer", severity=SERIOUS, where="a", detail="zero", fix="f")
    whole, reported = LastingFindings(), []
    for update in range(1, 12, 2):
        fresh = LastingFindings()
        fresh.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        whole = fresh
        if whole.add(update, [finding]):
            reported.append(update)
    assert reported == [7, 9, 11]
    assert not whole.add(13, []) and not whole.add(15, [finding]) and not whole.finish()
