"""Parameters spread over ranks as DTensors (FSDP2's ``fully_shard``, ``distribute_tensor``), as an optimizer sees them.

AdamW is elementwise, so every rank steps its shard as if that were a tensor of its own, and nothing is sent. States
that have an element for each of the parameter's are DTensors with its mesh and placements, so that
torch.distributed.checkpoint saves and reshards them.

8-bit moments and check words are the exception. Their groups of 128 run along a rank's shard, so codes, scales and
words mean something only beside the shard they were made for (and steps differ slightly from those of the whole
parameter). An optimizer's ``state_dict`` has moments decoded and masters joined, as FP32 DTensors, and loading encodes
and splits them anew: what stays on its shard gets the same codes, but for the rare group whose largest second moment
had been rounded down. The noise that rounds weights without masters runs along the shard too.

FSDP2 makes parameters of its own and reads them again at the first forward, where it settles their formats: ``narrow``
them between the two. It wants one format for all trainable parameters of a ``fully_shard`` call: narrow all or none.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.optim import moments

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

NOT_SHARDED = {
    "fp32": "FSDP2 hands gradients over in the parameter's format; take gradients=bf16, and FP32 for the sum over "
    "ranks by MixedPrecisionPolicy(reduce_dtype=torch.float32)",
    "released": "whether a gradient is finite would be asked of all ranks one by one; take gradients=bf16",
}


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor; where nobody has imported those, which takes a second, none is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard, which shares the tensor's memory; the tensor itself where it is not sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard = tensor.to_local()
    return shard.wait() if hasattr(shard, "wait") else shard  # a collective may still be bringing it


def shard_like(values: Tensor, tensor: Tensor) -> Tensor:
    """A rank's values as a tensor that is sharded as another one is; the values themselves where that one is not.

    Copied into a DTensor of the other's making: ``from_local`` would move values that are offloaded to a CPU.
    """
    if not is_sharded(tensor):
        return values
    whole = torch.empty_like(tensor, dtype=values.dtype, requires_grad=False)
    to_local(whole).copy_(values)
    return whole


def get_shards(parameter: nn.Parameter, state: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What a rank steps: its shards of the weight, of the gradient and of the state."""
    grad = parameter.grad
    assert grad is not None
    if not is_sharded(parameter):
        return parameter, grad, state
    if not is_sharded(grad):
        raise UsageError("AdamW: a sharded parameter (DTensor) has a gradient that is not; assign a DTensor")
    if grad.placements != parameter.placements:  # as under tensor parallelism, where it may be a sum not yet taken
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    shards = {name: to_local(value) if isinstance(value, Tensor) else value for name, value in state.items()}
    return to_local(parameter), to_local(grad), shards


def replace_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter a rank's new values, of another format, in place: it stays the object that others hold."""
    if not is_sharded(parameter):
        parameter.data = values
        return
    _check_replaceable(parameter)
    new, attributes = nn.Parameter(shard_like(values, parameter), parameter.requires_grad), dict(vars(parameter))
    try:
        torch.utils.swap_tensors(parameter, new)  # what Module.to does with DTensors
    except RuntimeError as error:
        raise UsageError(f"narrow: a sharded parameter is held by something else: {error}") from error
    vars(parameter).update(attributes)


def _check_replaceable(parameter: Tensor) -> None:
    if parameter.grad is not None:
        raise UsageError("narrow: a sharded parameter has a gradient already; narrow it before backward")
    states = sys.modules.get("torch.distributed._composable_state")
    for reference in list(states._module_state_mapping.values()) if states is not None else ():
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            settled = group is not None and group._reset_sharded_params
            if settled and any(held.sharded_param is parameter for held in group.fsdp_params):
                raise UsageError(
                    "narrow: FSDP has run a forward, with which it settles the formats of its parameters; narrow them "
                    "after fully_shard and before the first forward"
                )


def check_gradients(parameter: Tensor, gradients: str) -> None:
    """Refuse gradients that are kept in a way that sharded parameters have no part in."""
    if is_sharded(parameter) and gradients in NOT_SHARDED:
        raise UsageError(f"gradients={gradients} is not for sharded parameters (DTensor): {NOT_SHARDED[gradients]}")


def convert_moments(state: dict[str, Any], form: str) -> None:
    """``moments.convert_moments`` of a state that may be sharded: every rank converts its shard."""
    whole = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    state.update({name: to_local(value) for name, value in whole.items()})
    moments.convert_moments(state, form)
    for name, value in whole.items():
        state[name] = value if state[name].dtype is value.dtype else shard_like(state[name], value)


def place_like(value: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of a parameter's shape, sharded as the parameter is; every rank has the tensor, or its shard of it."""
    if not is_sharded(parameter):
        return value.full_tensor() if is_sharded(value) else value
    mesh, placements = parameter.device_mesh, parameter.placements
    if not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    if value.device_mesh != mesh:
        raise UsageError(
            "a saved tensor is sharded over another mesh; take torch.distributed.checkpoint from one to another"
        )
    return value if value.placements == placements else value.redistribute(mesh, placements)
