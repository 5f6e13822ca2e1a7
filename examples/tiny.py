"""Shared by the examples of integrations: a small network, its data, and the engine loop to compare with.

python examples/tiny.py --recipe fp16        # the engine loop alone
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import narrowgauge as ng

STEPS, BATCH, WIDTH, CLASSES = 20, 32, 64, 16
LEARNING_RATE = 3e-3


def make_model() -> nn.Module:
    """Return the network, with the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def make_loader(steps: int = STEPS) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of points from ``CLASSES`` clusters, in the same order at every call."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(CLASSES, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (steps * BATCH,), generator=generator)
    points = centres[labels] + torch.randn(len(labels), WIDTH, generator=generator)
    return DataLoader(TensorDataset(points, labels), batch_size=BATCH)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def engine_losses(
    recipe: str, steps: int = STEPS, epochs: int = 1, accumulate: int = 1, clip_norm: float | None = None
) -> list[float]:
    """Return the losses of the engine loop, which every integration must reproduce. An epoch has ``steps`` steps."""
    model = make_model()
    engine = ng.Engine(model, make_optimizer(model), recipe, accumulate=accumulate, clip_norm=clip_norm)
    losses = []
    for points, labels in (batch for _ in range(epochs) for batch in make_loader(steps)):
        with engine.forward():
            loss = F.cross_entropy(engine.model(points), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def parse_recipe(description: str) -> str:
    """Return the recipe from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", default="fp16", help="fp32, bf16, fp16 (default) or fp8")
    return str(parser.parse_args().recipe)


def compare(name: str, losses: list[float], expected: list[float], other: str = "the plain engine loop") -> None:
    """Print the losses. Exit with an error if they differ from the expected ones in any bit."""
    print(f"{name}: loss {losses[0]:.6f} to {losses[-1]:.6f} in {len(losses)} steps")
    if losses != expected:
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        raise SystemExit(f"the losses differ from {other} by up to {worst:.3g}")
    print(f"equal to {other}, bit for bit")


if __name__ == "__main__":
    chosen = parse_recipe("Train a small network with ng.Engine.")
    print(engine_losses(chosen)[-1])
