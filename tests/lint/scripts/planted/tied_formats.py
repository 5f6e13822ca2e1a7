"""Head and embedding share a weight, and only the head is cast."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self, vocab=32768, width=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.body = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        return self.lm_head(self.body(self.embed(tokens))[0])


def train(batches):
    model = LanguageModel().cuda()
    model.lm_head.to(torch.bfloat16)  # lint: tied-formats
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
