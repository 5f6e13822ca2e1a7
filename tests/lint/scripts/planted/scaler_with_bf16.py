"""A scaler left over from FP16."""
# ruff: noqa

import torch
import torch.amp as amp
from torch import nn


class Trainer:
    def __init__(self, model, loader, lr=1e-3):
        self.model = model.cuda()
        self.loader = loader
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.loss_fn = nn.CrossEntropyLoss()
        self.scaler = amp.GradScaler("cuda")  # lint: scaler-with-bf16

    def forward(self, inputs, targets):
        with amp.autocast("cuda", dtype=torch.bfloat16):
            return self.loss_fn(self.model(inputs), targets)

    def train_epoch(self):
        total = torch.zeros((), device="cuda")
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            loss = self.forward(inputs.cuda(), targets.cuda())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total += loss.detach()
        return total / len(self.loader)

    def run(self, epochs):
        for epoch in range(epochs):
            print(epoch, self.train_epoch())
