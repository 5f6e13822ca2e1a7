"""Backward inside the autocast block."""
# ruff: noqa

import torch
from torch import nn
from torch.amp import autocast

from graph import GraphNet, loader

net = GraphNet(64, 256, 16).to("cuda")
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
criterion = nn.L1Loss()


def one(batch):
    with autocast(device_type="cuda", dtype=torch.bfloat16):
        prediction = net(batch.nodes, batch.edges)
        loss = criterion(prediction, batch.targets)
        loss.backward()  # lint: autocast-backward
    return loss


for epoch in range(20):
    for batch in loader("train"):
        optimizer.zero_grad()
        loss = one(batch.to("cuda"))
        optimizer.step()
    print(epoch, loss.item())
