"""AdamW's moments in 8 bits: one byte per value, one FP32 scale for every 128 neighbours of a flattened parameter.

    first     m = scale * soft(c)               c = -127..127      soft(c) = c / (254 - |c|): finer near zero
    second    v = scale * soft(c)^2             c = 1..255         soft(c) = c / (510 - c): never 0

If v rounded to 0, the update would be m / eps, so the lowest code is 1. The second moment changes by a thousandth per
step, and its codes are a hundredth apart: rounding to nearest would never change it. So it is rounded up with a
frequency given by the remainder, from an evenly distributed sequence over elements and steps. A kernel needs no lookup
table for this. bench/moments.py compares it with alternatives on real gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROUP = 128
PLASTIC = 3242174889, 2447445414
"""2^32 divided by the plastic number and by its square."""


def count_groups(numel: int) -> int:
    """Return the number of scales of a tensor."""
    return -(-numel // GROUP)


def encode_first(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (int8) and scales of a flat FP32 tensor."""
    rows = _rows(m)
    scale = rows.abs().amax(1)
    share = rows.abs() * _inverse(scale)[:, None]
    codes = torch.round(share * 254 / (1 + share)).copysign(rows)
    return codes.to(torch.int8).view(-1)[: m.numel()], scale


def decode_first(codes: Tensor, scale: Tensor) -> Tensor:
    code = codes.float()
    return code / (254 - code.abs()) * _spread(scale, codes.numel())


def encode_second(v: Tensor, step: int | None) -> tuple[Tensor, Tensor]:
    """Return codes (uint8) and scales of a flat, non-negative FP32 tensor.

    ``step`` selects the rounding thresholds; None rounds to nearest, which restores the codes of decoded values.
    """
    rows = _rows(v)
    scale = rows.amax(1)
    share = (rows * _inverse(scale)[:, None]).sqrt()
    thresholds = 0.5 if step is None else _thresholds(rows.numel(), step, v.device).view_as(rows)
    codes = (share * 510 / (1 + share) + thresholds).floor().clamp(1, 255)
    return codes.to(torch.uint8).view(-1)[: v.numel()], scale


def decode_second(codes: Tensor, scale: Tensor) -> Tensor:
    code = codes.float()
    return (code / (510 - code)).square() * _spread(scale, codes.numel())


def _thresholds(numel: int, step: int, device: torch.device) -> Tensor:
    """Return offsets in [0, 1) to add before rounding down, evenly distributed over elements and steps (R2)."""
    state = (torch.arange(numel, device=device) * PLASTIC[0] + step * PLASTIC[1]) & 0xFFFFFFFF
    return (state >> 8).float() * 2.0**-24


def convert_moments(state: dict[str, Any], moments: str) -> None:
    """Convert the moments of a state to another format, in place."""
    first, second = state["exp_avg"], state["exp_avg_sq"]
    have = "8bit" if "exp_avg_scale" in state else "fp32" if first.dtype is torch.float32 else "bf16"
    if have == moments:
        return
    if have == "8bit":
        first = decode_first(first.reshape(-1), state.pop("exp_avg_scale")).view(first.shape)
        second = decode_second(second.reshape(-1), state.pop("exp_avg_sq_scale")).view(second.shape)
    if moments == "8bit":
        codes, state["exp_avg_scale"] = encode_first(first.float().reshape(-1))
        state["exp_avg"] = codes.view(first.shape)
        codes, state["exp_avg_sq_scale"] = encode_second(second.float().reshape(-1), None)
        state["exp_avg_sq"] = codes.view(second.shape)
        return
    dtype = torch.float32 if moments == "fp32" else torch.bfloat16
    state["exp_avg"], state["exp_avg_sq"] = first.to(dtype), second.to(dtype)


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, or 0 for groups that are almost 0, so that it stays finite."""
    some = scale > 1e-37
    return torch.where(some, 1 / torch.where(some, scale, 1.0), 0.0)


def _rows(flat: Tensor) -> Tensor:
    """Return a flat tensor in groups, the last one padded with zeros."""
    missing = -flat.numel() % GROUP
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, GROUP)


def _spread(scale: Tensor, numel: int) -> Tensor:
    return scale.repeat_interleave(GROUP)[:numel]
