"""The same mistake across two functions and two branches, with gradient accumulation."""
# ruff: noqa

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_


def make(args):
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 16)).to(args.device)
    return model, torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)


def take_step(model, optimizer, scaler, max_norm):
    if max_norm is not None:
        clip_grad_norm_(model.parameters(), max_norm)  # lint: clip-before-unscale
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()


def train(args, loader):
    model, optimizer = make(args)
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    for epoch in range(args.epochs):
        for index, (images, labels) in enumerate(loader):
            images, labels = images.to(args.device), labels.to(args.device)
            with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
                loss = criterion(model(images.flatten(1)), labels) / args.accumulate
            if scaler is not None:
                scaler.scale(loss).backward()
            else:
                loss.backward()
            if (index + 1) % args.accumulate == 0:
                take_step(model, optimizer, scaler, args.max_norm)
