"""The state of one parameter: what its moments are made of, and whether it still fits its parameter and its group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.optim.masters import new_filled
from narrowgauge.optim.moments import SIGNED, count_groups, get_scale_name, list_moments
from narrowgauge.optim.sharded import to_local

_COMPLETES = {"split": "remainder", "fp32": "master", "none": "seed"}
"""The entry of a BF16 parameter's state for each kind of master."""


def make_moment(parameter: Tensor, name: str, form: str) -> dict[str, Tensor]:
    """Return the entries of a moment that is 0."""
    if parameter.is_complex():
        return {name: new_filled(parameter, 0, parameter.dtype)}
    if form == "8bit":
        signed = SIGNED[name]
        codes = new_filled(parameter, 0 if signed else 1, torch.int8 if signed else torch.uint8)
        scales = torch.zeros(count_groups(to_local(parameter).numel()), device=parameter.device)
        return {name: codes, get_scale_name(name): scales}
    return {name: new_filled(parameter, 0, torch.float32 if form == "fp32" else torch.bfloat16)}


def drop_other_moments(state: dict[str, Any], names: Iterable[str]) -> None:
    """Remove moments that are not among ``names``: those of the rule that a group had before."""
    for name in set(list_moments(state)) - set(names):
        del state[name]
        state.pop(get_scale_name(name), None)


def is_complete(parameter: nn.Parameter, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a state has the master of its parameter, whose dtype or data may have been changed by other code."""
    if parameter.dtype is not torch.bfloat16:
        return "remainder" not in state and "master" not in state
    name = _COMPLETES[group["master"]]
    other = None if name == "seed" else state.get(name)
    return name in state and getattr(parameter, "other_half", None) is other
