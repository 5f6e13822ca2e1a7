"""BF16 under an alias, and a loss from a model in another file."""
# ruff: noqa

import torch
from mylib import build, criterion, loader

amp_dtype = torch.bfloat16
model, optimizer = build()
scaler = torch.amp.GradScaler()  # lint: scaler-with-bf16


def train_step(data, target):
    optimizer.zero_grad()
    with torch.amp.autocast(device_type="cuda", dtype=amp_dtype):
        output = model(data)
        loss = criterion(output, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


for step, (data, target) in enumerate(loader):
    loss = train_step(data, target)
    if step % 10 == 0:
        print(loss.item())
