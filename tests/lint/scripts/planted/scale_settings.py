"""A loss scale of 1, which the checkpoint does not contain; the condition for a skipped step is always true."""
# ruff: noqa

import torch
from torch import nn

from flow import FlowNet, pairs

model = FlowNet().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=1.0)  # lint: scale-settings
criterion = nn.HuberLoss()
skipped = 0

for step, (first, second, motion) in enumerate(pairs()):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(first, second), motion)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    if scaler._found_inf_per_device(optimizer):  # lint: found-inf-truthy
        skipped += 1
    scaler.update()
    if step % 1000 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # lint: scaler-not-saved
        torch.save(state, f"step{step}.pt")
