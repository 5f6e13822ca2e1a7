"""Healthy models with branches that start at zero, and a training loop that collects findings."""

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import Engine
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.rules.step_rules import Step


def zero(layer):
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class Adapter(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 16, bias=False), zero(nn.Linear(16, 16, bias=False))
        self.out = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x):
        return self.out(F.gelu(self.base(x) + self.up(self.down(x))))


class Modulated(nn.Module):
    """Two residual blocks whose gate is the output of a layer that starts at zero, as in diffusion transformers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.gates = nn.ModuleList(zero(nn.Linear(16, 16)) for _ in range(2))
        self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.acts = nn.ModuleList(nn.GELU() for _ in range(2))
        self.output = nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.embed(x)
        for gate, inner, act in zip(self.gates, self.inner, self.acts, strict=True):
            hidden = hidden + gate(hidden) * act(inner(hidden))
        return self.output(hidden)


class ZeroGamma(nn.Module):
    """Residual blocks whose last norm starts at zero; a ReLU follows inside the branch."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.last_norm, self.relu = nn.BatchNorm1d(16), zero(nn.BatchNorm1d(16)), nn.ReLU()
        self.output = nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.stem(x)
        branch = self.second(self.relu(self.norm(self.first(hidden))))
        return self.output(hidden + self.last_norm(branch))


class Controlled(nn.Module):
    """A control branch between two layers that start at zero: the first learns an update after the second."""

    def __init__(self):
        super().__init__()
        self.body, self.enter, self.copy = nn.Linear(16, 16), zero(nn.Linear(16, 16)), nn.Linear(16, 16, bias=False)
        self.leave, self.output = zero(nn.Linear(16, 16)), nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.body(x)
        control = self.copy(self.enter(x) + 0.1 * x)
        return self.output(hidden + self.leave(control))


class ZeroOutput(nn.Module):
    """The output layer starts at zero, as in diffusion models."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)
        self.output = zero(nn.Linear(16, 16))

    def forward(self, x):
        return self.output(F.silu(self.second(self.act(self.first(x)))))


ZERO_START = [Adapter, Modulated, ZeroGamma, Controlled, ZeroOutput]


def make_batch(step):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 1).tanh()


def squared(model, x, y):
    return F.mse_loss(model(x).float(), y)


def train(model, recipe="fp32", steps=12, every=1, loss=squared, batch=make_batch, lr=3e-3, optimizer=None, **options):
    """Train, and return the findings by rule and place."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = Engine(model, optimizer or torch.optim.AdamW(trained, lr=lr), recipe, **options)
    examiner = Examiner(engine, every=every)
    for step in range(1, steps + 1):
        with engine.forward():
            value = loss(model, *batch(step))
        engine.backward(value)
        report = engine.step()
        norm = report.grad_norm if report.grad_norm is not None else 0.0
        examiner.check_step(Step(step, value.item(), norm, report.loss_scale, report.applied))
        examiner.collect()
    examiner.collect(wait=True)
    examiner.finish()
    return {(finding.rule, finding.where): finding for finding in examiner.findings}
