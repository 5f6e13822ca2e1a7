"""The Lightning Trainer under a recipe: one argument, ``plugins=ng_precision(...)``.

python examples/lightning_trainer.py --recipe fp16

Training stops after one epoch. A new model and Trainer resume from the checkpoint, which contains weights, optimizer,
loss scale and FP8 scales. The losses equal those of a plain ``ng.Engine`` loop, bit for bit.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from lightning import LightningModule, Trainer
from tiny import STEPS, compare, engine_losses, make_loader, make_model, make_optimizer, parse_recipe
from torch import Tensor
from torch.optim import Optimizer

from narrowgauge.integrations.lightning import ng_precision


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = make_model()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self)


def make_trainer(recipe: str, epochs: int, folder: str) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, default_root_dir=folder, enable_checkpointing=False, **quiet,
        plugins=ng_precision(recipe),
    )  # fmt: skip


def main() -> None:
    recipe = parse_recipe("Train a small network with the Lightning Trainer.")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*LeafSpec.*")
    with tempfile.TemporaryDirectory() as folder:
        first, second = Classifier(), Classifier()
        trainer = make_trainer(recipe, 1, folder)
        trainer.fit(first, make_loader(STEPS // 2))
        trainer.save_checkpoint(Path(folder) / "half.ckpt")
        trainer = make_trainer(recipe, 2, folder)
        trainer.fit(second, make_loader(STEPS // 2), ckpt_path=Path(folder) / "half.ckpt")
    compare("Trainer", first.losses + second.losses, engine_losses(recipe, STEPS // 2, epochs=2))


if __name__ == "__main__":
    main()
