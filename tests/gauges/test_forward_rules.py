"""Silent faults of the forward pass are found; the healthy counterpart of each has no finding."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zero_start_models import make_batch, train

from narrowgauge import Engine
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.watch.function_reader import has_compiled_parts


class Attention(nn.Module):
    """Attention over 16 positions, by one of three implementations; ``sharpness`` multiplies the queries."""

    def __init__(self, kind, sharpness=1.0):
        super().__init__()
        self.kind, self.sharpness = kind, sharpness
        self.inner, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mix = nn.MultiheadAttention(32, 4, batch_first=True) if kind == "module" else nn.Linear(32, 96)

    def forward(self, x):
        hidden = self.inner(x).view(4, 16, 32)
        if self.kind == "module":
            mixed = self.mix(hidden * self.sharpness, hidden, hidden)[0]
        else:
            q, k, v = self.mix(hidden).chunk(3, -1)
            if self.kind == "fused":
                mixed = F.scaled_dot_product_attention(q * self.sharpness, k, v)
            else:
                hidden_keys = torch.ones(16, 16, dtype=torch.bool).triu(1)
                scores = (q @ k.transpose(1, 2)) * (self.sharpness * 32**-0.5)
                mixed = scores.masked_fill(hidden_keys, float("-inf")).softmax(-1) @ v
        return self.out((hidden + mixed).flatten(0, 1))


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "where"), [("module", "mix"), ("fused", "attention"), ("functions", "attention")])
def test_attention_logits_that_are_far_too_large(kind, where, recipe):
    torch.manual_seed(0)
    assert set(train(Attention(kind, 2e4), recipe)) == {("attention-logits", where)}
    torch.manual_seed(0)
    assert train(Attention(kind), recipe) == {}
    torch.manual_seed(0)
    assert train(Attention(kind, 20.0), recipe) == {}  # sharp, but not growing


def test_attention_logits_that_grow():
    class Grows(Attention):
        def forward(self, x):
            self.sharpness *= 1.5
            return super().forward(x)

    torch.manual_seed(0)
    found = train(Grows("fused"), steps=20)
    assert set(found) == {("attention-logits", "attention")}
    assert "at first it was" in found["attention-logits", "attention"].detail


class Rotary(nn.Module):
    """Adds sines of positions, computed from integers, in FP32 or in BF16."""

    def __init__(self, dtype, length):
        super().__init__()
        self.dtype, self.length, self.inner = dtype, length, nn.Linear(16, 16)

    def forward(self, x):
        positions = torch.arange(self.length, device=x.device).to(self.dtype)
        angles = positions[:, None] * torch.logspace(0, -3, 8).to(self.dtype)
        encoding = torch.cat([angles.sin(), angles.cos()], -1)
        return self.inner(x + encoding[-64:])


def test_positions_in_bf16():
    torch.manual_seed(0)
    assert set(train(Rotary(torch.bfloat16, 2048))) == {("positions-in-16-bits", "model")}
    torch.manual_seed(0)
    assert train(Rotary(torch.float32, 2048)) == {}
    torch.manual_seed(0)
    assert train(Rotary(torch.bfloat16, 64)) == {}


def test_positions_counted_in_bf16():
    class Counts(nn.Module):
        def __init__(self, dtype, length):
            super().__init__()
            self.dtype, self.length, self.inner = dtype, length, nn.Linear(16, 16)

        def forward(self, x):
            far = torch.arange(self.length, dtype=self.dtype) / self.length
            return self.inner(x + far[-64:, None].to(x.dtype))

    torch.manual_seed(0)
    assert set(train(Counts(torch.bfloat16, 1000))) == {("positions-in-16-bits", "model")}
    for dtype, length in ((torch.float32, 1000), (torch.bfloat16, 200), (torch.float16, 1000)):
        torch.manual_seed(0)
        assert train(Counts(dtype, length)) == {}


def test_a_loss_in_bf16():
    def classify(model, x, y, dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(model(x).to(dtype), y.argmax(1))

    def plain(model, x, y):
        return F.cross_entropy(model(x), y.argmax(1))

    torch.manual_seed(0)
    assert set(train(nn.Linear(16, 16), "bf16", loss=classify)) == {("loss-in-16-bits", "loss")}
    torch.manual_seed(0)
    assert train(nn.Linear(16, 16), "bf16", loss=plain) == {}
    torch.manual_seed(0)  # a mean of BF16 outputs, as in a Wasserstein GAN: nothing is lost
    assert train(nn.Linear(16, 16), "bf16", loss=lambda model, x, y: model(x).mean() + model(x).square().mean()) == {}


def test_batch_norm_that_gets_two_kinds_of_batches():
    def run(batch, momentum=0.1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(16, momentum=momentum), nn.Linear(16, 16))
        return train(model, steps=81, every=4 if batch is make_batch else 5, batch=batch)

    def two_kinds(step):
        x, y = make_batch(step)
        return x * 0.1 + (4 if step % 2 else -4), y

    def shifted(step):
        x, y = make_batch(step)
        return x * 3 + 5, y

    assert ("batchnorm-far-from-batch", "0") in run(two_kinds)
    assert run(make_batch) == {} and run(shifted) == {}
    assert run(shifted, momentum=0.01) == {}  # the average is not complete yet


def test_weight_decay_on_norms():
    def run(decay, lr=1e-2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))
        groups = [
            {"params": model[1].parameters(), "weight_decay": decay},
            {"params": [*model[0].parameters(), *model[3].parameters()], "weight_decay": 0.0},
        ]
        return train(model, steps=40, every=4, optimizer=torch.optim.AdamW(groups, lr=lr))

    assert ("decay-on-norm", "1.weight") in run(5.0)
    assert run(0.1) == {} and run(0.0) == {}


class Units(nn.Module):
    """Two layers with a functional activation between them; ``bias`` switches most units off."""

    def __init__(self, activation, bias):
        super().__init__()
        self.first, self.second, self.activation = nn.Linear(16, 64), nn.Linear(64, 16), activation
        nn.init.constant_(self.first.bias[2:], bias)

    def forward(self, x):
        return self.second(self.activation(self.first(x)))


@pytest.mark.parametrize(
    "activation",
    [F.relu, torch.relu, F.relu6, F.gelu, F.silu, F.hardswish, lambda x: x.clamp(min=0), lambda x: x.relu_()],
)
def test_dead_units_of_functions(activation):
    torch.manual_seed(0)
    assert {rule for rule, _ in train(Units(activation, -30.0))} == {"dead-units"}
    torch.manual_seed(0)
    assert train(Units(activation, -0.8)) == {}


def test_dead_channels_of_a_convolution():
    class Image(nn.Module):
        def __init__(self, bias):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 32, 3, padding=1), nn.Linear(32, 16)
            nn.init.constant_(self.conv.bias[1:], bias)

        def forward(self, x):
            return self.out(F.relu(self.conv(x.view(-1, 1, 4, 4))).mean((2, 3)))

    torch.manual_seed(0)
    assert set(train(Image(-20.0))) == {("dead-units", "relu")}
    torch.manual_seed(0)
    assert train(Image(-0.5)) == {}


def test_a_margin_that_is_satisfied_is_no_dead_unit():
    """Losses use relu as well: F.relu(margin - score) is zero where there is nothing left to learn."""

    def pairs(model, x, y):
        score = model(x) @ model(x).t()
        margin = F.relu(0.1 - score.diagonal()[:, None] + score * (1 - torch.eye(64)) * 1e-3)
        return margin.mean() + 1e-2 * (model(x).float() - y).square().mean()

    torch.manual_seed(0)
    assert train(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), loss=pairs) == {}


def test_parts_that_the_user_compiled_are_recognized():
    assert has_compiled_parts(nn.Sequential(torch.compile(nn.Linear(16, 16)), nn.ReLU()))
    assert not has_compiled_parts(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))


def test_what_is_remembered_about_the_model_round_trips():
    def make():
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        return Examiner(Engine(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)), every=1)

    examiner = make()
    for step in range(3):
        with examiner.engine.forward():
            loss = examiner.engine.model(make_batch(step)[0]).square().mean()
        examiner.engine.backward(loss)
        examiner.engine.step()
    examiner.collect(wait=True)
    state = json.loads(json.dumps(examiner.state_dict()))
    assert state["history"]["decayed"]["1.weight"] == pytest.approx(2 * 0.05) and state["history"]["update"] == 3
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == examiner.state_dict()
