"""Small tasks of other types than the built-in ones, for checks over many runs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import Task
from narrowgauge.models.llama import Llama, LlamaConfig


def _make_generator(step: int, split: str) -> torch.Generator:
    return torch.Generator().manual_seed(step + (1_000_000 if split == "eval" else 0))


def llama() -> Task:
    """A Llama on sequences that count up by a stride, which the model must infer."""

    def batch(step: int, split: str) -> tuple[Tensor, Tensor]:
        generator = _make_generator(step, split)
        start = torch.randint(0, 64, (8, 1), generator=generator)
        stride = torch.randint(1, 5, (8, 1), generator=generator)
        tokens = (start + stride * torch.arange(33)) % 64
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    config = LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocab=64, context=32)
    return Task(
        name="llama", model=lambda: Llama(config), batch=batch, loss=lambda model, pair: model(*pair),
        items_per_batch=256, unit="token", learning_rate=2e-3, steps=60,
    )  # fmt: skip


def regression() -> Task:
    """Regression of a smooth function of eight numbers, by an MLP with batch norm."""

    def batch(step: int, split: str) -> tuple[Tensor, Tensor]:
        x = torch.randn(64, 8, generator=_make_generator(step, split))
        return x, torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(pair[0]).float(), pair[1])

    return Task(
        name="regression", model=model, batch=batch, loss=loss, items_per_batch=64, unit="sample",
        learning_rate=3e-3, steps=150,
    )  # fmt: skip


def autoencoder() -> Task:
    """A convolutional autoencoder for images of one blob."""

    def batch(step: int, split: str) -> Tensor:
        generator = _make_generator(step, split)
        centre = torch.rand(16, 2, 1, 1, generator=generator) * 12 + 2
        grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))[None]
        return torch.exp(-((grid - centre) ** 2).sum(1, keepdim=True) / 8)

    def model() -> nn.Module:
        down = [nn.Conv2d(1, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()]
        up = [nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)]
        return nn.Sequential(*down, *up)

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        return F.mse_loss(model(images).float(), images)

    return Task(
        name="autoencoder", model=model, batch=batch, loss=loss, items_per_batch=16, unit="image",
        learning_rate=3e-3, steps=120,
    )  # fmt: skip
