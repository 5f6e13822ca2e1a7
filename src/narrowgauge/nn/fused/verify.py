"""Compares a fused block with the original in FP32 on one example: its output and every gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.example import Example
from narrowgauge.nn.blocks.find import get_output
from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.fused.casts import Projection
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.plan import BlockPlan, list_classes, list_own_parameters
from narrowgauge.nn.module_changes import apply_change, remove_changes
from narrowgauge.nn.products.gemm import ALL_FP32
from narrowgauge.nn.products.linear import has_transposed_weight
from narrowgauge.nn.products.weight_casts import WeightCastPlan

TOLERANCE = 1e-4
"""Relative to the largest value. A wrong epsilon, order or formula differs by more, FP32 in another order by less."""


NEGLIGIBLE = 0.05
"""Share of the largest gradient below which differences are not relative: a key's bias has a gradient of zero, up to
rounding."""


def find_difference(block: nn.Module, spec: BlockSpec, example: Example) -> str | None:
    """Return how the fused form of a block in FP32 differs from it, or None if they agree. Removes its own traces."""
    for training in (False, True):
        block.train(training)
        expected = _run(block, example)
        plan = make_fp32_plan(block, spec)
        mark_parts(block, spec)
        apply_change(block, FusedBlock(plan))
        try:
            found = _run(block, example)
        finally:
            remove_changes(block)
        difference = _compare(expected, found)
        if difference is not None:
            return f"{difference} differs from the original's" + (" in training" if training else "")
    return None


def make_fp32_plan(block: nn.Module, spec: BlockSpec) -> BlockPlan:
    """Return a plan with FP32 products."""

    def project(*paths: str) -> Projection:
        modules = [block.get_submodule(path) for path in paths]
        turned = has_transposed_weight(modules[0])
        return Projection(WeightCastPlan(transposed_weight=turned, gradient_dtype=torch.float32), ALL_FP32)

    return BlockPlan(
        spec, project(*spec.inputs), project(spec.output), project(*spec.ups), project(spec.down),
        own=list_own_parameters(block, spec), classes=list_classes(block),
    )  # fmt: skip


def _run(block: nn.Module, example: Example) -> dict[str, Tensor]:
    """Return the output and all gradients, by name; the same random numbers at every call."""
    x = example.args[0].detach().clone().requires_grad_()
    for parameter in block.parameters():
        parameter.grad = None
    _seed(x.device)
    output = get_output(block(x, *example.args[1:], **example.kwargs))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    (output.float() * weights).sum().backward()
    grads: dict[str, Any] = {name: p.grad for name, p in block.named_parameters()}
    found = {"its output": output.detach(), "the gradient of its input": x.grad, **grads}
    return {
        name if " " in name else f"the gradient of {name}": value.clone()
        for name, value in found.items()
        if value is not None
    }


def _seed(device: torch.device) -> None:
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(5)


def _compare(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str | None:
    largest = max(float(value.abs().max()) for value in expected.values())
    for name in {**expected, **found}:
        one, other = expected.get(name), found.get(name)
        if one is None or other is None:
            lone = one if one is not None else other
            if lone is not None and lone.abs().max() > 0:
                return name
            continue
        if one.shape != other.shape or not bool(
            (one - other).abs().max() <= TOLERANCE * max(float(one.abs().max()), NEGLIGIBLE * largest)
        ):
            return name
    return None
