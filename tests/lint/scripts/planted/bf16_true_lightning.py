"""Lightning's bf16-true, where bf16-mixed is intended."""
# ruff: noqa

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from data import Sentences


class Classifier(L.LightningModule):
    def __init__(self, vocab=32000, width=512, classes=8):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.embed(tokens))

    def training_step(self, batch, index):
        tokens, labels = batch
        loss = F.cross_entropy(self(tokens), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    loader = DataLoader(Sentences("train"), batch_size=64)
    trainer = L.Trainer(max_epochs=3, precision="bf16-true", gradient_clip_val=1.0)  # lint: bf16-true
    trainer.fit(Classifier(), loader)
