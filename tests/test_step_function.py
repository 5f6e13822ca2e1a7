"""StepFunction without a GPU: it runs the engine's own methods. Recording is tested in tests/gpu."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowgauge as ng
from narrowgauge.engine.step_function import _get_accumulator
from narrowgauge.scaling.guard import SkipGuard
from narrowgauge.step_report import is_idle

RECIPES = ["fp32", "bf16", "fp16", "fp8[products=all]", "bf16-lean", "fp8-lean"]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


def make_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 32, generator=generator), torch.randint(0, 16, (16,), generator=generator)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equal_to_the_engines_methods(recipe, accumulate):
    models = [make_model(), make_model()]
    engines = [ng.Engine(m, torch.optim.AdamW(m.parameters()), recipe, accumulate=accumulate) for m in models]
    step = ng.StepFunction(engines[0], lambda x, y: F.cross_entropy(models[0](x), y))
    assert step.reason == "no CUDA device"
    for number in range(6):
        x, y = make_batch(number)
        loss, report = step(x, y=y)
        with engines[1].forward():
            expected = F.cross_entropy(models[1](x), y)
        engines[1].backward(expected)
        other = engines[1].step()
        assert torch.equal(loss, expected)
        assert not loss.requires_grad
        assert (report.index, report.complete, report.grad_norm) == (other.index, other.complete, other.grad_norm)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)
    assert step.recorded == 0


def test_a_loss_without_graph_is_an_error():
    model = make_model()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), "bf16")
    step = ng.StepFunction(engine, lambda x, y: torch.zeros(()))
    with pytest.raises(ng.UsageError, match="no graph"):
        step(*make_batch(0))


def test_watchers_say_when_they_are_idle():
    model = make_model()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), "bf16")
    watch = ng.watch(engine, every=3)
    step = ng.StepFunction(engine, lambda x, y: F.cross_entropy(model(x), y))
    idle = []
    for number in range(7):
        idle.append(is_idle(watch))
        step(*make_batch(number))
    assert idle == [False, True, True, False, True, True, False]
    assert [snapshot.update for snapshot in watch.snapshots(wait=True)] == [1, 4, 7]
    assert not is_idle(object())  # a watcher of one's own that does not say


def test_a_held_graph_is_noticed():
    """A node that accumulates a gradient lives as long as a graph that has it: what is recorded needs new ones."""
    parameter = nn.Parameter(torch.ones(3))
    loss = (2 * parameter).sum()
    _get_accumulator(parameter).metadata["mark"] = True
    assert "mark" in _get_accumulator(parameter).metadata
    loss.backward()
    assert "mark" in _get_accumulator(parameter).metadata
    del loss
    assert "mark" not in _get_accumulator(parameter).metadata


def test_counts_of_skipped_updates_in_two_halves():
    """``count`` changes the same tensors in place at every update, so that a graph can contain it."""
    whole, halves = SkipGuard(3), SkipGuard(3)
    bad = torch.tensor([False, True])
    whole.names = halves.names = ["one", "two"]
    places = []
    for found in (0.0, 1.0, 0.0, 1.0, 1.0):
        masks = bad & bool(found)
        whole.record(torch.tensor(found), torch.tensor(2.0), masks)
        halves.send(halves.count(torch.tensor(found), masks), torch.tensor(2.0))
        places.append([tensor.data_ptr() for tensor in halves.tensors])
    assert all(place == places[0] for place in places)
    assert whole.state_dict() == halves.state_dict()
    assert (halves.skipped, halves.streak, halves.first_bad()) == (3, 2, ["two"])
    with pytest.raises(ng.TrainingStalled):
        halves.send(halves.count(torch.tensor(1.0), bad))
    restored = SkipGuard()
    restored.load_state_dict(whole.state_dict())
    assert copy.deepcopy(restored.first_bad()) == ["parameter 1"]


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
def test_steps_change_no_setting_but_users_do(recipe):
    """What is recorded does not read attributes again, so a change must start over; steps themselves must not."""
    model = ng.tasks.find("gpt:2x64", seed=0).model()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
    step = ng.StepFunction(engine, lambda inputs, targets: model(inputs, targets))
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        step(tokens[:, :-1], tokens[:, 1:])
        assert step._watched.are_same()
    with engine.evaluating(), torch.no_grad():
        model(tokens[:, :-1], tokens[:, 1:])
    model.blocks[0].note = torch.ones(3)
    assert step._watched.are_same()
    model.blocks[0].norm1.eps = 1e-3
    assert not step._watched.are_same()
