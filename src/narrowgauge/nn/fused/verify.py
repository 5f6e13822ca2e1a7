"""Compares a fused block with the original in FP32 on one example: its output and every gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.nn.blocks.example import Example
from narrowgauge.nn.blocks.projections import find_projection
from narrowgauge.nn.blocks.spec import WEIGHTS, BlockSpec
from narrowgauge.nn.fused.casts import Projection
from narrowgauge.nn.fused.make_plan import plan_adapters
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.outputs import list_passed_on
from narrowgauge.nn.fused.plan import BlockPlan, list_classes, list_own_parameters, list_settings
from narrowgauge.nn.module_changes import apply_change, remove_changes
from narrowgauge.nn.products.gemm import ALL_FP32
from narrowgauge.weight_copies.casts import WeightCastPlan

TOLERANCE = 1e-4
"""Relative to the largest value. A wrong epsilon, order or formula differs by more, FP32 in another order by less."""


NEGLIGIBLE = 0.05
"""Share of the largest gradient below which differences are not relative: a key's bias has a gradient of zero, up to
rounding."""

LARGE = 1 << 24
"""Values above which a gradient is not kept whole."""


def find_difference(block: nn.Module, spec: BlockSpec, example: Example, gradients: bool = True) -> str | None:
    """Return how the fused form of a block in FP32 differs from it, or None if they agree. Removes its own traces.

    ``gradients``: compare the gradients, too, and both in training.
    """
    for training in (False, True) if gradients else (False,):
        block.train(training)
        expected = _run(block, spec, example, gradients)
        plan = make_fp32_plan(block, spec)
        mark_parts(block, spec)
        apply_change(block, FusedBlock(plan))
        try:
            found = _run(block, spec, example, gradients)
        finally:
            remove_changes(block)
        difference = _compare(expected, found)
        if difference is not None:
            return f"{difference} differs from the original's" + (" in training" if training else "")
    return None


def make_fp32_plan(block: nn.Module, spec: BlockSpec) -> BlockPlan:
    """Return a plan with FP32 products."""

    def project(*paths: str) -> Projection:
        turned = find_projection(block, paths[0]).is_transposed
        weight = WeightCastPlan(transposed_weight=turned, gradient_dtype=torch.float32)
        return Projection(weight, ALL_FP32, adapters=plan_adapters(block, spec, paths))

    out = project(spec.output)
    up, down = (out, out) if spec.mlp else (project(*spec.ups), project(spec.down))
    return BlockPlan(
        spec, project(*spec.inputs), out, up, down,
        own=list_own_parameters(block, spec), classes=list_classes(block),
        cross=tuple(project(*group) for group in spec.cross_products), settings=list_settings(block, spec),
    )  # fmt: skip


def _run(block: nn.Module, spec: BlockSpec, example: Example, gradients: bool) -> dict[str, Tensor]:
    """Return the outputs and all gradients, by name; the same random numbers at every call."""
    if not gradients:
        with torch.no_grad():
            made = block(*example.args, **example.kwargs)
        return {"its output": made[0] if isinstance(made, tuple) else made}
    x = example.args[0].detach().clone().requires_grad_()
    names = [*list_passed_on(spec), *([] if spec.cross is None else [spec.cross.source])]
    given = {name: value for name in names if (value := example.kwargs.get(name)) is not None}
    leaves = {name: value.detach().clone().requires_grad_() for name, value in given.items()}
    for parameter in block.parameters():
        parameter.grad = None
    _seed(x.device)
    with _DropoutInOrder():  # type: ignore[no-untyped-call]
        returned = block(x, *example.args[1:], **{**example.kwargs, **leaves})
    outputs = {"its output": returned[0] if isinstance(returned, tuple) else returned}
    for number, name in enumerate(spec.returned, 1):
        if name not in (None, WEIGHTS):
            outputs[f"its output {name}"] = returned[number]
    generator = torch.Generator().manual_seed(3)
    loss = torch.zeros((), device=x.device)
    for value in outputs.values():
        loss = loss + (value.float() * torch.randn(value.shape, generator=generator).to(x.device)).sum()
    loss.backward()
    found: dict[str, Any] = {name: value.detach() for name, value in outputs.items()}
    found |= {f"the gradient of {name}": leaf.grad for name, leaf in {"its input": x, **leaves}.items()}
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            found[f"the gradient of {name}"] = _condense(parameter.grad)
            parameter.grad = None
    return {name: value for name, value in found.items() if value is not None}


def _condense(gradient: Tensor) -> Tensor:
    """Return a gradient, or of a large matrix its products with a few random vectors: a wrong value changes them, and
    a model that fills its GPU has room for the comparison."""
    if gradient.dim() != 2 or gradient.numel() <= LARGE:
        return gradient
    generator = torch.Generator(gradient.device).manual_seed(7)
    vectors = [torch.randn(gradient.shape[1], generator=generator, device=gradient.device) for _ in range(4)]
    return torch.stack([gradient.mv(vector) for vector in vectors])  # mv: not on tensor cores, so never in TF32


class _DropoutInOrder(TorchDispatchMode):
    """Draws dropout in the order of rows and columns, also for tensors that are stored in another order.

    nn.MultiheadAttention returns such tensors. Which values are dropped then differs, but not how many or where.
    """

    is_transparent = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float and not args[0].is_contiguous():
            drawn = func(args[0].new_empty(args[0].shape), *args[1:], **(kwargs or {}))
            return args[0].copy_(drawn)
        if func is torch.ops.aten.native_dropout.default:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


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
