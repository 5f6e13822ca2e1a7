"""Predictions compared with what happens: twelve models and settings, predicted from FP32, then run in FP16 and FP8."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import Engine
from narrowgauge.errors import TrainingStalled
from narrowgauge.gauges.rules.predict_formats import predict_formats
from narrowgauge.gauges.watch.watch import Watch
from narrowgauge.models.gpt import GPT, GPTConfig


class Multiply(nn.Module):
    def __init__(self, factor, inverse=False):
        super().__init__()
        self.factor, self.inverse = factor, inverse

    def forward(self, x):
        return x / self.factor if self.inverse else x * self.factor


class Outlier(nn.Module):
    """One channel has a constant, large value; the others carry the information."""

    def __init__(self, size, rest):
        super().__init__()
        self.size, self.rest = size, rest

    def forward(self, x):
        return torch.cat([torch.full_like(x[:, :1], self.size), x[:, 1:] * self.rest], 1)


def net(*middle):
    return nn.Sequential(nn.Linear(16, 64), *middle, nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))


def outlier_net(size, rest):
    """A net whose second layer has a zero weight for the outlier channel, which gets no gradient."""
    model = net(Outlier(size, rest))
    weight = model[3].weight
    with torch.no_grad():
        weight[:, 0] = 0
    weight.register_hook(lambda grad: torch.cat([torch.zeros_like(grad[:, :1]), grad[:, 1:]], 1))
    return model


def gpt():
    return GPT(GPTConfig(layers=2, width=64, heads=2, vocab=64, context=16))


def classify(model, generator, factor=1.0):
    x = torch.randn(64, 16, generator=generator)
    return F.cross_entropy(model(x).float(), x.argmax(1)) * factor


def tiny_loss(model, generator):
    return classify(model, generator, 1e-12)


def words(model, generator):
    tokens = torch.randint(0, 8, (8, 17), generator=generator) * 7
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


STEPS = 20
CASES = {  # name: model, loss, whether FP16 trains, whether FP8 trains
    "plain": (net, classify, True, True),
    "gpt": (gpt, words, True, True),
    "layernorm": (lambda: net(nn.LayerNorm(64)), classify, True, True),
    "large activations": (lambda: net(Multiply(3e5), Multiply(3e5, inverse=True)), classify, False, True),
    "huge activations": (lambda: net(Multiply(1e9), Multiply(1e9, inverse=True)), classify, False, True),
    "activations within range": (lambda: net(Multiply(500.0), Multiply(500.0, inverse=True)), classify, True, True),
    "small gradients that a loss scale fixes": (net, lambda m, g: classify(m, g, 1e-4), True, True),
    "batch norm": (lambda: net(nn.BatchNorm1d(64)), classify, True, True),
    "dropout": (lambda: net(nn.Dropout(0.1)), classify, True, True),
    "an outlier that FP8 tolerates": (lambda: outlier_net(30.0, 1.0), classify, True, True),
    "an outlier among small values": (lambda: outlier_net(1.5e4, 0.05), classify, True, False),
    "small activations": (lambda: net(Multiply(1e-3), Multiply(1e-3, inverse=True)), classify, True, True),
}


def run(build, loss, recipe, steps, watch=False):
    """Return the losses, and the readings if watched. The last loss of a run that stalls is NaN."""
    torch.manual_seed(0)
    model = build()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, max_consecutive_skips=40)
    watched = Watch(engine, every=5) if watch else None
    losses = []
    try:
        for step in range(steps):
            with engine.forward():
                value = loss(model, torch.Generator().manual_seed(step))
            engine.backward(value)
            engine.step()
            losses.append(value.item())
    except TrainingStalled:
        losses.append(math.nan)
    return losses, [one.readings for one in watched.snapshots()] if watched is not None else []


def learns(losses, reference):
    """Whether the loss fell at least half as far as in the reference run."""
    fall = reference[0] - sum(reference[-5:]) / 5
    own = losses[0] - sum(losses[-5:]) / 5
    return math.isfinite(own) and own > 0.5 * fall


@pytest.mark.parametrize("name", CASES)
def test_predictions_match_what_happens(name):
    build, loss, fp16_trains, fp8_trains = CASES[name]
    reference, readings = run(build, loss, "fp32", STEPS, watch=True)
    fp16, fp8 = predict_formats(readings)
    assert (fp16.survives, fp8.survives) == (fp16_trains, fp8_trains), (fp16, fp8)
    for prediction, recipe in ((fp16, "fp16"), (fp8, "fp8[products=all]")):
        losses, _ = run(build, loss, recipe, STEPS)
        assert learns(losses, reference) == prediction.survives, (recipe, losses)


def test_the_recipe_keeps_only_the_modules_that_fail():
    build, loss, *_ = CASES["large activations"]
    _, readings = run(build, loss, "fp32", 10, watch=True)
    fp16, _ = predict_formats(readings)
    assert [one.module for one in fp16.breaks if one.why == "overflow"] == ["1"]
    assert fp16.recipe == "fp16[keep=1]" and fp16.loss_scale >= 1024


def test_gradients_too_small_for_any_loss_scale():
    _, readings = run(net, tiny_loss, "fp32", 6, watch=True)
    fp16, _ = predict_formats(readings)
    assert not fp16.survives and {one.why for one in fp16.breaks} == {"underflow"}


def test_without_readings_everything_survives():
    fp16, fp8 = predict_formats([])
    assert fp16.survives and fp8.survives and (fp16.recipe, fp8.recipe) == ("fp16", "fp8")
    assert fp16.as_event()["breaks"] == []
