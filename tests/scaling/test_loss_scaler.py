"""LossScaler: a drop-in replacement for GradScaler that cannot corrupt weights."""

import math

import pytest
import torch
from torch.amp import GradScaler

from narrowgauge import LossScaler, TrainingStalled, UsageError


def model_and(optimizer="sgd", fused=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    return model, make(model.parameters(), lr=0.1, fused=fused)


def drive(scaler, model, optimizer, losses):
    """Run a plain AMP loop in which some losses are inf; return scale and weights after each update."""
    trace = []
    torch.manual_seed(1)
    for poison in losses:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean() * (math.inf if poison else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.get_scale(), [p.detach().clone() for p in model.parameters()]))
    return trace


@pytest.mark.parametrize(("optimizer", "fused"), [("sgd", False), ("sgd", True), ("adamw", False), ("adamw", True)])
def test_drop_in_replacement_for_grad_scaler(optimizer, fused):
    losses = [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    options = {"init_scale": 2.0**10, "growth_interval": 3}
    theirs = drive(GradScaler("cpu", **options), *model_and(optimizer, fused), losses)
    ours = drive(LossScaler("cpu", **options), *model_and(optimizer, fused), losses)
    for (scale, weights), (their_scale, their_weights) in zip(ours, theirs, strict=True):
        assert scale == their_scale
        assert all(torch.equal(a, b) for a, b in zip(weights, their_weights, strict=True))


def test_has_the_methods_and_state_keys_of_grad_scaler():
    scaler = LossScaler("cpu")
    assert isinstance(scaler, GradScaler)
    public = {name for name in vars(GradScaler) if not name.startswith("_")}
    assert public <= set(dir(scaler))
    assert set(GradScaler("cpu").state_dict()) <= set(scaler.state_dict())


def test_state_is_exchangeable_with_grad_scaler():
    model, optimizer = model_and()
    ours = LossScaler("cpu", init_scale=2.0**8, growth_interval=5)
    drive(ours, model, optimizer, [0, 1, 0, 0])
    theirs = GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == 2.0**7
    assert theirs._get_growth_tracker() == 2
    back = LossScaler("cpu")
    back.load_state_dict(theirs.state_dict())
    assert back.get_scale() == 2.0**7


def test_every_field_survives_a_round_trip():
    model, optimizer = model_and()
    scaler = LossScaler("cpu", 2.0**9, 3.0, 0.25, 7, floor=4.0, max_consecutive_skips=9)
    drive(scaler, model, optimizer, [0, 1, 1, 0])
    other = LossScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert (other.floor, other.skipped, other.guard.max_consecutive_skips) == (4.0, 2, 9)
    assert list(other.history) == list(scaler.history)


def test_the_floor_keeps_weights_finite_where_grad_scaler_corrupts_them():
    """After 144 consecutive skips, 1/scale of GradScaler is inf: the check passes and weights become inf or NaN."""
    losses = [1] * 190 + [0]
    theirs = drive(GradScaler("cpu"), *model_and("sgd", fused=False), losses)
    assert not all(torch.isfinite(w).all() for w in theirs[-1][1])
    ours = drive(LossScaler("cpu", max_consecutive_skips=1000), *model_and("sgd", fused=False), losses)
    assert all(torch.isfinite(w).all() for _, weights in ours for w in weights)
    assert min(scale for scale, _ in ours) == 1.0
    assert not torch.equal(ours[-1][1][0], ours[-2][1][0])  # the first finite update is applied


@pytest.mark.parametrize("fused", [False, True])
def test_stalled_training_raises_and_names_the_parameter(fused):
    model, optimizer = model_and("adamw", fused)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = LossScaler("cpu", names=model)
    with pytest.raises(TrainingStalled, match=r"50 consecutive updates.*first in 2\.weight\.") as caught:
        for _ in range(200):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            model[2].weight.grad[0, 3] = math.nan
            scaler.step(optimizer)
            scaler.update()
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.skipped == 50


def test_names_come_from_the_optimizer_if_it_has_them():
    model, _ = model_and()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = LossScaler("cpu", max_consecutive_skips=2)
    with pytest.raises(TrainingStalled, match=r"0\.bias"):
        drive(scaler, model, optimizer, [1, 1])


def test_a_fixed_scale_never_changes_but_still_skips():
    model, optimizer = model_and()
    scaler = LossScaler("cpu", init_scale=128.0, dynamic=False, growth_interval=1)
    trace = drive(scaler, model, optimizer, [0, 1, 0, 0])
    assert {scale for scale, _ in trace} == {128.0}
    assert torch.equal(trace[0][1][0], trace[1][1][0])
    assert scaler.skipped == 1


def test_history_has_skips_and_scale_changes():
    model, optimizer = model_and()
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=2)
    drive(scaler, model, optimizer, [0, 1, 0, 0, 0])
    assert [(m.update, m.scale, m.skipped) for m in scaler.history] == [
        (1, 8.0, False),
        (2, 8.0, True),
        (3, 4.0, False),
        (5, 8.0, False),
    ]


def test_several_optimizers_share_one_scale():
    model, _ = model_and()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    scaler = LossScaler("cpu", init_scale=16.0)
    scaler.scale(model(torch.randn(3, 4)).sum()).backward()
    model[2].bias.grad.fill_(math.inf)
    before = model[0].weight.detach().clone()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert not torch.equal(before, model[0].weight)


def test_calls_in_the_wrong_order_raise():
    model, optimizer = model_and()
    scaler = LossScaler("cpu")
    with pytest.raises(UsageError, match="no loss was scaled"):
        scaler.step(optimizer)
    scaler.scale(model(torch.randn(3, 4)).sum()).backward()
    with pytest.raises(UsageError, match="no gradients were checked"):
        scaler.update()
    with pytest.raises(UsageError, match="closure"):
        scaler.step(optimizer, lambda: None)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update(new_scale=64.0)
    assert scaler.get_scale() == 64.0


def test_a_disabled_scaler_only_steps():
    model, optimizer = model_and()
    scaler = LossScaler("cpu", enabled=False)
    trace = drive(scaler, model, optimizer, [0])
    assert trace[0][0] == 1.0
    assert scaler.state_dict() == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_scale": 0.0},
        {"init_scale": math.inf},
        {"init_scale": -1.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
        {"floor": 0.0},
        {"floor": 2.0**20},
        {"max_consecutive_skips": 0},
        {"device": 65536.0},
    ],
)
def test_invalid_arguments_raise(wrong):
    with pytest.raises(UsageError):
        LossScaler(**{"device": "cpu", **wrong})


def test_a_state_with_a_scale_below_the_floor_is_raised_to_it():
    theirs = GradScaler("cpu", init_scale=2.0**-60)
    scaler = LossScaler("cpu")
    scaler.load_state_dict(theirs.state_dict())
    assert scaler.get_scale() == 1.0
