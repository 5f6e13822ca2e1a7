"""update() is called before step()."""
# ruff: noqa

import torch
from torch import nn, optim
from torch.amp import GradScaler, autocast


def train(model, loader, device, epochs=3):
    optimizer = optim.RMSprop(model.parameters(), lr=1e-4)
    criterion = nn.BCEWithLogitsLoss()
    scaler = GradScaler(device)
    for epoch in range(1, epochs + 1):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            with autocast(device, dtype=torch.float16):
                loss = criterion(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.update()  # lint: update-before-step
            scaler.step(optimizer)
        torch.save(model.state_dict(), f"epoch{epoch}.pt")
