"""Makes a run's model, and spreads it over the ranks.

A model is drawn as its author wrote it, so there is a moment when it is whole, in FP32. Where that is too much for a
GPU, the host has to hold it, once: the ranks of a machine take turns, each drawing the same numbers and keeping its
shards, which FSDP moves to the GPU block by block.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from narrowgauge import random_state
from narrowgauge.optim.sharded import is_sharded
from narrowgauge.ranks.distribute import SHARDED_FROM, replicate, shard
from narrowgauge.ranks.world import World
from narrowgauge.recipe import Recipe

SHARE = 0.4
"""Of a GPU's memory that a whole model may take there for a moment."""


def make_model(
    make: Callable[[], nn.Module],
    recipe: str | Recipe,
    device: torch.device,
    world: World,
    *,
    parallel: str,
    seed: int,
    tell: Callable[[str], None],
) -> nn.Module:
    """The model: whole where a process is alone, else in shards or as copies, the same numbers on every rank."""
    if world.alone:
        return _draw(make, device, seed)
    parameters = count(make)
    if _is_to_be_sharded(parallel, parameters) and is_too_large(parameters, device):
        tell(f"{4e-9 * parameters:,.0f} GB of model are drawn in the host's memory, by one rank after the other")
        model, sharded = draw_in_turns(make, recipe, device, world, seed), True
    else:
        model = _draw(make, device, seed)
        sharded = _is_to_be_sharded(parallel, sum(parameter.numel() for parameter in model.parameters()))
        model = shard(model, recipe) if sharded else replicate(model, recipe)
    tell(f"{world.size} ranks, each with " + ("its shards (FSDP2)" if sharded else "a copy of the model (DDP)"))
    random_state.seed(seed + world.rank)  # dropout is each rank's own
    return model


def _is_to_be_sharded(parallel: str, parameters: int) -> bool:
    return parallel == "fsdp" or (parallel == "auto" and parameters > SHARDED_FROM)


def _draw(make: Callable[[], nn.Module], device: torch.device, seed: int) -> nn.Module:
    random_state.seed(seed)
    with device:
        return make()


def count(make: Callable[[], nn.Module]) -> int:
    """The parameters of a model, without their memory; 0 where it cannot be made so."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in make().parameters())
    except Exception:  # whatever a user's model does not like about tensors without numbers
        return 0


def is_too_large(parameters: int, device: torch.device) -> bool:
    """Whether a model is better not drawn on the device."""
    if device.type != "cuda":
        return False
    return 4 * parameters > SHARE * torch.cuda.get_device_properties(device).total_memory


def draw_in_turns(
    make: Callable[[], nn.Module], recipe: str | Recipe, device: torch.device, world: World, seed: int
) -> nn.Module:
    """The model's shards on the device; every rank calls it."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (world.size,))  # together, before the turns
    mine, turns = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    model: nn.Module | None = None
    for turn in range(turns):
        if turn == mine:
            model = shard(_draw(make, torch.device("cpu"), seed), recipe, mesh=mesh)
            _bring_rest(model, device)
        world.wait()
    assert model is not None
    return model


def _bring_rest(model: nn.Module, device: torch.device) -> None:
    """Move what FSDP does not: vectors, keepers, buffers."""
    for parameter in model.parameters():
        if not is_sharded(parameter):
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
