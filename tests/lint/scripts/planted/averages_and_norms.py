"""A diffusion model with averaged weights in BF16, a norm by hand, and gradient norms that are logged scaled."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        mean_square = (x * x).mean(-1, keepdim=True)  # lint: half-variance
        return x * torch.rsqrt(mean_square + 1e-6) * self.weight


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, width), RMSNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return self.last(F.silu(self.norm(self.first(x))))


def train(args, loader, writer):
    model = Denoiser()
    average = copy.deepcopy(model).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scaler = torch.amp.GradScaler("cuda")
    for step, (noisy, noise) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(noisy), noise)
        scaler.scale(loss).backward()
        if step % 100 == 0:
            for name, parameter in model.named_parameters():
                writer.add_scalar(name, parameter.grad.norm(), step)  # lint: scaled-norm-read
        scaler.step(optimizer)
        scaler.update()
        schedule.step()  # lint: scheduler-on-skipped-step
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(args.decay).add_(new, alpha=1 - args.decay)  # lint: ema-16bit
