"""A user-defined task: a small convolutional network that classifies scikit-learn's digits.

narrowgauge train examples/digits.py:digits --recipe bf16 --batch 32

The parameters of the function are command-line options. It returns what to train: a model, a batch for each step, and a
loss. The other fields improve the record of the run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import narrowgauge as ng


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


def digits(batch: int = 64, seed: int = 0) -> ng.Task:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # 1797 x 1 x 8 x 8, from -1 to 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_back, rest = order[:360], order[360:]

    def make_batch(step: int, split: str) -> tuple[Tensor, Tensor]:
        """The same step always gives the same batch, so a resumed run is exact."""
        if split == "eval":
            return images[held_back], labels[held_back]
        epoch, place = divmod(step, max(1, len(rest) // batch))
        shuffled = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))]
        chosen = shuffled[place * batch : (place + 1) * batch]
        return images[chosen], labels[chosen]

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(pair[0]), pair[1])

    def metrics(model: nn.Module, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (model(pair[0]).argmax(1) == pair[1]).float().mean()}

    return ng.Task(
        name="digits",
        model=Network,
        batch=make_batch,
        loss=loss,
        metrics=metrics,
        items_per_batch=batch,
        unit="image",
        learning_rate=3e-3,
        weight_decay=0.01,
        steps=240,
    )
