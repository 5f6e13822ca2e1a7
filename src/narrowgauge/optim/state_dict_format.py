"""Optimizer states as they are saved, and what is made of them when they are loaded.

    of                      is saved as
    8-bit moments           their codes and scales under names that torch does not know: it would take codes for
                            moments. In the place of the step stands ``FOR_TORCH``: what torch's AdamW says when it
                            loads the state and wants a number there
    sharded parameters      FP32 moments, and for remainders all 32 bits of the masters: DTensors that can be sharded
                            otherwise, or gathered. By the same names, as torch.distributed.checkpoint asks for those
    split masters           remainders, and the check words of the weights they belong to, so that weights may be loaded
                            before the state or after it
    everything else         what torch saves, by the same names

Loading takes all of these, states of torch's AdamW, and older ones: 8-bit moments by torch's names, remainders without
words, which then belong to the weights that the model has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.optim import moments, sharded
from narrowgauge.optim.sharded import is_sharded, shard_like, to_local
from narrowgauge.optim.weight_checksums import join_master

EIGHT_BIT = "_8bit"
FOR_TORCH = b"8-bit moments of narrowgauge; load narrowgauge.optim.plain_state(state_dict) instead"
"""In bytes, as torch's load_state_dict takes text apart, and ends with: could not convert string to float."""
RENAMED = ("step", "exp_avg", "exp_avg_sq")
"""What gets the ending where moments are of 8 bits."""
ELEMENTWISE = ("exp_avg", "exp_avg_sq", "remainder", "master")
"""What a state has an element of for each of the parameter's."""


def make_portable(state_dict: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """An optimizer's state, as torch has packed it, in the form in which it is saved."""
    states = {}
    for index, saved in state_dict["state"].items():
        if is_sharded(saved.get("exp_avg")):
            saved = _unshard_values(dict(saved), parameters[index])
        if "exp_avg_scale" in saved:
            saved = {name + EIGHT_BIT if name in RENAMED else name: value for name, value in saved.items()}
            saved["step"] = FOR_TORCH
        states[index] = saved
    return {**state_dict, "state": states}


def _unshard_values(saved: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """The state of a sharded parameter without what means something on its shard alone."""
    if "exp_avg_scale" in saved:
        sharded.convert_moments(saved, "fp32")
    remainder, words = saved.pop("remainder", None), saved.pop("check", None)
    if remainder is not None:
        master = join_master(to_local(parameter).detach(), to_local(remainder), words)
        saved["remainder"] = shard_like(master.view(torch.int32), parameter)
    return saved


def strip_format_suffixes(saved: dict[str, Any]) -> dict[str, Any]:
    """A saved state by the names that an optimizer has for it. {} stands for what is not there."""
    return {name.removesuffix(EIGHT_BIT): value for name, value in saved.items() if not isinstance(value, dict | bytes)}


def restore_state(saved: dict[str, Any], parameter: nn.Parameter, form: str) -> dict[str, Any]:
    """A copy of a saved state as its parameter is: on its device, sharded as it is, with moments in this format."""
    state = strip_format_suffixes(saved)
    if is_sharded(parameter):  # an unsharded state, whose groups are cut differently
        state.pop("check", None)
        if "exp_avg_scale" in state:
            moments.convert_moments(state, "fp32")
    for name, value in state.items():
        if isinstance(value, Tensor):
            value = sharded.place_like(value, parameter) if name in ELEMENTWISE else value
            value = value.to(parameter.device, copy=True)
            state[name] = value if to_local(value).is_contiguous() else value.contiguous()
    _decode_remainders(state)
    if parameter.is_complex():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(parameter.dtype)
    else:
        sharded.convert_moments(state, form)
    return state


def _decode_remainders(state: dict[str, Any]) -> None:
    """What a remainder of 32 bits is: a master, or an older state's 16 bits, as gloo and NCCL send no fewer."""
    remainder = state.get("remainder")
    if remainder is None or remainder.dtype is torch.int16:
        return
    values = to_local(state.pop("remainder"))
    if bool((values != values.to(torch.int16)).any()):
        state["master"] = shard_like(values.view(torch.float32), remainder)
    else:
        state["remainder"] = shard_like(values.to(torch.int16), remainder)
