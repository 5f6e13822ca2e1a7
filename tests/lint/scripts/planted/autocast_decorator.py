"""The whole step is decorated with autocast, including backward; the format is passed as `enabled`."""
# ruff: noqa

import torch
import torch.cuda.amp as camp
from torch import nn

model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


@torch.autocast("cuda", dtype=torch.bfloat16)
def step(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()  # lint: autocast-backward
    optimizer.step()
    optimizer.zero_grad()


def evaluate(x):
    with torch.no_grad(), camp.autocast(torch.bfloat16):  # lint: autocast-argument, deprecated-amp
        return model(x)


for _ in range(100):
    x = torch.randn(64, 1024, device="cuda")
    step(x, x.roll(1, -1))
print(evaluate(torch.ones(1, 1024, device="cuda")))
