"""A tiny task for the tests of runs: an MLP with dropout, so that random states matter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.task import Task


class Classifier(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.middle = nn.Linear(width, width)  # dimensions that FP8 supports
        self.outer = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.middle(self.dropout(F.relu(self.norm(self.inner(x)))))))


def draw(step: int, split: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step + (1_000_000 if split == "eval" else 0))
    x = torch.randn(16, 8, generator=generator)
    return x, (x[:, :4] - x[:, 4:]).argmax(1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def tiny(width: int = 32, **overrides: object) -> Task:
    fields = {
        "model": lambda: Classifier(width),
        "batch": draw,
        "loss": loss,
        "metrics": accuracy,
        "sample": lambda model: f"weights sum to {sum(p.sum() for p in model.parameters()):.3f}",
        "name": "tiny",
        "items_per_batch": 16,
        "unit": "point",
        "steps": 40,
        "learning_rate": 1e-2,
        "facts": {"unigram_entropy": 1.386},
    }
    return Task(**{**fields, **overrides})  # type: ignore[arg-type]


def command_line() -> Task:
    return tiny()


def poisoned(at: int = 7) -> Task:
    """NaN in the data of one step."""

    def batch(step: int, split: str) -> tuple[Tensor, Tensor]:
        x, y = draw(step, split)
        if step == at and split == "train":
            x[3, 2] = float("nan")
        return x, y

    return tiny(batch=batch)


def diverging() -> Task:
    """A loss whose gradients are not finite: every update is skipped."""
    return tiny(loss=lambda model, batch: loss(model, batch) * float("inf"), steps=400)
