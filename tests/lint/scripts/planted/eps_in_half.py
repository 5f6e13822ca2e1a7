"""An epsilon that is 0 in FP16, in a normalization by hand."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn


class Embedder(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2048, width), nn.ReLU(), nn.Linear(width, 128))

    def forward(self, x):
        features = self.layers(x).half()
        length = features.pow(2).sum(-1, keepdim=True).half().sqrt()
        return features / (length.half() + 1e-8)  # lint: eps-below-format


def train(loader):
    model = Embedder().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for first, second in loader:
        similarity = (model(first) * model(second)).float().sum(-1)
        loss = F.mse_loss(similarity, torch.ones_like(similarity))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
