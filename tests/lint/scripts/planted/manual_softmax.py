"""Softmax and its logarithm by hand."""
# ruff: noqa

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, observation=64, actions=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(observation, 256), nn.Tanh(), nn.Linear(256, actions))

    def forward(self, x):
        weights = torch.exp(self.net(x))
        return weights / weights.sum(dim=-1, keepdim=True)  # lint: manual-softmax


def update(policy, optimizer, scaler, observation, action, advantage):
    with torch.autocast("cuda", dtype=torch.float16):
        probabilities = torch.softmax(policy.net(observation), dim=-1)
        chosen = torch.log(probabilities + 1e-8).gather(1, action[:, None])  # lint: log-softmax
        loss = -(chosen.squeeze(1) * advantage).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def main(env, steps=10_000):
    policy = Policy().cuda()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(steps):
        update(policy, optimizer, scaler, *env.rollout(policy))
