"""A loop for torch.amp that got an engine, and kept its old lines."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import narrowgauge as ng


class Net(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.GELU(), nn.Linear(width, 10))

    def forward(self, images):
        return self.layers(images)


def validate(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images.cuda()).argmax(1) == labels.cuda()).sum()  # lint: engine-evaluation
    model.train()
    return correct.item()


def main(data, test, epochs=10, accumulate=4):
    loader = DataLoader(data, batch_size=128, shuffle=True)
    model = torch.compile(Net().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = ng.Engine(model, optimizer, recipe="fp16", clip_norm=1.0, accumulate=accumulate)  # lint: engine-compiled
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad(set_to_none=True)  # lint: engine-zero-grad
            with torch.autocast("cuda", dtype=torch.float16):
                with engine.forward():  # lint: engine-autocast
                    loss = F.cross_entropy(model(images.cuda()), labels.cuda())
            loss = loss / accumulate
            engine.backward(loss)  # lint: engine-divided
            scaler.unscale_(optimizer)  # lint: engine-scaler
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # lint: engine-clip
            engine.step()
            optimizer.step()  # lint: engine-optimizer
        print(epoch, validate(model, DataLoader(test, batch_size=512)))


if __name__ == "__main__":
    from pictures import data, test

    main(data, test)
