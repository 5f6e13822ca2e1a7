"""Engine and Hosted keep one contract: every test runs on both, under every kind of recipe."""

import ast
import contextlib
import copy
import inspect
import math
import textwrap

import pytest
import torch
import torch.nn.functional as F
from hosting import batches, same, tiny, weights
from torch import nn

import narrowgauge as ng
from narrowgauge.integrations.hosted import Hosted

RECIPES = ["fp32", "bf16", "fp16", "fp8", "fp8[scaling=current]", "bf16-lean", "fp8-lean"]
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
BOTH = pytest.mark.parametrize("kind", [ng.Engine, Hosted])
REPLACED = {"_begin_microbatch"}
"""Hooks that Hosted replaces: the host sums gradients over the ranks."""


def make(kind, recipe, **options):
    model = tiny.make_model()
    return kind(model, tiny.make_optimizer(model), recipe, **options)


def backward(engine, batch, **options):
    with engine.forward():
        loss = F.cross_entropy(engine.model(batch[0]), batch[1])
    engine.backward(loss, **options)
    return loss.item()


def train(engine, data):
    losses = []
    for batch in data:
        losses.append(backward(engine, batch))
        engine.step()
    return losses


class Recording:
    """A watcher that records what it is called with."""

    def __init__(self):
        self.calls = []

    @contextlib.contextmanager
    def around(self, phase):
        self.calls.append(f"enter {phase}")
        yield
        self.calls.append(f"leave {phase}")

    def after(self, report):
        self.calls.append(f"after update {report.index}")


@EVERY_RECIPE
def test_losses_weights_and_reports_are_equal_bit_for_bit(recipe):
    data = batches(6, bad=[2])
    engine, hosted = make(ng.Engine, recipe), make(Hosted, recipe)
    assert same(train(engine, data), train(hosted, data))
    assert torch.equal(weights(engine.inner), weights(hosted.inner))
    assert (hosted.updates, hosted.skipped) == (engine.updates, engine.skipped)
    assert hosted.state_dict()["guard"] == engine.state_dict()["guard"]


@BOTH
@EVERY_RECIPE
def test_forward_clears_what_layers_share(kind, recipe):
    engine = make(kind, recipe)
    cleared = []
    engine.conversion.shared_input.clear = lambda: cleared.append(True)
    backward(engine, batches(1)[0])
    assert len(cleared) == 1
    with pytest.raises(ZeroDivisionError), engine.forward():
        raise ZeroDivisionError
    assert len(cleared) == 2


@BOTH
@EVERY_RECIPE
def test_watchers_see_the_same_phases(kind, recipe):
    engine, watcher = make(kind, recipe), Recording()
    engine.watchers.append(watcher)
    backward(engine, batches(1)[0])
    engine.step()
    phases = [f"{end} {phase}" for phase in ("forward", "backward", "update") for end in ("enter", "leave")]
    assert watcher.calls == [*phases, "after update 1"]


@BOTH
@EVERY_RECIPE
def test_gradient_penalties_differentiate_twice(kind, recipe):
    engine = make(kind, recipe)
    points = batches(1)[0][0].requires_grad_()
    train(engine, batches(1))
    with engine.forward(double_backward=True):
        (slope,) = torch.autograd.grad(engine.model(points).float().sum(), points, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
    engine.backward(penalty)
    assert math.isfinite(engine.step().grad_norm) or recipe == "fp16"


@BOTH
@EVERY_RECIPE
def test_evaluation_has_no_graph_and_restores_the_mode(kind, recipe):
    engine = make(kind, recipe)
    engine.model[1].eval()
    with engine.evaluating():
        assert not any(module.training for module in engine.model.modules())
        assert not engine.model(batches(1)[0][0]).requires_grad
    assert engine.model.training and not engine.model[1].training


@BOTH
@EVERY_RECIPE
def test_backward_takes_the_options_of_torch(kind, recipe):
    engine = make(kind, recipe)
    last = list(engine.model[5].parameters())
    backward(engine, batches(1)[0], inputs=last)
    assert engine.model[0].weight.grad is None and last[0].grad is not None
    assert engine.step().applied


@BOTH
@pytest.mark.parametrize("recipe", ["bf16-lean", "fp8-lean"])
def test_errors_about_formats_name_the_module(kind, recipe):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))
            self.register_buffer("start", torch.randn(32, 32))

        def forward(self, x):
            return x @ torch.lerp(self.weight, self.start, 0.5)

    model = nn.Sequential(nn.Linear(32, 32), Odd())
    engine = kind(model, torch.optim.AdamW(model.parameters()), recipe)
    with pytest.raises(ng.UsageError, match=r"1 \(Odd\) .*keep=1"), engine.forward():
        model(torch.randn(8, 32))


@BOTH
@EVERY_RECIPE
def test_a_bad_gradient_skips_the_update_and_is_named(kind, recipe):
    engine = make(kind, recipe, max_consecutive_skips=3)
    train(engine, batches(1))
    before = weights(engine.inner)
    with pytest.raises(ng.TrainingStalled, match=r"first in 5\.bias\. Weights"):
        for batch in batches(3):
            backward(engine, batch)
            engine.named["5.bias"].grad[0] = torch.nan
            if isinstance(engine, Hosted):  # as a host does that clips
                engine.unscale()
                torch.nn.utils.clip_grad_norm_(engine.inner.parameters(), 1.0)
            engine.step()
    assert torch.equal(weights(engine.inner), before)
    backward(engine, batches(1)[0])
    assert engine.step().applied, "the error can be caught, and training continues"


@BOTH
@EVERY_RECIPE
def test_a_saved_state_resumes_bit_for_bit(kind, recipe):
    data = batches(6, bad=[1])
    straight, first, second = (make(kind, recipe) for _ in range(3))
    expected = train(straight, data)
    train(first, data[:3])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert same(train(second, data[3:]), expected[3:])
    assert second.skipped == straight.skipped


@pytest.mark.parametrize("recipe", ["fp16", "fp8"])
def test_states_move_between_both(recipe):
    data = batches(6)
    expected = train(make(ng.Engine, recipe), data)
    for first, second in ((ng.Engine, Hosted), (Hosted, ng.Engine)):
        begun, resumed = make(first, recipe), make(second, recipe)
        train(begun, data[:3])
        resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
        assert same(train(resumed, data[3:]), expected[3:])


@BOTH
@EVERY_RECIPE
def test_detach_returns_a_plain_model(kind, recipe):
    engine = make(kind, recipe)
    train(engine, batches(1))
    model = engine.detach()
    assert {type(module) for module in model.modules()} == {type(module) for module in tiny.make_model().modules()}
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_hosted_extends_and_never_replaces():
    """Each method of Hosted that Engine has calls Engine's, except for the hooks meant to be replaced."""
    shared = {name: method for name, method in vars(Hosted).items() if callable(method) and hasattr(ng.Engine, name)}
    for name, method in shared.items():
        if name.startswith("__") and name != "__init__":
            continue
        calls = [
            node.func.attr
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method))))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "super()"
        ]
        assert calls == ([] if name in REPLACED else [name]), name
        assert inspect.signature(method) == inspect.signature(getattr(ng.Engine, name)) or name == "__init__"


def test_hosted_assigns_no_method():
    engine, hosted = make(ng.Engine, "fp16"), make(Hosted, "fp16")
    for owner, other in ((hosted, engine), (hosted.guard, engine.guard), (hosted.scaler, engine.scaler)):
        assert not [name for name, value in vars(owner).items() if inspect.ismethod(value)]
        assert set(vars(other)) <= set(vars(owner))
