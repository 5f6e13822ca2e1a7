"""The blocks of a model whose memory can be planned: what each may keep for backward, and how to set it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from narrowgauge.hardware import Gpu
from narrowgauge.nn.call_size import CallSize
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.fused.plan import BlockPlan
from narrowgauge.nn.module_changes import find_change, original_class
from narrowgauge.nn.recompute import Recomputed
from narrowgauge.nn.recompute_cost import estimate_fused, estimate_unfused
from narrowgauge.recipe import Recipe

RECOMPUTED = "full"
"""The option that keeps least without host memory; a plan counts from it."""
OFFLOADED = "offload"
"""The option that keeps nothing on the GPU."""
FIELDS: dict[str, dict[str, Any]] = {
    "none": {"checkpoint": "none", "activations": "bf16", "offload": False},
    "normalized": {"checkpoint": "none", "activations": "normalized", "offload": False},
    "selective": {"checkpoint": "selective", "activations": "bf16", "offload": False},
    "recompute": {"checkpoint": "none", "activations": "recompute", "offload": False},
    "8bit": {"checkpoint": "none", "activations": "8bit", "offload": False},
    "full": {"checkpoint": "full", "activations": "bf16", "offload": False},
    "offload": {"checkpoint": "full", "activations": "bf16", "offload": True},
}
"""Options by name, as fields of a block's plan; those that keep less come later."""


@dataclass(frozen=True)
class BlockMemory:
    """One block: its options, and the change of its module that carries them out."""

    path: str
    module: nn.Module
    change: FusedBlock | Recomputed
    options: Mapping[str, Mapping[str, Any]]
    """Fields of the block's plan by the option's name."""

    @property
    def size(self) -> CallSize:
        """How large its calls are."""
        if self.change.size is None:
            self.change.size = CallSize()
        return self.change.size

    @property
    def kind(self) -> Any:
        """What equal blocks have in common; such blocks keep the same number of bytes."""
        shapes = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in self.module.named_parameters())
        return original_class(self.module), shapes, self.size.shape, type(self.change)

    def set(self, option: str) -> None:
        """Keep activations as the option says, from the next forward on."""
        if isinstance(self.change, FusedBlock):
            self.change.plan = replace(self.change.plan, **self.options[option])
        else:
            self.change.mode = option

    def estimate_costs(self, compute: str, gpu: Gpu | None, microbatches: int) -> Mapping[str, float]:
        """Return the milliseconds per update of each option, for inputs as large as the largest so far."""
        shape = self.size.shape
        if isinstance(self.change, FusedBlock) and len(shape) == 3:
            return estimate_fused(self.change.plan, self.module, shape, gpu, microbatches, self.size.itemsize)
        return estimate_unfused(self.module, shape, compute, gpu, microbatches)


def find_block_memory(model: nn.Module, recipe: Recipe) -> list[BlockMemory]:
    """Return the blocks that conversion fused, or that are recomputed layer by layer, in the model's order."""
    found = []
    for path, module in model.named_modules():
        change = find_change(module, FusedBlock) or find_change(module, Recomputed)
        if change is not None:
            found.append(BlockMemory(path, module, change, list_options(recipe, change)))
    return found


def list_options(recipe: Recipe, change: FusedBlock | Recomputed) -> dict[str, dict[str, Any]]:
    """Return the options that a recipe leaves open for a block.

    A recipe that sets ``checkpoint`` other than its named base decides that itself, and the same holds for
    ``activations``. Full recomputation is always among the options, and so are inputs on the host for fused blocks
    that may be recomputed; with ``offload=activations`` the inputs of all recomputed blocks go there.

    A block whose forward reads BF16 and its backward FP8 (``first_forward``) would keep its norm's output in BF16 to
    compute the activation's input again: more than in other blocks. That is not among its options. What is fused of a
    block whose MLP is a module ends before the activation, and ``activations`` has no effect there.
    """
    base = "full" if recipe.master != "fp32" else "none"
    fused = isinstance(change, FusedBlock)
    short = fused and recipe.compute == "fp8" and change.plan.scales is not None  # type: ignore[union-attr]
    is_mixed = fused and _reads_other_formats_in_backward(change.plan)  # type: ignore[union-attr]
    is_half = fused and bool(change.plan.spec.mlp)  # type: ignore[union-attr]
    can_offload = fused and recipe.offload == "none" and recipe.compute in ("bf16", "fp8")
    options = {}
    for name, given in FIELDS.items():
        fields = dict(given)
        if (name in ("normalized", "8bit") and not short) or (name == OFFLOADED and not can_offload):
            continue
        if name == "recompute" and is_mixed and recipe.activations == "auto":
            continue
        if is_half and fields["activations"] != "bf16":
            continue
        if name == "recompute" and (not fused or recipe.compute not in ("bf16", "fp8")):
            continue
        if name == RECOMPUTED:
            fields["offload"] = recipe.offload == "activations"
        if recipe.activations != "auto" and fused and not is_half:
            if fields["checkpoint"] == "none" and fields["activations"] != recipe.activations:
                continue
            fields["activations"] = recipe.activations
        always = name in (RECOMPUTED, OFFLOADED)
        if recipe.checkpoint != base and not always and fields["checkpoint"] != recipe.checkpoint:
            continue
        options[name] = fields
    return options


def _reads_other_formats_in_backward(plan: BlockPlan) -> bool:
    """Whether a product of weights' gradients reads what a norm writes in another format than the forward does."""
    return any(part.choice.output != part.choice.grad_weight for part in (plan.qkv, plan.up))
