"""A linear layer with a custom backward, to which autocast does not apply."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function


class SparseLinear(Function):  # lint: custom-op
    @staticmethod
    def forward(ctx, x, weight, mask):
        ctx.save_for_backward(x, weight, mask)
        return x @ (weight * mask).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight, mask = ctx.saved_tensors
        return grad @ (weight * mask), (grad.t() @ x) * mask, None


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.register_buffer("mask", (torch.rand(outputs, inputs) < 0.1).float())

    def forward(self, x):
        return SparseLinear.apply(x, self.weight, self.mask)


def train(loader):
    model = nn.Sequential(Layer(784, 1024), nn.ReLU(), Layer(1024, 16)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
