"""A custom trainer: BF16 if supported, else FP16 with a scaler; fused attention with a fallback."""
# ruff: noqa

import math

import torch
import torch.nn.functional as F
from torch import nn

try:
    from torch.amp import GradScaler
except ImportError:
    from torch.cuda.amp import GradScaler


class Attention(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.flash = hasattr(F, "scaled_dot_product_attention")

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(torch.ones(t, t, device=x.device).tril() == 0, float("-inf"))
            y = F.dropout(F.softmax(att, dim=-1), self.dropout, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Trainer:
    def __init__(self, model, optimizer, args):
        self.model, self.optimizer, self.args = model, optimizer, args
        self.dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        self.scaler = GradScaler("cuda", enabled=self.dtype == torch.float16)
        self.step_number = 0

    def loss(self, batch):
        with torch.autocast("cuda", dtype=self.dtype):
            logits = self.model(batch["tokens"])
            return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)

    def backward(self, loss):
        self.scaler.scale(loss / self.args.accumulate).backward()

    def update(self):
        if self.args.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_number += 1

    def fit(self, loader):
        self.model.train()
        total = torch.zeros((), device="cuda")
        for index, batch in enumerate(loader):
            loss = self.loss(batch)
            self.backward(loss)
            total += loss.detach()
            is_last = (index + 1) % self.args.accumulate == 0
            if is_last:
                self.update()
                if self.step_number % 100 == 0:
                    print(self.step_number, total.item() / 100)
                    total.zero_()

    def save(self, path):
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
