"""The task ``digits``: a small convolutional network on scikit-learn's 1,797 images of 8 x 8 pixels.

The images are part of scikit-learn, so nothing is downloaded. A fifth of them is held out for evaluation, the same on
every machine and for every seed. An evaluation batch is always all of that fifth, so that the accuracy is exact.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.task import Task

CLASSES = 10
CHANNELS = 16
EVAL_EVERY = 5


class DigitNet(nn.Module):
    """Three convolutions and a linear layer. Channels are multiples of 8, which suits tensor cores."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.head = nn.Linear(2 * channels * 4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv1(images))  # 8 x 8
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # 4 x 4
        x = F.max_pool2d(F.relu(self.conv3(x)), 2)  # 2 x 2
        logits: Tensor = self.head(x.flatten(1))
        return logits


def make(batch: int = 64, seed: int = 0) -> Task:
    """Make the task.

    Args:
        batch: Images per batch.
        seed: Decides the order of the images.

    Raises:
        UsageError: ``batch`` is below 1.
    """
    if batch < 1:
        raise UsageError(f"--batch {batch}: expected at least 1 image")

    def make_batch(step: int, split: str) -> tuple[Tensor, Tensor]:
        images, labels = load(split)
        if split == "eval":
            return images, labels
        per_epoch = len(labels) // batch
        if not per_epoch:
            raise UsageError(
                f"a batch of {batch} images is more than the {len(labels)} there are; give a smaller --batch"
            )
        epoch, position = divmod(step, per_epoch)
        order = np.random.default_rng([seed % (1 << 64), epoch]).permutation(len(labels))
        chosen = torch.from_numpy(order[position * batch : (position + 1) * batch])
        return images[chosen], labels[chosen]

    def make_synthetic_batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(batch, 1, 8, 8, generator=generator)
        return images, torch.randint(0, CLASSES, (batch,), generator=generator)

    return Task(
        reads_ahead=True,
        name="digits",
        model=DigitNet,
        batch=make_batch,
        loss=loss,
        metrics=metrics,
        synthetic=make_synthetic_batch,
        items_per_batch=batch,
        unit="image",
        learning_rate=1.5e-3,
        weight_decay=0.01,
        steps=240,
        eval_batches=1,
        facts={"batch": batch, "chance_loss": float(np.log(CLASSES))},
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the accuracy on a batch."""
    images, labels = batch
    return {"accuracy": (model(images).argmax(-1) == labels).float().mean()}


@functools.cache
def load(split: str) -> tuple[Tensor, Tensor]:
    """Load images (N, 1, 8, 8) in -1..1 and their labels. Every fifth of a fixed shuffle is for evaluation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError("the task digits needs the package scikit-learn, which is not installed; install it") from None
    if split not in ("train", "eval"):
        raise UsageError(f"there is no split {split!r}; the splits are train and eval")
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    held = np.arange(len(order)) % EVAL_EVERY == 0
    chosen = order[held if split == "eval" else ~held]
    images = torch.from_numpy(data.images[chosen] / 8.0 - 1.0).float().unsqueeze(1)
    return images, torch.from_numpy(data.target[chosen]).long()
