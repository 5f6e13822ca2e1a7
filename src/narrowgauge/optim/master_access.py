"""Reads and writes the FP32 value of a weight in plain torch, whatever its format: what every optimizer does in a step.

    weight    state                    FP32 value                        written as
    FP32                               the weight itself                 (changed in place)
    BF16      remainder, check         weight and 16 more bits           both halves, and the checksums
    BF16      master                   an FP32 copy                      the copy, and the weight rounded from it
    BF16      seed                     the weight                        the weight, rounded stochastically

If something else has written a weight since the last step, the weight is its own master (``weight_checksums``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim.split_fp32 import is_rounded_from, join, split
from narrowgauge.optim.weight_checksums import GROUP, compute_checksums, expand_groups, find_own_groups


def read_master(weight: Tensor, state: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return the flat FP32 value (the weight itself if it is FP32), and the number of groups that others wrote."""
    flat = weight.detach().view(-1)
    if "master" in state:
        master: Tensor = state["master"].view(-1)
        own = is_rounded_from(flat, master)
        if own.all():
            return master, 0
        master.copy_(torch.where(own, master, flat.float()))
        return master, len((~own).nonzero().div(GROUP, rounding_mode="floor").unique())
    if "remainder" in state:
        remainder, own = state["remainder"].view(-1), find_own_groups(flat, state["check"])
        foreign = int((~own).sum())
        if foreign:
            remainder = torch.where(expand_groups(own, len(flat)), remainder, 0)
        return join(flat, remainder), foreign
    return (flat if flat.dtype is torch.float32 else flat.float()), 0


def write_master(weight: Tensor, master: Tensor, state: Mapping[str, Any], step: int) -> None:
    """Write back what ``read_master`` returned and the caller changed; ``step`` is that of stochastic rounding."""
    flat = weight.detach().view(-1)
    if "remainder" in state:
        high, low = split(master)
        flat.copy_(high)
        state["remainder"].view(-1).copy_(low)
        state["check"].copy_(compute_checksums(high))
    elif "master" in state:
        flat.copy_(split(master)[0])
    elif flat.dtype is torch.bfloat16:
        flat.copy_(round_stochastically(master, step, state["seed"]))


def round_stochastically(master: Tensor, step: int, seed: int) -> Tensor:
    """Round FP32 to BF16, up or down so that the mean is right; deterministic for a step and seed."""
    index = torch.arange(master.numel(), device=master.device)
    noise = mix(index ^ mix(torch.tensor(step * 0x9E3779B1 + seed, device=master.device))) & 0xFFFF
    bits = master.view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    raised = (bits.long() + noise).to(torch.int32)
    return (torch.where(finite, raised, bits) >> 16).to(torch.int16).view(torch.bfloat16)


def mix(x: Tensor) -> Tensor:
    """Hash 32 bits, in int64, with two multiplications that affect every bit (lowbias32)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
