"""Shared by the tests of integrations: the examples' small network and data, and batches with a NaN."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import narrowgauge as ng

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import tiny  # noqa: E402

RECIPES = ["fp32", "bf16", "fp16", "fp8"]
STEPS = 6


def batches(steps=STEPS, bad=()):
    """Return the examples' batches. Those whose number is in ``bad`` contain a NaN that reaches every gradient."""
    made = [tuple(batch) for batch in tiny.make_loader(steps)]
    for number in bad:
        points = made[number][0].clone()
        points[0, 0] = torch.nan
        made[number] = (points, made[number][1])
    return made


def engine_run(recipe, data, model=None, optimizer=None, **options):
    """Train with a plain engine loop; return the losses and the engine."""
    model = tiny.make_model() if model is None else model
    engine = ng.Engine(model, tiny.make_optimizer(model) if optimizer is None else optimizer, recipe, **options)
    losses = []
    for points, labels in data:
        with engine.forward():
            loss = F.cross_entropy(engine.model(points), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine


def same(left, right):
    """Return whether two lists of losses are equal bit for bit, including NaN."""
    return len(left) == len(right) and all(a == b or (a != a and b != b) for a, b in zip(left, right, strict=True))


def weights(module):
    return torch.cat([p.detach().float().flatten() for p in module.parameters()])


class Labelled(nn.Module):
    """The network with the interface of the Hugging Face Trainer: named inputs, a dictionary with the loss."""

    def __init__(self):
        super().__init__()
        self.network = tiny.make_model()

    def forward(self, points, labels):
        logits = self.network(points)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
