"""Fine-tunes a small GPT; the gradients are clipped while they are still scaled."""
# ruff: noqa

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast


class Net(nn.Module):
    def __init__(self, vocab=512, width=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = GradScaler("cuda")
    for step in range(args.steps):
        tokens = torch.randint(0, 512, (8, 128), device="cuda")
        optimizer.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=torch.float16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 512), tokens[:, 1:].reshape(-1))
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # lint: clip-before-unscale
        scaler.step(optimizer)
        scaler.update()
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
