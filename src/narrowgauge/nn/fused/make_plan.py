"""Makes the plan of a fused block from its description, the formats chosen for its layers, and the FP8 scales."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Protocol

from torch import nn

from narrowgauge.kernels.norm import MAX_COLUMNS
from narrowgauge.nn.blocks.projections import find_projection
from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.fused.casts import AdapterPlan, Projection
from narrowgauge.nn.fused.plan import BlockPlan, list_classes, list_own_parameters, list_settings
from narrowgauge.nn.products.gemm import GemmChoice
from narrowgauge.nn.products.stored_fp8 import get_stored_scale
from narrowgauge.parameters import gradient_dtype, is_sharded
from narrowgauge.scaling.tensor import Site, TensorScales
from narrowgauge.weight_copies.casts import WeightCastPlan

SHORT_FROM = 1024
"""The width of blocks from which the activation's input is kept in 8 bits by default. Writing and reading 8 bits takes
time in proportion to the width, products in proportion to its square. On an H200 it takes 1.1% of a step at 768;
together with normalized rows 0.4% to 0.9% at 4,096, and 1.0% in a Llama 2,048 wide."""


class ChosenLayer(Protocol):
    """What a plan needs to know of a converted layer."""

    @property
    def path(self) -> str: ...

    @property
    def choice(self) -> GemmChoice: ...


def find_misfit(block: nn.Module, spec: BlockSpec) -> str | None:
    """Return why our kernels cannot compute a block, or None if they can."""
    for norm in spec.norms:
        columns = norm.get_width(block)
        if columns > MAX_COLUMNS:
            return f"its norms have {columns} columns, more than {MAX_COLUMNS}"
    for group in spec.products:
        turned = [find_projection(block, path).is_transposed for path in group]
        if any(turned) and len(turned) > 1:
            return "several projections with transposed weights read one input"
    return None


def make_plan(
    block: nn.Module,
    path: str,
    spec: BlockSpec,
    layers: Mapping[str, ChosenLayer],
    scales: TensorScales | None,
    checkpoint: str,
    lean: bool,
    holds_gradients: bool,
    activations: str = "bf16",
    offload: bool = False,
) -> BlockPlan:
    """Return the plan of the block at ``path``. The first of projections that read one input decides for all."""

    def find_site(layer: ChosenLayer, end: str) -> Site | None:
        return scales.sites.get(f"{layer.path}.{end}") if scales is not None else None

    def project(*inner: str) -> Projection:
        layer = layers[f"{path}.{inner[0]}"]
        sources = [find_projection(block, name) for name in inner]
        weight = WeightCastPlan.of(
            *(source.weight for source in sources), site=find_site(layer, "weight"), scales=scales,
            transposed_weight=sources[0].is_transposed, lean=lean, path=layer.path,
            stored_scale=get_stored_scale(sources[0].owner),
        )  # fmt: skip
        sites = find_site(layer, "input"), find_site(layer, "grad_output")
        return Projection(weight, layer.choice, *sites, plan_adapters(block, spec, inner))

    out = project(spec.output)
    up, down = (out, out) if spec.mlp else (project(*spec.ups), project(spec.down))
    return BlockPlan(
        spec, project(*spec.inputs), out, up, down, scales, checkpoint,
        holds_gradients, path, list_own_parameters(block, spec), list_classes(block),
        tuple(project(*group) for group in spec.cross_products), list_settings(block, spec),
        _choose_activations(block, spec, activations, checkpoint, scales), offload=offload,
    )  # fmt: skip


def _choose_activations(
    block: nn.Module, spec: BlockSpec, wanted: str, checkpoint: str, scales: TensorScales | None
) -> str:
    """Return what the block keeps for backward: ``auto`` is what costs at most about 1% of a step."""
    if wanted != "auto":
        return wanted
    if scales is None or checkpoint != "none" or spec.adapters or spec.mlp:
        return "bf16"
    return "8bit" if find_projection(block, spec.inputs[0]).shape[1] >= SHORT_FROM else "normalized"


def plan_adapters(block: nn.Module, spec: BlockSpec, paths: tuple[str, ...]) -> tuple[AdapterPlan, ...]:
    """Return the adapters of projections that are one product, in the order in which they run."""
    ends = list(itertools.accumulate(find_projection(block, path).shape[0] for path in paths))
    columns = dict(zip(paths, zip([0, *ends], ends, strict=False), strict=True))
    found = []
    for number, adapter in enumerate(spec.adapters):
        if adapter.base in columns:
            weights = (find_projection(block, path).weight for path in (adapter.a, adapter.b))
            one, other = (None if is_sharded(weight) else gradient_dtype(weight) for weight in weights)
            found.append(AdapterPlan(number, columns[adapter.base], adapter.scale, (one, other)))
    return tuple(found)
