"""What rounding the head's weight to FP8 adds to every token's logit in all positions, so that it can be taken back.

With the weight W and its rounded copy W8, the logits of a position with input x are wrong by x (W8 - W)'. The inputs
of a head have much in common: their mean m is far from zero. So a part of the error, m (W8 - W)', is the same in all
positions: each token's logit is wrong by a constant, as if its frequency were another one. The gradients of all batches
then have a common error, which does not average out as other rounding errors do.

This part is known after one pass over the weight. With m (W - W8)' added,

    logits = x W8' + m (W - W8)' = m W' + (x - m) W8'

the mean is multiplied exactly, and only what differs from it by the rounded weight. Any m keeps this equation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.scaling.operand import Operand

MOST_ROWS = 8192
"""Rows of the input of which the mean is taken, evenly spread. Any vector is valid, so an estimate is enough."""
STEP = 8192
"""Rows of the weight that are converted to FP32 at once."""


@torch.no_grad()
def compute_correction(x: Tensor, weight: Tensor, rounded: Operand) -> Tensor:
    """Return m (W - W8)' in BF16.

    Args:
        x: The input [N, D].
        weight: W [V, D].
        rounded: W8 with one scale.
    """
    assert rounded.lp is not None and rounded.inv_scale is not None
    mean = x.detach()[:: max(1, len(x) // MOST_ROWS)].float().mean(0)
    mean = mean.nan_to_num(0.0, 0.0, 0.0)  # rows whose targets are ignored may contain anything
    made = torch.empty(len(weight), dtype=torch.bfloat16, device=x.device)
    for begin in range(0, len(weight), STEP):
        exact = weight.detach()[begin : begin + STEP].float()
        made[begin : begin + STEP] = (exact - rounded.lp[begin : begin + STEP].float() * rounded.inv_scale) @ mean
    return made
