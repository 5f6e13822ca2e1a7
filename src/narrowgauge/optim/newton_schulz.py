"""Orthogonalizes matrices by a Newton-Schulz iteration in BF16, as Muon does.

    X <- X / |X|                          Frobenius norm, so that no singular value is above 1
    X <- a X + (b A + c A A) X            with A = X X^T, several times

The default coefficients move singular values to between 0.7 and 1.2 in five iterations, not to 1: training does not
need more (K. Jordan, 2024). Tall matrices are transposed, so that A is the smaller of both products.

Matrices of equal shape may be stacked: then each product is one batched call, for which a GPU needs a fraction of the
time that it needs for many small ones.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from narrowgauge import hardware

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7
MOST_STEPS = 100
ADJUSTMENTS = (None, "original", "match_rms_adamw")


def orthogonalize(
    matrices: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = STEPS, eps: float = EPS
) -> Tensor:
    """Return the orthogonalized matrices in BF16. They are one matrix [r, c] or a stack [n, r, c]."""
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16, copy=True)
    x = x.mT if tall else x
    norm = x.norm() if matrices.dim() == 2 else torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x.div_(norm.clamp(min=eps))
    for _ in range(steps):
        gram = _multiply(None, x, x.mT)
        x = _multiply(x, _multiply(gram, gram, gram, b, c), x, a)
    return x.mT if tall else x


def _multiply(z: Tensor | None, x: Tensor, y: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return alpha x y + beta z in BF16, accumulated in FP32.

    CPUs without products in BF16 multiply the same numbers in FP32, and round the result: torch's product in BF16 takes
    a hundred times as long there.
    """
    widens = x.device.type == "cpu" and not _cpu_multiplies_bf16()
    if widens:
        z, x, y = None if z is None else z.float(), x.float(), y.float()
    if z is None:
        made = x @ y
    else:
        made = (torch.addmm if x.dim() == 2 else torch.baddbmm)(z, x, y, beta=beta, alpha=alpha)
    return made.to(torch.bfloat16) if widens else made


@functools.cache
def _cpu_multiplies_bf16() -> bool:
    return "bf16" in hardware.detect("cpu").native


def adjust_rate(lr: float, adjustment: str | None, shape: torch.Size) -> float:
    """Return the learning rate of a matrix: larger for tall ones, or such that updates are as large as AdamW's."""
    rows, columns = shape[-2:]
    if adjustment == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))
