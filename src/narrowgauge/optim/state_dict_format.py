"""The format of an optimizer's state dictionary: how states are saved, and how saved states are loaded.

    state                   saved as
    8-bit moments           codes and scales under names that torch does not know, as torch would read codes as moments.
                            The entry ``step`` is ``FOR_TORCH``, which appears in the error of torch's AdamW when it
                            loads the state and expects a number there
    sharded parameters      FP32 moments, and all 32 bits of the masters instead of remainders: DTensors that can be
                            resharded or gathered. Under the same names, as torch.distributed.checkpoint needs
    split masters           remainders and the checksums of their weights, so that weights may be loaded before or after
                            the state
    everything else         as torch saves it, under the same names

Loading accepts all of these, states of torch's AdamW, and older formats: 8-bit moments under torch's names, and
remainders without checksums, which then apply to the model's current weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.optim import moments, sharded
from narrowgauge.optim.sharded import shard_like, to_local
from narrowgauge.optim.weight_checksums import join_master
from narrowgauge.parameters import is_sharded

EIGHT_BIT = "_8bit"
FOR_TORCH = b"8-bit moments of narrowgauge; load narrowgauge.optim.plain_state(state_dict) instead"
"""Bytes, as torch's load_state_dict iterates over a str; its error is: could not convert string to float."""
RENAMED = ("step", *moments.SIGNED)
"""Entries that get the suffix if moments are 8-bit."""
ELEMENTWISE = (*moments.SIGNED, "remainder", "master")
"""Entries with one element per element of the parameter."""


def make_portable(state_dict: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Convert an optimizer's state dictionary, as packed by torch, to the saved form."""
    states = {}
    for index, saved in state_dict["state"].items():
        if any(is_sharded(saved[name]) for name in moments.list_moments(saved)):
            saved = _unshard_values(dict(saved), parameters[index])
        if moments.is_eight_bit(saved):
            saved = {name + EIGHT_BIT if name in RENAMED else name: value for name, value in saved.items()}
            saved["step"] = FOR_TORCH
        states[index] = saved
    return {**state_dict, "state": states}


def _unshard_values(saved: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Replace the entries of a sharded parameter's state that are valid only for its shard."""
    if moments.is_eight_bit(saved):
        sharded.convert_moments(saved, "fp32")
    remainder, words = saved.pop("remainder", None), saved.pop("check", None)
    if remainder is not None:
        master = join_master(to_local(parameter).detach(), to_local(remainder), words)
        saved["remainder"] = shard_like(master.view(torch.int32), parameter)
    return saved


def strip_format_suffixes(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state under an optimizer's names. {} and None stand for a missing entry."""
    return {
        name.removesuffix(EIGHT_BIT): value
        for name, value in saved.items()
        if value is not None and not isinstance(value, dict | bytes)
    }


def restore_state(saved: dict[str, Any], parameter: nn.Parameter, form: str) -> dict[str, Any]:
    """Return a copy of a saved state on its parameter's device, sharded like it, with moments in this format."""
    state = strip_format_suffixes(saved)
    if is_sharded(parameter):  # an unsharded state has other groups
        state.pop("check", None)
        if moments.is_eight_bit(state):
            moments.convert_moments(state, "fp32")
    for name, value in state.items():
        if isinstance(value, Tensor):
            value = sharded.place_like(value, parameter) if name in ELEMENTWISE else value
            value = value.to(parameter.device, copy=True)
            state[name] = value if to_local(value).is_contiguous() else value.contiguous()
    _decode_remainders(state)
    if parameter.is_complex():
        for name in moments.list_moments(state):
            state[name] = state[name].to(parameter.dtype)
    else:
        sharded.convert_moments(state, form)
    return state


def _decode_remainders(state: dict[str, Any]) -> None:
    """Decode a 32-bit remainder: a master, or 16 bits of an older state, as gloo and NCCL send 32 bits at least."""
    remainder = state.get("remainder")
    if remainder is None or remainder.dtype is torch.int16:
        return
    values = to_local(state.pop("remainder"))
    if bool((values != values.to(torch.int16)).any()):
        state["master"] = shard_like(values.view(torch.float32), remainder)
    else:
        state["remainder"] = shard_like(values.to(torch.int16), remainder)
