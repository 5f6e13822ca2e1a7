"""A mixture of experts with a router in BF16, counts that BF16 cannot hold, and a loop that waits for every expert."""

import torch
import torch.nn.functional as F
from torch import nn


class Mixture(nn.Module):
    def __init__(self, width, num_experts, chosen):
        super().__init__()
        self.num_experts, self.chosen = num_experts, chosen
        self.router = nn.Linear(width, num_experts, bias=False, dtype=torch.bfloat16)  # lint: low-precision-router
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.bfloat16))  # lint: counts-16bit

    def route(self, tokens):
        logits = self.router(tokens)
        scores = F.softmax(logits.float(), dim=-1).to(tokens.dtype)
        weights, index = scores.topk(self.chosen, dim=-1)  # lint: low-precision-router
        return weights / weights.sum(-1, keepdim=True), index

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, index = self.route(tokens)
        mask = F.one_hot(index, self.num_experts).to(torch.bfloat16)
        self.tokens_per_expert += mask.sum((0, 1))  # lint: counts-16bit
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)  # lint: expert-loop
            output.index_add_(0, token, expert(tokens[token]) * weights[token, choice, None])
        return output.view_as(x)


def train(loader, width=64):
    model = Mixture(width, 8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
