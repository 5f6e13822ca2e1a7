"""A training step of which one branch clears no gradients."""

import torch
import torch.nn.functional as F


def train(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    for images, labels in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = F.cross_entropy(model(images), labels)
        if args.amp:
            scaler.scale(loss).backward()  # lint: missing-zero-grad
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
