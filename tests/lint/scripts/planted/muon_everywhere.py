"""Muon for all matrices of a language model, at AdamW's learning rate."""
# ruff: noqa

import torch
from torch import nn
import torch.nn.functional as F

from data import loader


class LanguageModel(nn.Module):
    def __init__(self, vocab=32768, width=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(width, 8, batch_first=True) for _ in range(6)])
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = LanguageModel().to("cuda")
matrices = [p for p in model.parameters() if p.ndim == 2]
vectors = [p for p in model.parameters() if p.ndim != 2]
muon = torch.optim.Muon(matrices, lr=6e-4, weight_decay=0.1)  # lint: muon-embedding, muon-learning-rate
adamw = torch.optim.AdamW(vectors, lr=6e-4)
for ids in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    for optimizer in (muon, adamw):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
