"""Gradients are cleared just before the step."""
# ruff: noqa

import torch
import torch.nn as nn
import torch.nn.functional as F


class Tagger(nn.Module):
    def __init__(self, vocab, tags, width=128):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, tags)

    def forward(self, words):
        return self.out(self.lstm(self.embed(words))[0])


def run(loader, vocab, tags):
    model = Tagger(vocab, tags).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for words, labels in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(words).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()  # lint: zero-grad-order
    return model
