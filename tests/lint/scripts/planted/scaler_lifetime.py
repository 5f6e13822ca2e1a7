"""A scaler per epoch, a logged loss that is still scaled, and a gradient penalty on scaled gradients."""

import torch
from torch import nn


def train(model: nn.Module, loader, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(epochs):
        scaler = torch.amp.GradScaler("cuda")  # lint: scaler-recreated
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(inputs), targets)
            loss = scaler.scale(loss)
            loss.backward()
            print(loss.item())  # lint: scaled-loss-read, sync-in-loop
            scaler.step(optimizer)
            scaler.update()


def penalty(model: nn.Module, inputs: torch.Tensor, scaler: torch.amp.GradScaler) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(inputs).sum()
    grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)  # lint: scaled-penalty
    return sum(grad.pow(2).sum() for grad in grads).sqrt()
