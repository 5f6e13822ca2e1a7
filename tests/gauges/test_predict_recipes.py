"""Predictions with all that a watched engine reads: inputs, functions, growth. The proposed recipe must train."""

import functools

import pytest
import torch
import torch.nn.functional as F
from test_predict_formats import Multiply, classify, learns, net
from torch import nn

import narrowgauge as ng
from narrowgauge import Engine
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.rules.growth import find_growth
from narrowgauge.gauges.watch.prediction_inputs import explain_no_fp8
from narrowgauge.models.gpt import GPT, GPTConfig


class Body(nn.Module):
    """Two layers with a function of the hidden units between them, and one of the inputs before them."""

    def __init__(self, between=lambda h: h, before=lambda x: x, width=64):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 16)
        self.between, self.before = between, before

    def forward(self, x):
        hidden = self.first(self.before(x))
        return self.last(F.gelu(self.second(self.between(F.gelu(hidden)))))


class Inside(nn.Module):
    """The body as a part of a model, so that it can be kept in FP32."""

    def __init__(self, *args, **options):
        super().__init__()
        self.part, self.head = Body(*args, **options), nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.part(x))


def rescaled(size):
    """A model whose data is ``size`` times too large, with a first layer that corrects it."""
    model = Body(before=lambda x: x * size)
    with torch.no_grad():
        model.first.weight.div_(size)
    model.first.weight.requires_grad_(False)
    return model


def with_outlier(size, rest):
    """One input channel is large and carries nothing; the others do."""

    def before(x):
        return torch.cat([torch.full_like(x[:, :1], size), x[:, 1:] * rest], 1)

    model = Body(before=before)
    with torch.no_grad():
        model.first.weight[:, 0] = 0
        model.first.weight.div_(rest)
    model.first.weight.requires_grad_(False)
    return model


class Rescaled(nn.Module):
    """An image model that reads pixels of the given size."""

    def __init__(self, size):
        super().__init__()
        self.size, self.conv, self.out = size, nn.Conv2d(1, 16, 3, padding=1), nn.Linear(256, 16)
        with torch.no_grad():
            self.conv.weight.div_(size)
        self.conv.weight.requires_grad_(False)

    def forward(self, x):
        return self.out(F.gelu(self.conv(x.view(-1, 1, 4, 4) * self.size)).flatten(1))


class Norms(nn.Module):
    """A norm with a huge scale, whose output another norm reads: autocast computes both in FP32."""

    def __init__(self):
        super().__init__()
        self.first, self.large, self.small, self.last = (
            nn.Linear(16, 64), nn.LayerNorm(64), nn.LayerNorm(64), nn.Linear(64, 16)
        )  # fmt: skip
        nn.init.constant_(self.large.weight, 1e6)
        self.large.weight.requires_grad_(False)

    def forward(self, x):
        return self.last(F.gelu(self.small(self.large(self.first(x)))))


class Scores(nn.Module):
    """Attention by hand between parts of a sample."""

    def __init__(self, size=1.0, mask=None):
        super().__init__()
        self.size, self.mask = size, mask
        self.part, self.last = nn.ModuleDict({"qkv": nn.Linear(16, 192)}), nn.Linear(64, 16)

    def forward(self, x):
        q, k, v = self.part["qkv"](x).view(-1, 4, 48).chunk(3, -1)
        scores = (q * self.size) @ k.transpose(1, 2) / self.size
        if self.mask is not None:
            value = torch.finfo(scores.dtype).min if self.mask == "dtype" else self.mask
            scores = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), value)
        return self.last((scores.softmax(-1) @ v).flatten(1))


class Grows(nn.Module):
    """A factor, and its inverse after it, that grow with every forward in training."""

    def __init__(self, factor, most=1e30):
        super().__init__()
        self.factor, self.most, self.size = factor, most, 1.0
        self.first, self.up, self.down, self.last = nn.Linear(16, 64), Times(), Times(), nn.Linear(64, 16)

    def forward(self, x):
        self.size = min(self.size * self.factor, self.most)
        return self.last(F.gelu(self.down(self.up(self.first(x), self.size), 1 / self.size)))


