"""More causes that replay must name exactly: special functions, reductions, losses, derivatives. In a small decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from replay_steps import capture_and_replay
from torch import Tensor, nn

SIZE = 8


class Fault(nn.Module):
    """Runs one faulty function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Decoder(nn.Module):
    """A gated recurrent cell over a sequence, a norm, the fault in a residual branch, and an output layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(SIZE, SIZE), nn.LayerNorm(SIZE)
        self.branch, self.out = (
            nn.Sequential(nn.Linear(SIZE, SIZE), Fault(function), nn.LeakyReLU()),
            nn.Linear(SIZE, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), SIZE)
        for part in x.unbind(1):
            state = self.cell(part, state)
        hidden = self.norm(state)
        result: Tensor = self.out(hidden + self.branch(hidden).reshape(len(x), -1).mean(1, keepdim=True))
        return result


def draw() -> Tensor:
    return torch.randn(6, 3, SIZE, generator=torch.Generator().manual_seed(11))


def divergence(x: Tensor) -> Tensor:
    return F.kl_div(x.log_softmax(-1), (x * 0).log(), reduction="none", log_target=True)


def distances(x: Tensor) -> Tensor:
    return (x[:, None] - x[None]).square().sum(-1).sqrt()


def geometric_mean(x: Tensor) -> Tensor:
    return (x.abs().cumprod(-1) * 0).log().mean(-1, keepdim=True).exp() + (x - x).rsqrt()


FORWARD: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "inverse root of zero": (lambda x: (x - x).rsqrt(), "aten.rsqrt", "inf"),
    "reciprocal of zero": (lambda x: torch.reciprocal(x * 0), "aten.reciprocal", "inf"),
    "arc cosine above one": (lambda x: (x.abs() + 2).acos(), "aten.acos", "nan"),
    "arc hyperbolic cosine below one": (lambda x: (x * 0).acosh(), "aten.acosh", "nan"),
    "arc hyperbolic tangent of one": (lambda x: (x * 0 + 1).atanh(), "aten.atanh", "inf"),
    "logit of one": (lambda x: torch.logit(x * 0 + 1), "aten.logit", "inf"),
    "log gamma of zero": (lambda x: torch.lgamma(x * 0), "aten.lgamma", "inf"),
    "inverse error function of one": (lambda x: torch.erfinv(x * 0 + 1), "aten.erfinv", "inf"),
    "log1p of minus two": (lambda x: torch.log1p(x * 0 - 2), "aten.log1p", "nan"),
    "logarithm to base two": (lambda x: torch.log2(-x.abs() - 1), "aten.log2", "nan"),
    "exponential": (lambda x: torch.exp(x * 0 + 100), "aten.exp", "inf"),
    "hyperbolic cosine": (lambda x: torch.cosh(x * 0 + 100), "aten.cosh", "inf"),
    "remainder of zero": (lambda x: torch.fmod(x, x * 0), "aten.fmod", "nan"),
    "product of large values": (lambda x: (x * 0 + 1e8).prod(-1, keepdim=True), "aten.prod", "inf"),
    "sum of large values": (lambda x: (x * 0 + 3e38).sum(-1, keepdim=True), "aten.sum", "inf"),
    "square of large values": (lambda x: (x * 0 + 1e20).square(), "aten.pow", "inf"),
    "infinite minus infinite": (lambda x: (x * 0 + 3e38) * 10 - (x * 0 + 3e38) * 10, "aten.mul", "inf"),
    "divergence of zero": (divergence, "aten.log", "inf"),
    "geometric mean": (geometric_mean, "aten.rsqrt", "inf"),
    "scaled attention": (
        lambda x: F.scaled_dot_product_attention(x[None] * 1e25, x[None] * 1e25, x[None])[0],
        "aten.bmm",
        "nan",
    ),
}
BACKWARD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "distance to itself": (distances, "SqrtBackward0"),
    "arc sine of one": (lambda x: (x * 0 + 1).asin(), "AsinBackward0"),
    "small power of zero": (lambda x: (x * 0).pow(0.1), "PowBackward0"),
    "root of a difference": (lambda x: (x - x.detach()).abs().sqrt(), "SqrtBackward0"),
    "hyperbolic root": (lambda x: (x * 0 + 1).acosh(), "AcoshBackward0"),
    "x log x": (lambda x: torch.xlogy(x * 0, x * 0), "XlogyBackward0"),
}


@pytest.mark.parametrize("name", FORWARD)
def test_a_cause_in_forward(name: str, tmp_path: Path) -> None:
    function, op, kind = FORWARD[name]
    found = capture_and_replay(lambda: Decoder(function), tmp_path, draw())
    assert (found.module, found.op, found.phase, found.kind) == ("branch.1", op, "forward", kind), found.message


@pytest.mark.parametrize("name", BACKWARD)
def test_a_cause_in_backward(name: str, tmp_path: Path) -> None:
    function, op = BACKWARD[name]
    found = capture_and_replay(lambda: Decoder(function), tmp_path, draw())
    assert (found.module, found.op, found.phase) == ("branch.1", op, "backward"), found.message
