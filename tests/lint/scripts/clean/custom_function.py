"""Correct custom Functions: decorated, elementwise, or choosing their own formats."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class Multiply(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad)


class Reverse(torch.autograd.Function):
    """Elementwise: any format will do."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Careful(torch.autograd.Function):
    """Chooses its formats itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad.float() @ weight.float().t()).to(x.dtype), (x.float().t() @ grad.float()).to(weight.dtype)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(256, 256) / 16)
        self.b = nn.Parameter(torch.randn(256, 256) / 16)
        self.head, self.domain = nn.Linear(256, 32), nn.Linear(256, 2)

    def forward(self, x):
        x = F.relu(Careful.apply(Multiply.apply(x, self.a), self.b))
        return self.head(x), self.domain(Reverse.apply(x, 0.1))


def train(loader, epochs):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for x, y, origin in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                classes, domain = model(x)
                loss = F.cross_entropy(classes, y) + F.cross_entropy(domain, origin)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
