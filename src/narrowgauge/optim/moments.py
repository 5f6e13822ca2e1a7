"""Moments in 8 bits: one byte per value, one FP32 scale for every 128 neighbours of a flattened parameter.

    first     m = scale * soft(c)               c = -127..127      soft(c) = c / (254 - |c|): finer near zero
    second    v = scale * soft(c)^2             c = 1..255         soft(c) = c / (510 - c): never 0

If v rounded to 0, the update would be m / eps, so the lowest code is 1. The second moment changes by a thousandth per
step, and its codes are a hundredth apart: rounding to nearest would never change it. So it is rounded up with a
frequency given by the remainder, from an evenly distributed sequence over elements and steps. A kernel needs no lookup
table for this. bench/moments.py compares it with alternatives on real gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

GROUP = 128
PLASTIC = 3242174889, 2447445414
"""2^32 divided by the plastic number and by its square."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False, "momentum_buffer": True}
"""The moments that optimizers have, and whether they are encoded as first moments, which have a sign."""
FORMATS = ("fp32", "bf16", "8bit")


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


def list_moments(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the moments that a state has."""
    return [name for name in SIGNED if name in state]


def get_scale_name(name: str) -> str:
    """Return the name of the scales of a moment in 8 bits."""
    return f"{name}_scale"


def is_eight_bit(state: Mapping[str, Any]) -> bool:
    """Whether the moments of a state are codes with scales."""
    return any(get_scale_name(name) in state for name in list_moments(state))


def load_moment(state: Mapping[str, Any], name: str) -> Tensor:
    """Return a moment as a flat FP32 tensor; the state's own memory if it is FP32."""
    values: Tensor = state[name].view(-1)
    scale = state.get(get_scale_name(name))
    if scale is None:
        return values if values.dtype is torch.float32 else values.float()
    return decode_first(values, scale) if SIGNED[name] else decode_second(values, scale)


def store_moment(state: Mapping[str, Any], name: str, value: Tensor, step: int) -> None:
    """Store what ``load_moment`` returned and the caller changed; ``step`` is that of the rounding."""
    target, scale = state[name].view(-1), state.get(get_scale_name(name))
    if scale is not None:
        codes, scales = encode_first(value) if SIGNED[name] else encode_second(value, step)
        target.copy_(codes)
        scale.copy_(scales)
    elif target.dtype is not torch.float32:
        target.copy_(value)


def convert_moments(state: dict[str, Any], form: str) -> None:
    """Convert the moments of a state to another format, in place."""
    for name in list_moments(state):
        values, scale = state[name], get_scale_name(name)
        have = "8bit" if scale in state else "fp32" if values.dtype is torch.float32 else "bf16"
        if have == form:
            continue
        if have == "8bit":
            decode = decode_first if SIGNED[name] else decode_second
            values = decode(values.reshape(-1), state.pop(scale)).view(values.shape)
        if form == "8bit":
            flat = values.float().reshape(-1)
            codes, state[scale] = encode_first(flat) if SIGNED[name] else encode_second(flat, None)
            state[name] = codes.view(values.shape)
        else:
            state[name] = values.to(torch.float32 if form == "fp32" else torch.bfloat16)


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
