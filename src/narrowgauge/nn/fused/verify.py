"""Compares a fused block with the original in FP32 on one example: its output, every gradient, and what else it does.

A forward may do more than return a tensor: store something on a module, count in a buffer, draw random numbers to
decide whether the block is skipped. A fused form that does not run the code in question would leave that out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from narrowgauge.nn.module_changes import CHANGES, OWN, apply_change, remove_changes
from narrowgauge.nn.products.gemm import ALL_FP32
from narrowgauge.nn.side_effects import read_host_random, undo_side_effects
from narrowgauge.weight_copies.casts import WeightCastPlan

TOLERANCE = 1e-4
"""Relative to the largest value. A wrong epsilon, order or formula differs by more, FP32 in another order by less."""


ROUGH = 0.02
"""The tolerance of long sequences: attention that chooses between thousands of keys may round more on a GPU. On a CPU,
the same attention differs by 1e-6, and a window of 33 to 1,000 tokens by half of the largest value or more."""

NEGLIGIBLE = 0.05
"""Share of the largest gradient below which differences are not relative: a key's bias has a gradient of zero, up to
rounding."""

LARGE = 1 << 24
"""Values above which a gradient is not kept whole."""

NOT_WRITTEN = frozenset({*vars(nn.Module()), CHANGES, OWN})
"""Attributes of every module, and narrowgauge's."""


def find_difference(block: nn.Module, spec: BlockSpec, example: Example, gradients: bool = True) -> str | None:
    """Return how the fused form of a block in FP32 differs from it, or None if they agree. Removes its own traces.

    ``gradients``: compare the gradients, too, and both in training. Without them, a long sequence is compared.
    """
    for training in (False, True) if gradients else (False,):
        block.train(training)
        expected, done = _watch(block, spec, example, gradients)
        if done.obstacle is not None:
            return done.obstacle
        # without settings: a call that ran as written because of one would be compared with itself
        plan = replace(make_fp32_plan(block, spec), settings=())
        mark_parts(block, spec)
        change = FusedBlock(plan)
        apply_change(block, change)
        try:
            found, fused = _watch(block, spec, example, gradients)
        finally:
            remove_changes(block)
        if change.as_written.reasons:  # it was compared with itself
            return "its fused form did not run"
        difference = _compare(expected, found, TOLERANCE if gradients else ROUGH) or done.find_missing(fused)
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


@dataclass(frozen=True)
class _Done:
    """What a forward has done besides returning tensors."""

    written: frozenset[str]
    """Attributes and buffers that it changed, by path."""
    random: bytes
    """The random numbers of torch on the host, after it."""
    obstacle: str | None
    """What no fused form can do."""

    def find_missing(self, other: _Done) -> str | None:
        """Return what the other forward has not done, or None."""
        missing = sorted(self.written - other.written)
        if missing:
            return f"what it stores in {missing[0]}"
        return "what it draws at random" if self.random != other.random else None


def _watch(block: nn.Module, spec: BlockSpec, example: Example, gradients: bool) -> tuple[dict[str, Tensor], _Done]:
    """Run the block; return its results, and what else it did, which is undone. An MLP that is a module may do more."""
    with undo_side_effects(block), _seeded_host() as get_drawn:
        before, drawn = _read_state(block, spec), read_host_random()
        results = _run(block, spec, example, gradients)
        after = _read_state(block, spec)
        written = {name: value for name, (value, key) in after.items() if name not in before or before[name][1] != key}
        obstacle = next(
            (
                f"it stores {name}, whose gradient the fused form would not compute"
                for name, value in written.items()
                if isinstance(value, Tensor) and value.grad_fn is not None
            ),
            None,
        )
        if drawn != read_host_random():
            obstacle = "it draws random numbers of Python or NumPy, perhaps to skip the block"
        return results, _Done(frozenset(written), get_drawn(), obstacle)


@contextlib.contextmanager
def _seeded_host() -> Iterator[Callable[[], bytes]]:
    """Context manager with the same random numbers of torch on the host each time; gives a function for their state.

    On a GPU, dropout draws there, in another order than a fused form may. On the host a model decides.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(5)
    try:
        yield lambda: torch.get_rng_state().numpy().tobytes()
    finally:
        torch.set_rng_state(before)


def _read_state(block: nn.Module, spec: BlockSpec) -> dict[str, tuple[Any, Any]]:
    """Return attributes and buffers by path, each with what changes when it does; what is held keeps its identity."""
    found: dict[str, tuple[Any, Any]] = {}
    for path, part in block.named_modules():
        if spec.mlp and f"{path}.".startswith(f"{spec.mlp}."):
            continue
        prefix = f"{path}." if path else ""
        for name, value in vars(part).items():
            if name not in NOT_WRITTEN:
                size = len(value) if isinstance(value, list | dict | set) else None
                found[f"{prefix}{name}"] = value, (id(value), size)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                found[f"{prefix}{name}"] = buffer, (id(buffer), buffer._version)
    return found


def _run(block: nn.Module, spec: BlockSpec, example: Example, gradients: bool) -> dict[str, Tensor]:
    """Return the outputs and, if wanted, all gradients, by name; the same random numbers at every call.

    Without gradients, too, forward runs as if they were wanted: on a GPU, other kernels would have to be compiled.
    """
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
    if not gradients:
        return {name: value.detach() for name, value in outputs.items()}
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


def _compare(expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float) -> str | None:
    largest = max(float(value.abs().max()) for value in expected.values())
    for name in {**expected, **found}:
        one, other = expected.get(name), found.get(name)
        if one is None or other is None:
            lone = one if one is not None else other
            if lone is not None and lone.abs().max() > 0:
                return name
            continue
        if one.shape != other.shape or not bool(
            (one - other).abs().max() <= tolerance * max(float(one.abs().max()), NEGLIGIBLE * largest)
        ):
            return name
    return None
