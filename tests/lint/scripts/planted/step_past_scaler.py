"""The loss is scaled, and the optimizer's step bypasses the scaler."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(1024, 256), nn.GELU(), nn.Linear(256, 32))
        self.decode = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1024))

    def forward(self, x):
        return self.decode(self.encode(x))


def fit(loader, epochs):
    model = Autoencoder().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for x in loader:
            x = x.cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.mse_loss(model(x), x)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            optimizer.step()  # lint: step-past-scaler
            scaler.update()
    return model
