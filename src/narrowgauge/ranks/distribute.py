"""Distributes a model over ranks as a recipe requires: FSDP2 shards, or DDP copies if the model is small.

    matrices of a block    sharded; gathered in the compute format (BF16, FP16) just before the block runs, and again
                           in its backward; gradients are reduced over ranks in FP32
    other matrices         sharded; gathered in their own format, because an embedding's gradient sums thousands of rows
    vectors, and modules   copied to every rank in FP32: they are too small for a collective each. Their gradients are
    kept in FP32           averaged together before the update (update_sync.py), and norms read FP32 weights as always

Inputs and outputs keep their formats: the residual stream stays FP32, and autocast or the fused blocks decide the
formats of matrix products. The engine makes the master weights, FP32 or split, as shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.errors import UsageError
from narrowgauge.nn.experts.routers import find_routers
from narrowgauge.nn.keep_fp32 import find_modules
from narrowgauge.nn.recompute import find_blocks
from narrowgauge.optim import narrow
from narrowgauge.recipe import Recipe, parse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

SHARDED_FROM = 500_000_000
"""Models with more parameters are sharded by default. Smaller ones are copied: that fits, and needs less traffic."""
GATHERED = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
"""Format in which the matrices of a block are gathered, by compute format. Others keep their own."""
MAX_UNREDUCED_FRACTION = 1 / 8
"""Fraction of a GPU's memory for gradients that wait between microbatches to be reduced over ranks."""


class ReplicatedModel(DistributedDataParallel):
    """DDP that also exposes the attributes of the model, because losses and sample functions use them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def make_policy(recipe: str | Recipe, in_block: bool = True) -> MixedPrecisionPolicy:
    """Make the policy of ``fully_shard`` for a recipe: for the blocks of a model, or for the rest of it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    compute = parse(recipe).compute
    return MixedPrecisionPolicy(
        param_dtype=GATHERED.get(compute) if in_block else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )


def shard(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    mesh: DeviceMesh | None = None,
    blocks: Sequence[str] | None = None,
    reshard: bool = True,
) -> nn.Module:
    """Shard a model over the ranks by FSDP2, in place. Call it before the optimizer is made.

    Args:
        model: The model, the same on every rank.
        recipe: The recipe that the engine will use.
        mesh: The ranks to shard over. None: all ranks.
        blocks: Paths of the modules that are gathered one at a time. None: the members of ModuleLists.
        reshard: Whether to free a block's gathered weights between forward and backward. False is faster, and takes
            the memory of the whole model.

    Returns:
        The same model.

    Raises:
        UsageError: A buffer of the model requires a gradient, or the recipe is not valid.
    """
    from torch.distributed.fsdp import fully_shard

    recipe = parse(recipe)
    if any(buffer.is_floating_point() and buffer.requires_grad for buffer in model.buffers()):
        raise UsageError("shard: a buffer requires a gradient; make it a parameter")
    copied = find_copied(model, recipe)
    found = list(find_blocks(model).values()) if blocks is None else [model.get_submodule(path) for path in blocks]
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": copied}
    for block in found:
        fully_shard(block, mp_policy=make_policy(recipe), reshard_after_forward=reshard, **options)
    fully_shard(model, mp_policy=make_policy(recipe, in_block=not found), **options)
    return model


def find_copied(model: nn.Module, recipe: Recipe) -> set[nn.Parameter]:
    """Find the parameters that every rank has a copy of: vectors, and those of modules that are kept in FP32."""
    return _find_kept(model, recipe) | {p for p in model.parameters() if p.dim() < 2}


def _find_kept(model: nn.Module, recipe: Recipe) -> set[nn.Parameter]:
    """Find the parameters of modules that compute in FP32: those that the recipe names, and the routers of experts."""
    kept = find_modules(model, recipe.keep) | find_routers(model)
    return {p for module in kept.values() for p in module.parameters()}


def replicate(model: nn.Module, recipe: str | Recipe = "fp32") -> nn.Module:
    """Wrap a model in DistributedDataParallel: a copy on every rank, gradients averaged during backward.

    Args:
        model: The model, the same on every rank.
        recipe: The recipe that the engine will use. A lean recipe converts the matrices to BF16 now, because DDP
            keeps the formats that it finds.

    Returns:
        The wrapped model. It also has the attributes of the model itself.

    Raises:
        UsageError: The recipe uses released or FP32 gradients, which DDP cannot reduce.
    """
    recipe = parse(recipe)
    if recipe.gradients in ("released", "fp32") and recipe.master != "fp32":
        raise UsageError(f"recipe {recipe}: DDP reduces gradients in BF16; leave `gradients` out, or shard the model")
    if recipe.master != "fp32":
        kept = _find_kept(model, recipe)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1 and parameter not in kept:
                narrow(parameter)
    device = next(model.parameters()).device
    return ReplicatedModel(model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True)


def reduces_every_microbatch(parameters: int, memory_bytes: float) -> bool:
    """Whether gradients are reduced in every microbatch, because whole in FP32 they would take too much memory."""
    return 4 * parameters > MAX_UNREDUCED_FRACTION * memory_bytes


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return the model inside DDP; without DDP, the model itself."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def refuse_fsdp1(model: nn.Module) -> None:
    """Refuse FSDP1, whose wrapper hides the shards: each rank would clip and skip by its own gradients only."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UsageError(
            "Engine: the model is wrapped in FullyShardedDataParallel (FSDP1), whose shards an engine cannot see; "
            "shard it with narrowgauge.ranks.shard(model, recipe) or torch's fully_shard (FSDP2) instead"
        )
