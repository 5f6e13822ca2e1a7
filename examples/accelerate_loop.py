"""Accelerate under a recipe: ``prepare(accelerator, ..., recipe=...)`` instead of ``accelerator.prepare(...)``.

python examples/accelerate_loop.py --recipe fp16

It accumulates gradients over two microbatches. Halfway it calls ``save_state``, and a new model, optimizer and
Accelerator resume with ``load_state``. The losses equal those of a plain ``ng.Engine`` loop, bit for bit.
"""

from __future__ import annotations

import tempfile

import torch.nn.functional as F
from accelerate import Accelerator
from tiny import STEPS, compare, engine_losses, make_loader, make_model, make_optimizer, parse_recipe

from narrowgauge.integrations.accelerate import engine_of, prepare


def train(recipe: str, start: int, end: int, folder: str) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    model, optimizer, loader = prepare(accelerator, model, make_optimizer(model), make_loader(), recipe=recipe)  # 1
    if start:
        accelerator.load_state(folder)
    losses = []
    for number, (points, labels) in enumerate(loader):
        if not start <= number < end:
            continue
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1000.0)  # sees unscaled gradients
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(folder)
    print(f"steps {start} to {end}: {engine_of(accelerator).skipped} updates skipped so far")
    return losses


def main() -> None:
    recipe = parse_recipe("Train a small network with Accelerate.")
    with tempfile.TemporaryDirectory() as folder:
        losses = train(recipe, 0, STEPS // 2, folder) + train(recipe, STEPS // 2, STEPS, folder)
    compare("Accelerate", losses, engine_losses(recipe, accumulate=2))


if __name__ == "__main__":
    main()
