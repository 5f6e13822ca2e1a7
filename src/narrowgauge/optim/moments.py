"""AdamW's moments in 8 bits: one byte a value, one FP32 scale for every 128 neighbours of a flattened parameter.

    first     m = scale * c^2 sign(c)           c = -127..127 / 127: fine near zero, where most of a group lies
    second    v = scale * c^4                   c = 1..255 / 255: fourteen decades; never 0, as the update divides by it

A v that rounded to 0 would make the update m / eps. A value below half the smallest code is kept at that code instead,
which makes its update smaller than it should be, never larger. All of it is arithmetic: a kernel needs no table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROUP = 128


def groups_of(numel: int) -> int:
    """How many scales a tensor has."""
    return -(-numel // GROUP)


def encode_first(m: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (int8) and scales of a flat FP32 tensor."""
    rows = _rows(m)
    scale = rows.abs().amax(1)
    share = rows.abs() * _inverse(scale)[:, None]
    codes = torch.round(share.sqrt() * 127).copysign(rows)
    return codes.to(torch.int8).view(-1)[: m.numel()], scale


def decode_first(codes: Tensor, scale: Tensor) -> Tensor:
    part = codes.float() * (1 / 127)
    return part * part.abs() * _spread(scale, codes.numel())


def encode_second(v: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and scales of a flat FP32 tensor that has no negative values."""
    rows = _rows(v)
    scale = rows.amax(1)
    share = rows * _inverse(scale)[:, None]
    codes = torch.round(share.sqrt().sqrt() * 255).clamp(min=1)
    return codes.to(torch.uint8).view(-1)[: v.numel()], scale


def decode_second(codes: Tensor, scale: Tensor) -> Tensor:
    part = codes.float() * (1 / 255)
    square = part * part
    return square * square * _spread(scale, codes.numel())


def reformat(state: dict[str, Any], moments: str) -> None:
    """Bring saved moments into another format, in place."""
    first, second = state["exp_avg"], state["exp_avg_sq"]
    have = "8bit" if "exp_avg_scale" in state else "fp32" if first.dtype is torch.float32 else "bf16"
    if have == moments:
        return
    if have == "8bit":
        first = decode_first(first.reshape(-1), state.pop("exp_avg_scale")).view(first.shape)
        second = decode_second(second.reshape(-1), state.pop("exp_avg_sq_scale")).view(second.shape)
    if moments == "8bit":
        for name, value, encode in (
            ("exp_avg", first, encode_first), ("exp_avg_sq", second, encode_second),
        ):  # fmt: skip
            codes, state[f"{name}_scale"] = encode(value.float().reshape(-1))
            state[name] = codes.view(value.shape)
        return
    dtype = torch.float32 if moments == "fp32" else torch.bfloat16
    state["exp_avg"], state["exp_avg_sq"] = first.to(dtype), second.to(dtype)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, kept finite: a group of zeros, or of next to nothing, has zeros for shares."""
    some = scale > 1e-37
    return torch.where(some, 1 / torch.where(some, scale, 1.0), 0.0)


def _rows(flat: Tensor) -> Tensor:
    """A flat tensor in groups, the last one filled up with zeros."""
    missing = -flat.numel() % GROUP
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, GROUP)


def _spread(scale: Tensor, numel: int) -> Tensor:
    return scale.repeat_interleave(GROUP)[:numel]
