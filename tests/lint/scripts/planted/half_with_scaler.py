"""Cast to FP16 after the optimizer was created, then stepped by a scaler."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6


def build():
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()


def train(loader):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)  # lint: states-16bit
    model = model.to(torch.float16)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.cuda()).float(), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # lint: half-with-scaler
        scaler.update()
