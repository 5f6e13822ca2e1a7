"""A vocabulary that is not a multiple of 8; the loss is read at every step and not divided."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 50257
WIDTH = 768


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 12)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)  # lint: off-multiple

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.embed(tokens), mask, is_causal=True))


def train(batches, accumulate):
    model = torch.compile(Gpt().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    total = 0.0
    for index, tokens in enumerate(batches):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # lint: accumulate-undivided
        total += loss.item()  # lint: sync-in-loop
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return total
