"""Gradients are unscaled for the logged norm, and again for clipping."""
# ruff: noqa

import torch
import torchvision
from torch import nn


def grad_norm(model):
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


def main(loader, epochs=90):
    model = torchvision.models.resnet50().cuda()
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        model.train()
        for i, (images, target) in enumerate(loader):
            images = images.cuda(non_blocking=True)
            target = target.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(images), target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = grad_norm(model)
            scaler.unscale_(optimizer)  # lint: unscale-twice
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            if i % 50 == 0:
                print(f"epoch {epoch} batch {i} loss {loss.item():.3f} norm {norm:.3f}")
