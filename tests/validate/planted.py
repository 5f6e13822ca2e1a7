"""A task in small units, as physics has them, and the same with classic mistakes in its code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import Task

UNIT = 3e-3


def _batch(seed: int) -> Callable[[int, str], tuple[Tensor, Tensor]]:
    def batch(step: int, split: str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step * 1000 + seed + (10**9 if split == "eval" else 0))
        x = torch.randn(64, 8, generator=generator)
        noise = 0.02 * torch.randn(64, 1, generator=generator)
        return x, (torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + noise) * UNIT

    return batch


def _model(mixer: Callable[[], nn.Module] = nn.SiLU, linear: type[nn.Linear] = nn.Linear) -> nn.Module:
    return nn.Sequential(linear(8, 48), nn.LayerNorm(48), mixer(), linear(48, 48), nn.SiLU(), linear(48, 1))


def _loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Of the prediction in the target's own units."""
    x = pair[0].to(next(model.parameters()).dtype)
    return F.mse_loss(model(x).float() * UNIT, pair[1])


def healthy(seed: int = 0) -> Task:
    return Task(
        name="healthy", model=_model, batch=_batch(seed), loss=_loss, items_per_batch=64, unit="sample",
        learning_rate=1e-2, steps=100,
    )  # fmt: skip


def slow(seed: int = 0) -> Task:
    """With a small learning rate, at which BF16's spacing would swallow updates."""
    return dataclasses.replace(healthy(seed), name="slow", learning_rate=1e-3)


class NoMasters(torch.optim.AdamW):
    """Weights that are BF16 numbers after every update, rounded to nearest."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.copy_(weight.bfloat16())


def slow_no_masters(seed: int = 0) -> Task:
    return dataclasses.replace(
        slow(seed), name="slow, no masters", optimizer=lambda model, rate: NoMasters(model.parameters(), rate)
    )


class _E5m2(torch.autograd.Function):
    """Rounds to E5M2 at the best scale, forward and backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return _rounded(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return _rounded(grads[0])


def _rounded(x: Tensor) -> Tensor:
    scale = 57344 / x.detach().abs().amax().clamp(min=1e-30)
    return (x * scale).to(torch.float8_e5m2).to(x.dtype) / scale


class E5m2Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_E5m2.apply(x), _E5m2.apply(self.weight), self.bias)


def e5m2(seed: int = 0) -> Task:
    return dataclasses.replace(healthy(seed), name="e5m2", model=lambda: _model(linear=E5m2Linear))


class Softmax(nn.Module):
    """Shares of large logits, by the textbook's formula in the format the model computes in."""

    dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            powers = torch.exp((x * 12).to(self.dtype))
            return (powers / powers.sum(-1, keepdim=True)).float() * 8


class HalfSoftmax(Softmax):
    dtype = torch.float16


def softmax(seed: int = 0) -> Task:
    return dataclasses.replace(healthy(seed), name="softmax", model=lambda: _model(Softmax))


def softmax_fp16(seed: int = 0) -> Task:
    return dataclasses.replace(healthy(seed), name="softmax in fp16", model=lambda: _model(HalfSoftmax))


def noisy(seed: int = 0) -> Task:
    """Losses 1.5% off by chance: drawn by seed and format, so that they are the same on every machine."""

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        generator = torch.Generator().manual_seed(2 * seed + torch.is_autocast_enabled("cpu"))
        return _loss(model, pair) * (1 + 0.015 * torch.randn((), generator=generator))

    return dataclasses.replace(healthy(seed), name="noisy", loss=loss, steps=30)
