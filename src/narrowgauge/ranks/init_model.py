"""Initializes the model of a run, and distributes it over the ranks.

The task's own code initializes a model, so at first it is whole and in FP32. If that is too large for a GPU, it is
initialized in host memory. The ranks of a machine take turns, so that the host holds it once: each rank initializes the
same weights and keeps its shards, which FSDP moves to the GPU block by block.

A ``ModelLoader`` loads a whole model (of a single process, or a copy for DDP) in the recipe's own form instead. A model
with adapters on a frozen base is always copied: FSDP needs one dtype for all that it shards together.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from narrowgauge import random_state
from narrowgauge.errors import UsageError
from narrowgauge.parameters import is_sharded
from narrowgauge.ranks.distribute import SHARDED_FROM, replicate, shard
from narrowgauge.ranks.world import World
from narrowgauge.recipe import Recipe
from narrowgauge.task import ModelLoader

MAX_WHOLE_FRACTION = 0.4
"""Fraction of a GPU's memory that the whole model may take while it is initialized there."""


def make_model(
    make: Callable[[], nn.Module],
    recipe: str | Recipe,
    device: torch.device,
    world: World,
    *,
    parallel: str,
    seed: int,
    notify: Callable[[str], None],
) -> nn.Module:
    """Make the model of a run: whole in a single process, else sharded or copied. The seed decides all weights.

    Args:
        make: Makes the whole model on the current device.
        recipe: The recipe of the run.
        device: The device of this rank.
        world: The ranks of the run.
        parallel: fsdp (shards), ddp (copies) or auto (by the number of parameters).
        seed: The seed of the run.
        notify: Prints a line for the user.
    """
    if world.is_single:
        return _init_whole(make, device, seed, recipe, notify)
    parameters = count_parameters(make)
    if isinstance(make, ModelLoader) and make.reloads_frozen:
        if parallel == "fsdp":
            raise UsageError(
                "--parallel fsdp does not shard a model with adapters on a frozen base; use --parallel ddp"
            )
        parallel = "ddp"
    if _decide_sharding(parallel, parameters) and is_too_large(parameters, device):
        notify(f"initializing {4e-9 * parameters:,.0f} GB of weights in host memory, one rank after the other")
        model, sharded = init_in_turns(make, recipe, device, world, seed), True
    else:
        copied = parameters > 0 and not _decide_sharding(parallel, parameters)
        model = _init_whole(make, device, seed, recipe if copied else None, notify)
        sharded = _decide_sharding(parallel, sum(parameter.numel() for parameter in model.parameters()))
        model = shard(model, recipe) if sharded else replicate(model, recipe)
    notify(f"{world.size} ranks, each with " + ("its shards (FSDP2)" if sharded else "a copy of the model (DDP)"))
    random_state.seed(seed + world.rank)  # each rank has its own dropout
    return model


def _decide_sharding(parallel: str, parameters: int) -> bool:
    return parallel == "fsdp" or (parallel == "auto" and parameters > SHARDED_FROM)


def _init_whole(
    make: Callable[[], nn.Module],
    device: torch.device,
    seed: int,
    recipe: str | Recipe | None = None,
    notify: Callable[[str], None] | None = None,
) -> nn.Module:
    """Make a model on a device: in FP32, or if a recipe is given and the weights are in files, in its form."""
    random_state.seed(seed)
    if recipe is not None and isinstance(make, ModelLoader):
        return make.load(recipe, device, notify)
    with device:
        return make()


def count_parameters(make: Callable[[], nn.Module]) -> int:
    """Count the parameters of a model on the meta device, without memory; 0 if it cannot be made there."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in make().parameters())
    except Exception:  # a user's model may fail in any way on the meta device
        return 0


def is_too_large(parameters: int, device: torch.device) -> bool:
    """Whether a model is too large to be initialized whole on the device."""
    if device.type != "cuda":
        return False
    return 4 * parameters > MAX_WHOLE_FRACTION * torch.cuda.get_device_properties(device).total_memory


def init_in_turns(
    make: Callable[[], nn.Module], recipe: str | Recipe, device: torch.device, world: World, seed: int
) -> nn.Module:
    """Initialize the model on the CPU, one rank after the other, and shard it to the device. Every rank calls it."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (world.size,))  # together, before the turns
    mine, turns = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    model: nn.Module | None = None
    for turn in range(turns):
        if turn == mine:
            model = shard(_init_whole(make, torch.device("cpu"), seed), recipe, mesh=mesh)
            _move_rest(model, device)
        world.wait()
    assert model is not None
    return model


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Move what FSDP does not: vectors, parameters kept in FP32, buffers."""
    for parameter in model.parameters():
        if not is_sharded(parameter):
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
