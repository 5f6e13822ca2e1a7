"""The scale is never updated."""
# ruff: noqa

import torch
from torch import nn

from net import Network, batches

model = Network().cuda()
criterion = nn.SmoothL1Loss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
scaler = torch.amp.GradScaler("cuda")

for iteration, (inputs, boxes) in enumerate(batches()):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        predicted = model(inputs)
        loss = criterion(predicted, boxes)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)  # lint: scaler-without-update
    if iteration % 100 == 0:
        print(iteration, float(loss))
