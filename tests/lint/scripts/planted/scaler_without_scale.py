"""Backward runs on the unscaled loss, and the scaler steps."""
# ruff: noqa

import torch
from torch import nn
from torch.amp import GradScaler as Scaler

model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 16),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
criterion = nn.CrossEntropyLoss()
scaler = Scaler("cuda")


def epoch(loader):
    for images, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images.cuda()), labels.cuda())
        loss.backward()
        scaler.step(optimizer)  # lint: scaler-without-scale
        scaler.update()
