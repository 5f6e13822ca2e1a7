"""The deprecated names of torch.cuda.amp."""
# ruff: noqa

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast, custom_bwd, custom_fwd


class Scale(torch.autograd.Function):
    @staticmethod
    @custom_fwd  # lint: deprecated-amp
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd  # lint: deprecated-amp
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


def main(loader):
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()  # lint: deprecated-amp
    for x, y in loader:
        with autocast():  # lint: deprecated-amp
            loss = nn.functional.mse_loss(Scale.apply(x, model.weight), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
