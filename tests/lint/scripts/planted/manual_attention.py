"""Attention by hand, with a mask value that FP16 cannot represent."""
# ruff: noqa

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.attn_drop = nn.Dropout(0.1)

    def forward(self, x, mask=None):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        if mask is not None:
            att = att.masked_fill(mask == 0, -1e9)  # lint: nan-mask
        att = F.softmax(att, dim=-1)
        att = self.attn_drop(att)
        y = att @ v  # lint: manual-attention
        return self.out(y.transpose(1, 2).reshape(b, t, c))


def train(loader, width=512):
    model = nn.Sequential(Attention(width, 8), nn.LayerNorm(width), nn.Linear(width, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
