"""A mixture of experts that chooses in FP32 under autocast, counts integers, and multiplies by stacked experts."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn


class Router(nn.Module):
    def __init__(self, width, num_experts, chosen):
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.long))

    def forward(self, tokens):
        with torch.autocast("cuda", enabled=False):
            scores = self.gate(tokens.float()).sigmoid()
        index = (scores + self.expert_bias).topk(self.chosen, dim=-1).indices
        weights = scores.gather(-1, index)
        counts = F.one_hot(index, scores.shape[-1]).sum((0, 1))
        self.tokens_per_expert += counts
        return (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype), index, counts


class Mixture(nn.Module):
    def __init__(self, width, num_experts=8, chosen=2, hidden=128):
        super().__init__()
        self.router = Router(width, num_experts, chosen)
        self.up = nn.Parameter(torch.randn(num_experts, 2 * hidden, width) * 0.02)
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.02)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, index, counts = self.router(tokens)
        order = index.flatten().argsort(stable=True)
        rows = tokens.repeat_interleave(index.shape[-1], 0)[order]
        ends = counts.cumsum(0).int()
        gate, up = F.grouped_mm(rows, self.up.transpose(-2, -1), offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        output = torch.zeros_like(tokens, dtype=torch.float32)
        output.index_add_(0, order // index.shape[-1], rows * weights.flatten()[order, None])
        return output.view_as(x)


def train(loader, width=64):
    model = Mixture(width).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
