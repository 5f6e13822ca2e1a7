"""narrowgauge's engine in a plain loop: it unscales, clips and steps itself."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn

import narrowgauge as ng


def main(loader, epochs=3):
    model = nn.Sequential(nn.Linear(784, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = ng.Engine(model, optimizer, recipe="fp16", clip_norm=1.0, accumulate=4)
    for epoch in range(epochs):
        for number, (images, labels) in enumerate(loader):
            with engine.forward():
                loss = F.cross_entropy(engine.model(images.flatten(1)), labels)
            engine.backward(loss)
            step = engine.step()
            if number % 50 == 0:
                print(number, loss.item(), step.grad_norm)
