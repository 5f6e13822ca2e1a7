"""Attention by hand with einsum."""
# ruff: noqa

import torch
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, width, context, heads=8):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context, width, bias=False)
        self.to_v = nn.Linear(context, width, bias=False)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, context):
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)  # lint: manual-attention
        return out.transpose(1, 2).flatten(2)
