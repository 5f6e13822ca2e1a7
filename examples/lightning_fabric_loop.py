"""Lightning Fabric under a recipe: one argument, ``plugins=ng_precision(...)``. The loop does not change.

python examples/lightning_fabric_loop.py --recipe fp16

Halfway it saves the state, and a new model, optimizer, Fabric and plugin resume from it. The losses equal those of an
uninterrupted ``ng.Engine`` loop, bit for bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from lightning import Fabric
from tiny import STEPS, compare, engine_losses, make_loader, make_model, make_optimizer, parse_recipe

from narrowgauge.integrations.lightning import ng_precision


def train(recipe: str, start: int, end: int, checkpoint: Path) -> list[float]:
    precision = ng_precision(recipe)  # 1
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)  # 2
    model = make_model()
    model, optimizer = fabric.setup(model, make_optimizer(model))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "precision": precision}  # 3: saves the scales, too
    if start:
        fabric.load(checkpoint, state)
    losses = []
    for number, (points, labels) in enumerate(make_loader()):
        if not start <= number < end:
            continue
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), labels)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    fabric.save(checkpoint, state)
    print(f"steps {start} to {end}: {precision.engine.skipped} updates skipped so far")
    return losses


def main() -> None:
    recipe = parse_recipe("Train a small network with Lightning Fabric.")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "half.ckpt"
        losses = train(recipe, 0, STEPS // 2, checkpoint) + train(recipe, STEPS // 2, STEPS, checkpoint)
    compare("Fabric", losses, engine_losses(recipe))


if __name__ == "__main__":
    main()
