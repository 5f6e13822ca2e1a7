"""The broken parts used in ``faults``: modules, losses, optimizers and engines with one classic mistake each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.engine import Engine
from narrowgauge.optim.adamw import AdamW
from narrowgauge.step_report import StepReport


class FP16Norm(nn.Module):
    """RMS norm with the sum of squares in FP16: the sum becomes inf and the output 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            half = x.half()
            squares = half.square().sum(-1, keepdim=True)
            return half * torch.rsqrt(squares / half.shape[-1] + 1e-3) * self.weight.half()


class FP16Softmax(nn.Module):
    """exp(x) / sum(exp(x)) in FP16, the textbook formula."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            powers = torch.exp(x.half())
            return powers / powers.sum(-1, keepdim=True)


class _Log(nn.Module):
    def forward(self, p: Tensor) -> Tensor:
        return torch.log(p)


class LogOfZero(nn.Module):
    """Logarithm of probabilities that may be zero unless ``floor`` is added."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor, self.log = floor, _Log()

    def forward(self, x: Tensor) -> Tensor:
        logarithm: Tensor = self.log(torch.softmax(x, -1) + self.floor)
        return torch.tanh(logarithm) * 0.1


def sum_loss_in_fp16(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in FP16, summed over the samples before the division.

    The sum is written as additions because the engine would run ``sum`` in FP32.
    """
    each = (F.cross_entropy(model(inputs).float(), targets, reduction="none") * 512).half()
    count = 512 * len(each)
    while len(each) > 1:
        each = each[::2] + each[1::2]
    return each[0].float() / count


class BF16WithoutMaster(AdamW):
    """Adam on BF16 weights without masters, rounded to nearest: smaller updates than half the spacing are lost."""

    dithers = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                grad = parameter.grad.float()
                for name, beta, value in (("m", 0.9, grad), ("v", 0.99, grad.square())):
                    state[name] = beta * state.get(name, value) + (1 - beta) * value
                change = group["lr"] * state["m"] / (state["v"].sqrt() + 1e-8)
                parameter.copy_((parameter.float() - change).to(parameter.dtype))


class FP16Moments(torch.optim.AdamW):
    """AdamW with moments and epsilon in FP16."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["eps"] = float(torch.tensor(group["eps"]).half())
        result = super().step(closure)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].half())
        return result


class ClipBeforeUnscale(Engine):
    """Clips scaled gradients, then unscales them."""

    def _compute_factor(self, grad_norm: Tensor, scale: Tensor, share: float, found: Tensor) -> Tensor | None:
        clip = 1.0 if self.clip_norm is None else self.clip_norm
        self._clipped = torch.clamp(grad_norm * scale, max=clip) / scale
        factor = scale * ((grad_norm * scale + 1e-6) / clip).clamp(min=1.0)
        return torch.where(found, self._one, factor)

    def _update(self, chosen: Sequence[Optimizer] = ()) -> StepReport:
        """Report the norm after clipping and unscaling, as such a loop would: the same small number every time."""
        report = super()._update(chosen)
        return StepReport(report.index, True, {**report.tensors, "grad_norm": self._clipped})


class FrozenScales(Engine):
    """Freezes the FP8 scales after eight updates."""

    def _update(self, chosen: Sequence[Optimizer] = ()) -> StepReport:
        scales = self.conversion.scales
        if scales is not None and self.updates >= 8:
            frozen = scales.scale.clone(), scales.inv_scale.clone()
            report = super()._update(chosen)
            scales.scale.copy_(frozen[0])
            scales.inv_scale.copy_(frozen[1])
            return report
        return super()._update(chosen)
