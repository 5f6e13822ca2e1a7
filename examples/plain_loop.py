"""A plain PyTorch training loop. The five lines that make it mixed precision are marked.

python examples/plain_loop.py --recipe bf16 --steps 300
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng  # 1


def sample_spirals(count: int) -> tuple[Tensor, Tensor]:
    """Return points of two interleaved spirals, and the spiral of each point."""
    labels = torch.randint(0, 2, (count,))
    radius = torch.rand(count).sqrt()
    angle = 3 * math.pi * radius + math.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + 0.02 * torch.randn(count, 2), labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify the points of two spirals.")
    parser.add_argument("--recipe", default="auto", help="fp32, tf32, fp16, bf16 or auto (default)")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(args.steps, 1))
    engine = ng.Engine(model, optimizer, recipe=args.recipe, clip_norm=1.0)  # 2

    for number in range(1, args.steps + 1):
        points, labels = (tensor.to(device) for tensor in sample_spirals(256))
        with engine.forward():  # 3
            loss = F.cross_entropy(model(points), labels)
        engine.backward(loss)  # 4, instead of loss.backward()
        report = engine.step()  # 5, instead of optimizer.step() and optimizer.zero_grad()
        schedule.step()
        if number % 50 == 0:  # reading a number waits for the GPU, so do not read at every step
            print(f"step {number}  loss {loss.item():.4f}  |g| {report.grad_norm:.3f}  scale {report.loss_scale:g}")

    points, labels = (tensor.to(device) for tensor in sample_spirals(2000))
    with engine.evaluating():
        accuracy = (model(points).argmax(1) == labels).float().mean().item()
    print(f"recipe {engine.recipe}  accuracy {accuracy:.1%}  skipped updates {engine.skipped}")


if __name__ == "__main__":
    main()