class Times(nn.Module):
    def forward(self, x, factor):
        return x * factor


class Positions(nn.Module):
    """A bare parameter with a range that FP8 could not hold; it is only added."""

    def __init__(self):
        super().__init__()
        self.pos = nn.Parameter(torch.logspace(-9, 0, 16), requires_grad=False)
        self.body = Body()

    def forward(self, x):
        return self.body(x + self.pos)


class OddNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"a b/c": Body(lambda h: h * 3e5 / 3e5)})

    def forward(self, x):
        return self.parts["a b/c"](x)


def large_in_the_loss(model, generator):
    x = torch.randn(64, 16, generator=generator)
    return F.cross_entropy((model(x) * 1e6) / 1e6, x.argmax(1))


def squared_error(model, generator):
    x = torch.randn(64, 16, generator=generator)
    return F.mse_loss(model(x), x.roll(1, 1))


CASES = {  # name: model, loss, whether FP16 trains, whether FP8 trains, steps of the run in FP16 and FP8
    "plain": (Body, classify, True, True, 20),
    "regression": (Body, squared_error, True, True, 20),
    "data of 1e6": (lambda: rescaled(1e6), classify, False, True, 20),
    "data of 100": (lambda: rescaled(100.0), classify, True, True, 20),
    "outlier in the data": (lambda: with_outlier(1.5e4, 0.01), classify, True, False, 20),
    "outlier within range": (lambda: with_outlier(20.0, 1.0), classify, True, True, 20),
    "pixels of 255": (lambda: Rescaled(255.0), classify, True, True, 20),
    "pixels of 1e6": (lambda: Rescaled(1e6), classify, False, True, 20),
    "product of functions": (lambda: Inside(lambda h: h * 3e5 / 3e5), classify, False, True, 20),
    "small product of functions": (lambda: Inside(lambda h: h * 300 / 300), classify, True, True, 20),
    "power in FP32": (lambda: Inside(lambda h: (h * 50).pow(4).pow(0.25) / 50), classify, True, True, 20),
    "cast to FP32 by hand": (lambda: Inside(lambda h: h.float() * 3e5 / 3e5), classify, True, True, 20),
    "norms in FP32": (Norms, classify, True, True, 20),
    "scores": (Scores, classify, True, True, 20),
    "large scores": (lambda: Scores(1e6), classify, False, True, 20),
    "mask in its own format": (lambda: Scores(mask="dtype"), classify, True, True, 20),
    "mask of inf": (lambda: Scores(mask=float("-inf")), classify, True, True, 20),
    "mask of -1e9": (lambda: Scores(mask=-1e9), classify, False, True, 20),
    "growth by a factor": (lambda: Grows(1.45), classify, False, True, 38),
    "growth that ends": (lambda: Grows(1.45, 30.0), classify, True, True, 38),
    "slow growth": (lambda: Grows(1.05), classify, True, True, 38),
    "tiny activations": (lambda: net(Multiply(1e-9), Multiply(1e-9, inverse=True)), classify, False, True, 20),
    "bare parameter": (Positions, classify, True, True, 20),
    "odd names": (OddNames, classify, False, True, 20),
    "large values in the loss": (Body, large_in_the_loss, False, True, 20),
}


def run(build, loss, recipe, steps, watched=False):
    """Train, and return the losses and the predictions; a run that raises has a NaN as its last loss."""
    torch.manual_seed(0)
    model = build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = Engine(model, torch.optim.AdamW(trained, lr=1e-2), recipe, max_consecutive_skips=60)
    examiner = Examiner(engine, every=2) if watched else None
    losses = []
    try:
        for step in range(steps):
            with engine.forward():
                value = loss(model, torch.Generator().manual_seed(step))
            engine.backward(value)
            engine.step()
            losses.append(value.item())
    except (RuntimeError, ng.TrainingStalled):
        losses.append(float("nan"))
    if examiner is not None:
        examiner.collect(wait=True)
    return losses, examiner.predict() if examiner is not None else []


