"""A plain torch.amp loop with ``ng.LossScaler`` as a drop-in replacement for ``torch.amp.GradScaler``.

python examples/torch_amp_loop.py

The losses are equal bit for bit. Then every batch is bad. GradScaler halves its scale until 1/scale is inf, and the
next good batch ruins the weights. LossScaler stops and names the parameters whose gradients were not finite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny import STEPS, compare, make_loader, make_model, make_optimizer
from torch import Tensor, nn

import narrowgauge as ng


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, batch: object) -> Tensor:
    """Train one step exactly as torch.amp's documentation does."""
    points, labels = batch  # type: ignore[misc]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(points).float(), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def train(scaler: torch.amp.GradScaler) -> list[float]:
    model = make_model()
    optimizer = make_optimizer(model)
    return torch.stack([step(model, optimizer, scaler, batch) for batch in make_loader(STEPS)]).tolist()


def poison(scaler: torch.amp.GradScaler) -> str:
    """Return what a scaler does after many batches with NaN gradients and one good batch."""
    model = make_model()
    optimizer = make_optimizer(model)
    points, labels = next(iter(make_loader(1)))
    try:
        for _ in range(160):
            step(model, optimizer, scaler, (points * torch.inf, labels))
        step(model, optimizer, scaler, (points, labels))
    except ng.TrainingStalled as error:
        return f"stopped, weights as before. {error}"
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return f"continued with a scale of {scaler.get_scale():g}; the weights are {'finite' if finite else 'ruined'}"


def main() -> None:
    compare("ng.LossScaler", train(ng.LossScaler("cpu")), train(torch.amp.GradScaler("cpu")), "torch.amp.GradScaler")
    print("GradScaler:", poison(torch.amp.GradScaler("cpu")))
    print("LossScaler:", poison(ng.LossScaler("cpu")))


if __name__ == "__main__":
    main()
