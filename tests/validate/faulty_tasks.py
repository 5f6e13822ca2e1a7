"""A task with small target values, and variants with common mistakes in the code."""

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
    """The mean squared error in the units of the target."""
    x = pair[0].to(next(model.parameters()).dtype)
    return F.mse_loss(model(x).float() * UNIT, pair[1])


def healthy(seed: int = 0) -> Task:
    return Task(
        name="healthy", model=_model, batch=_batch(seed), loss=_loss, items_per_batch=64, unit="sample",
        learning_rate=1e-2, steps=100,
    )  # fmt: skip


def slow(seed: int = 0) -> Task:
    """A small learning rate, at which updates are lost if weights are BF16."""
    return dataclasses.replace(healthy(seed), name="slow", learning_rate=1e-3)


class NoMasters(torch.optim.AdamW):
    """Rounds the weights to the nearest BF16 number after every update."""

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
    """Rounds to scaled E5M2 in the forward and backward pass."""

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
    """A softmax of large logits without subtracting the maximum."""

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
    """Losses with 1.5% noise that depends only on the seed and the format, so that it is equal on every machine."""

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        generator = torch.Generator().manual_seed(2 * seed + torch.is_autocast_enabled("cpu"))
        return _loss(model, pair) * (1 + 0.015 * torch.randn((), generator=generator))

    return dataclasses.replace(healthy(seed), name="noisy", loss=loss, steps=30)
