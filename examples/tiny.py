"""What the integrations' examples share: a small network, its data, and the plain engine loop they are held against.

python examples/tiny.py --recipe fp16        # the plain loop by itself
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
    """The same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def make_loader(steps: int = STEPS) -> DataLoader[tuple[Tensor, ...]]:
    """Points of ``CLASSES`` clouds, in the same order at every call."""
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
    """The losses of the plain loop: what every integration must reproduce. ``steps`` make an epoch."""
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


def ask(description: str) -> str:
    """The recipe that the command line names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", default="fp16", help="fp32, bf16, fp16 (default) or fp8")
    return str(parser.parse_args().recipe)


def compare(name: str, losses: list[float], expected: list[float], other: str = "the plain engine loop") -> None:
    """Print the losses; stop with an error where they differ in any bit from the other's."""
    print(f"{name}: loss {losses[0]:.6f} to {losses[-1]:.6f} in {len(losses)} steps")
    if losses != expected:
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        raise SystemExit(f"not the losses of {other}: they differ by up to {worst:.3g}")
    print(f"the same as {other}, bit for bit")


if __name__ == "__main__":
    chosen = ask("Train a small network by ng.Engine.")
    print(engine_losses(chosen)[-1])
