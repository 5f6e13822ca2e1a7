"""BF16, and gradients are clipped after the step."""
# ruff: noqa

import torch
from torch import nn, optim

device = "cuda"
model = nn.Transformer(d_model=512, nhead=8).to(device)
opt = optim.Adam(model.parameters(), lr=1e-4)
criterion = nn.MSELoss()


def batches(count):
    for _ in range(count):
        yield torch.randn(10, 32, 512, device=device), torch.randn(20, 32, 512, device=device)


for source, target in batches(500):
    opt.zero_grad()
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        loss = criterion(model(source, target), target)
    loss.backward()
    opt.step()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # lint: clip-after-step

torch.save(model.state_dict(), "model.pt")
