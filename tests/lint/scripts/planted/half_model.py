"""A model with norms is cast to FP16 and trained by Adam."""
# ruff: noqa

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=256, depth=4, classes=64):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(x)).float()


def main(loader):
    model = Model().cuda()
    model.half()  # lint: half-norms
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # lint: states-16bit, eps-below-format
    criterion = nn.CrossEntropyLoss()
    for x, y in loader:
        loss = criterion(model(x.cuda().half()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