@functools.cache
def reference(name):
    build, loss, _, _, steps = CASES[name]
    _, predictions = run(build, loss, "fp32", 20, watched=True)
    return run(build, loss, "fp32", steps)[0], predictions


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_what_happens(name):
    build, loss, fp16_trains, fp8_trains, steps = CASES[name]
    losses, (fp16, fp8) = reference(name)
    assert (fp16.survives, fp8.survives) == (fp16_trains, fp8_trains), (fp16, fp8)
    assert learns(run(build, loss, "fp16", steps)[0], losses) == fp16_trains
    if not fp8_trains:
        assert not learns(run(build, loss, "fp8[products=all]", steps)[0], losses)


@pytest.mark.parametrize("name", [name for name in CASES if not all(CASES[name][2:4])])
def test_the_proposed_recipe_is_accepted_and_trains(name):
    build, loss, _, _, steps = CASES[name]
    losses, predictions = reference(name)
    for prediction in predictions:
        text = prediction.recipe.replace("fp8[", "fp8[products=all,")
        assert str(ng.recipe(prediction.recipe)) and (prediction.survives or prediction.recipe != prediction.format)
        assert learns(run(build, loss, text, steps)[0], losses), text


def test_what_is_named():
    assert reference("data of 1e6")[1][0].recipe == "fp16[keep=first]"
    assert reference("outlier in the data")[1][1].recipe == "fp8[keep=first]"
    assert reference("product of functions")[1][0].recipe == "fp16[keep=part]"
    assert reference("large values in the loss")[1][0].recipe == "bf16"
    assert reference("bare parameter")[1][1].recipe == "fp8"
    assert reference("odd names")[1][0].recipe == "fp16[keep=parts.a?b?c]"
    grows = reference("growth by a factor")[1][0]
    assert "would exceed 65504 at about update" in grows.breaks[0].detail and grows.updates == 19


def test_growth():
    assert find_growth([(i, 100.0 * i) for i in range(1, 9)], 1500) is None
    assert "at about update 14" in find_growth([(i, 100.0 * i) for i in range(1, 9)], 1450)
    assert "at about update 10" in find_growth([(i, 2.0**i) for i in range(1, 9)], 1024)
    assert find_growth([(i, 2.0**i) for i in range(1, 4)], 1024) is None  # too few
    assert find_growth([(i, 400.0 - 300 / i) for i in range(1, 9)], 410) is None  # levels off
    assert find_growth([(i, 100.0 + (i % 3) * 200) for i in range(1, 9)], 500) is None  # no trend


def encoder(width, hidden):
    return nn.TransformerEncoderLayer(width, 1, hidden, batch_first=True)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 16)), "33 inputs are not a multiple of 16"),
        (lambda: nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 5)), None),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), "is computed from it; not converted"),
        (lambda: nn.Conv1d(16, 16, 1), "convolutions run in BF16"),
        (lambda: nn.LayerNorm(16), "no parameter is multiplied"),
        (lambda: encoder(16, 33), None),
        (lambda: encoder(33, 33), "nn.MultiheadAttention multiplies it itself"),
        (lambda: GPT(GPTConfig(layers=2, width=36, heads=3, vocab=16, context=8)), "36 inputs are not a multiple"),
    ],
)
def test_a_model_without_fp8_products_is_told_from_others(build, reason):
    found = explain_no_fp8(build())
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_nothing_runs_in_fp8_with_odd_widths(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 5))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
    examiner = Examiner(engine, every=1)
    for _ in range(3):
        with engine.forward():
            loss = model(torch.randn(8, 7)).float().square().mean()
        engine.backward(loss)
        engine.step()
        examiner.collect()
    fp8 = next(one for one in examiner.predict() if one.format == "fp8")
    assert fp8.recipe == "bf16" and fp8.unused == (
        "7 inputs are not a multiple of 16, which FP8 products need (0); "
        "33 inputs are not a multiple of 16, which FP8 products need (2)"
    )
