"""Spreads a model over ranks as a recipe wants it: FSDP2's shards, or DDP's copies where the model is small.

    matrices of a block    sharded; gathered in the compute format (BF16, FP16) just before the block runs, and again
                           in its backward; gradients summed over ranks in FP32
    what lies outside      sharded; gathered in its own format, as an embedding's gradient sums thousands of rows
    vectors, keepers       copies in FP32 on every rank, too small to be worth a collective each: their gradients are
                           summed in one go before the update (update_sync.py), and norms read FP32 weights as ever

Inputs and outputs keep their formats: the residual stream stays FP32, and autocast or the fused blocks decide what
products read. Masters live in the shards, FP32 or split: the engine makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.errors import UsageError
from narrowgauge.nn.keep_fp32 import find_modules
from narrowgauge.nn.recompute import find_blocks
from narrowgauge.optim import narrow
from narrowgauge.recipe import Recipe, parse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

SHARDED_FROM = 500_000_000
"""Parameters from which a model is sharded unless told otherwise: below, copies fit and cost less sending."""
GATHERED = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
"""In which format the matrices of a block travel; others in their own."""
WHOLE_GRADIENTS = 1 / 8
"""Of a GPU's memory that gradients not yet summed over ranks may take between microbatches."""


class Copies(DistributedDataParallel):
    """DDP whose wrapper has the model's own attributes too, as losses and samples ask for them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def policy(recipe: str | Recipe, in_block: bool = True) -> MixedPrecisionPolicy:
    """The recipe as ``fully_shard`` takes it: for the blocks of a model, or for what lies outside of them."""
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
    """Shard a model, in place, over the ranks of ``mesh`` (all of them by default), before its optimizer is made.

    ``blocks`` names the modules that are gathered one at a time where they are not the members of a ModuleList;
    ``reshard=False`` keeps them gathered between forward and backward: faster, and as large as the whole model.
    """
    from torch.distributed.fsdp import fully_shard

    recipe = parse(recipe)
    if any(buffer.is_floating_point() and buffer.requires_grad for buffer in model.buffers()):
        raise UsageError("shard: a buffer requires a gradient; make it a parameter")
    copied = copies(model, recipe)
    found = list(find_blocks(model).values()) if blocks is None else [model.get_submodule(path) for path in blocks]
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": copied}
    for block in found:
        fully_shard(block, mp_policy=policy(recipe), reshard_after_forward=reshard, **options)
    fully_shard(model, mp_policy=policy(recipe, in_block=not found), **options)
    return model


def copies(model: nn.Module, recipe: Recipe) -> set[nn.Parameter]:
    """What every rank has a copy of: vectors, and the parameters of modules that are kept in FP32."""
    kept = {p for module in find_modules(model, recipe.keep).values() for p in module.parameters()}
    return kept | {p for p in model.parameters() if p.dim() < 2}


def replicate(model: nn.Module, recipe: str | Recipe = "fp32") -> nn.Module:
    """The model behind torch's DistributedDataParallel: a copy on every rank, gradients averaged during backward.

    Under a lean recipe its matrices become BF16 now, as DDP holds on to the formats it finds.
    """
    recipe = parse(recipe)
    if recipe.gradients in ("released", "fp32") and recipe.master != "fp32":
        raise UsageError(f"recipe {recipe}: DDP sums gradients as they come, in BF16; leave gradients out, or shard")
    if recipe.master != "fp32":
        kept = {p for module in find_modules(model, recipe.keep).values() for p in module.parameters()}
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1 and parameter not in kept:
                narrow(parameter)
    device = next(model.parameters()).device
    return Copies(model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True)


def are_summed_each(parameters: int, memory_bytes: float) -> bool:
    """Whether gradients are summed over ranks in every microbatch: whole and in FP32, they would take too much."""
    return 4 * parameters > WHOLE_GRADIENTS * memory_bytes


def inside(model: nn.Module) -> nn.Module:
    """The model itself, where DDP is around it."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def refuse_fsdp1(model: nn.Module) -> None:
    """A model in FSDP1's wrapper hides its shards: ranks would clip and skip by what each of them sees."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UsageError(
            "Engine: the model is wrapped in FullyShardedDataParallel (FSDP1), whose shards an engine cannot see; "
            "shard it by narrowgauge.ranks.shard(model, recipe) or torch's fully_shard (FSDP2) instead"
        )
