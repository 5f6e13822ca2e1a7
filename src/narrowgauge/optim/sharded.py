"""Optimizer support for parameters sharded over ranks as DTensors (FSDP2's ``fully_shard``, ``distribute_tensor``).

AdamW is elementwise, so every rank steps its shard like an ordinary tensor, without communication. Elementwise states
are DTensors with the parameter's mesh and placements, so that torch.distributed.checkpoint saves and reshards them.

8-bit moments and checksums are the exception. Their groups of 128 run along a rank's shard, so codes, scales and
checksums are valid only with that shard (and steps differ slightly from those of the unsharded parameter). An
optimizer's ``state_dict`` has decoded moments and joined masters, as FP32 DTensors, and loading encodes and splits them
again. A state that stays on its shard gets the same codes, except for the rare group whose largest second moment was
rounded down. The noise of stochastic rounding also runs along the shard.

FSDP2 replaces parameters, and reads their dtypes again at the first forward: call ``narrow`` between the two. It needs
one dtype for all trainable parameters of a ``fully_shard`` call: narrow all of them or none.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.optim import moments
from narrowgauge.parameters import is_sharded

NOT_SHARDED = {
    "fp32": "FSDP2 gives gradients the parameter's dtype; use gradients=bf16, and sum over ranks in FP32 with "
    "MixedPrecisionPolicy(reduce_dtype=torch.float32)",
    "released": "all ranks would have to agree on each gradient whether it is finite; use gradients=bf16",
}


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares the tensor's memory; an unsharded tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard = tensor.to_local()
    return shard.wait() if hasattr(shard, "wait") else shard  # a collective may still be running


def shard_like(values: Tensor, tensor: Tensor) -> Tensor:
    """Return a rank's values as a DTensor sharded like ``tensor``; the values themselves if that is not sharded.

    Copies into an ``empty_like`` DTensor, as ``from_local`` would move values that are offloaded to a CPU.
    """
    if not is_sharded(tensor):
        return values
    whole = torch.empty_like(tensor, dtype=values.dtype, requires_grad=False)
    to_local(whole).copy_(values)
    return whole


def get_shards(parameter: nn.Parameter, state: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return this rank's shards of the weight, the gradient and the state."""
    grad = parameter.grad
    assert grad is not None
    if not is_sharded(parameter):
        return parameter, grad, state
    if not is_sharded(grad):
        raise UsageError("AdamW: a sharded parameter (DTensor) has an unsharded gradient; assign a DTensor")
    if grad.placements != parameter.placements:  # under tensor parallelism it may be a partial sum
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    shards = {name: to_local(value) if isinstance(value, Tensor) else value for name, value in state.items()}
    return to_local(parameter), to_local(grad), shards


def replace_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Replace a parameter's local values, with another dtype, in place: the parameter object stays the same."""
    if not is_sharded(parameter):
        parameter.data = values
        return
    _check_replaceable(parameter)
    new, attributes = nn.Parameter(shard_like(values, parameter), parameter.requires_grad), dict(vars(parameter))
    try:
        torch.utils.swap_tensors(parameter, new)  # what Module.to does with DTensors
    except RuntimeError as error:
        raise UsageError(f"narrow: other code refers to a sharded parameter: {error}") from error
    vars(parameter).update(attributes)


def _check_replaceable(parameter: Tensor) -> None:
    if parameter.grad is not None:
        raise UsageError("narrow: a sharded parameter already has a gradient; narrow it before backward")
    states = sys.modules.get("torch.distributed._composable_state")
    for reference in list(states._module_state_mapping.values()) if states is not None else ():
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            settled = group is not None and group._reset_sharded_params
            if settled and any(held.sharded_param is parameter for held in group.fsdp_params):
                raise UsageError(
                    "narrow: FSDP has already run a forward, which fixes the dtypes of its parameters; narrow them "
                    "after fully_shard and before the first forward"
                )


def check_gradients(parameter: Tensor, gradients: str) -> None:
    """Raise UsageError for formats of gradients that sharded parameters do not support."""
    if is_sharded(parameter) and gradients in NOT_SHARDED:
        raise UsageError(
            f"gradients={gradients} does not support sharded parameters (DTensor): {NOT_SHARDED[gradients]}"
        )


def convert_moments(state: dict[str, Any], form: str) -> None:
    """``moments.convert_moments`` for a state that may be sharded: every rank converts its shard."""
    whole = {name: state[name] for name in moments.list_moments(state)}
    state.update({name: to_local(value) for name, value in whole.items()})
    moments.convert_moments(state, form)
    for name, value in whole.items():
        state[name] = value if state[name].dtype is value.dtype else shard_like(state[name], value)


def place_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a full or sharded tensor of the parameter's shape, sharded like the parameter."""
    if not is_sharded(parameter):
        return value.full_tensor() if is_sharded(value) else value
    mesh, placements = parameter.device_mesh, parameter.placements
    if not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    if value.device_mesh != mesh:
        raise UsageError("a saved tensor is sharded over another mesh; use torch.distributed.checkpoint to reshard it")
    return value if value.placements == placements else value.redistribute(mesh, placements)
