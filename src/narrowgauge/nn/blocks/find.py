"""Finds the blocks of a model, describes each kind once, and shows before use that the fused form computes the same.

    candidates   repeated modules (entries of a list) with at least three linear layers and a norm
    observed     a copy with random FP32 weights runs once; ``recognize`` reads the equations off its tensors
    verified     the fused form and the original, in FP32: outputs and all gradients must agree, else the block stays
                 as it is and the report says why. The fast forms of attention are tried the same way, best first.

Blocks of one kind (the same classes, code, shapes and settings) are observed once, also across models; the first, the
second and the last of a model are verified, since some models treat layers differently by their number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import one_line
from narrowgauge.nn.blocks.attention_forms import list_attention_forms
from narrowgauge.nn.blocks.example import Example
from narrowgauge.nn.blocks.examples import make_examples, make_small
from narrowgauge.nn.blocks.observe import make_random_copy, observe
from narrowgauge.nn.blocks.recognize import NotABlock, recognize
from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.module_changes import OWN, original_class
from narrowgauge.nn.products.linear import is_linear
from narrowgauge.random_state import get_random_state, set_random_state

Differs = Callable[[nn.Module, BlockSpec, Example], str | None]
"""Returns how a block's fused form differs from the block, or None if they agree."""


@dataclass
class FoundBlocks:
    """The blocks of a model by path, and why other candidates are none."""

    specs: dict[str, BlockSpec] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


LARGEST_ON_CPU = 10_000_000
"""Parameters of the largest block that is run on a CPU, which takes a second. Forecasts describe far larger ones."""
_known: dict[Any, BlockSpec | str] = {}
"""Descriptions, or reasons against one, of the kinds that this process has seen, by type of device: a block that is too
large for a CPU is not too large for a GPU."""


def find_blocks(model: nn.Module, device: torch.device, differs: Differs) -> FoundBlocks:
    """Describe every block of the model that can be fused."""
    found = FoundBlocks()
    groups: dict[Any, list[tuple[str, nn.Module]]] = {}
    for path, module in list_candidates(model):
        reason = _find_obstacle(module)
        if reason is not None:
            found.reasons[path] = reason
        else:
            groups.setdefault((device.type, _make_key(module)), []).append((path, module))
    for key, members in groups.items():
        if key not in _known:
            _known[key] = _describe_members(members, device, differs)
        known = _known[key]
        for path, _ in members:
            if isinstance(known, str):
                found.reasons[path] = known
            else:
                found.specs[path] = known
    return found


def list_candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost entries of module lists that may be blocks."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if not path.rpartition(".")[2].isdigit() or any(path.startswith(f"{outer}.") for outer in inside):
            continue
        linears = sum(is_linear(part) for part in module.modules())
        if linears >= 3 and any(p.dim() == 1 for p in module.parameters()) and not _has_inner_list(module):
            inside.append(path)
            yield path, module


def _has_inner_list(module: nn.Module) -> bool:
    """Whether a module holds a list of modules with several linear layers each, so that it is a stack of blocks."""
    lists = (
        part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential) and part is not module
    )
    return any(sum(is_linear(inner) for inner in entry.modules()) >= 3 for part in lists for entry in part)


def _describe_members(members: list[tuple[str, nn.Module]], device: torch.device, differs: Differs) -> BlockSpec | str:
    tried = {0, min(1, len(members) - 1), len(members) - 1}
    size = sum(parameter.numel() for parameter in members[0][1].parameters())
    if device.type == "cpu" and size > LARGEST_ON_CPU:
        small = make_small(members[0][1])
        if small is None:
            return f"it has {size / 1e6:.0f} million parameters, too many to compare its fused form on a CPU"
        members, tried = [("", small)], {0}
    spec: BlockSpec | None = None
    for number in sorted(tried):
        try:
            with _quiet(device):
                spec = _describe(members[number][1], device, differs, spec)
        except NotABlock as reason:
            return str(reason)
        except Exception as problem:
            return f"its forward did not run on an example: {one_line(f'{type(problem).__name__}: {problem}', 200)}"
    assert spec is not None
    return spec


def _describe(block: nn.Module, device: torch.device, differs: Differs, known: BlockSpec | None) -> BlockSpec:
    """Describe and verify one block; with ``known`` only verify, and fall back to the model's own attention."""
    copy = make_random_copy(block, device)
    copy.eval()
    examples = make_examples(copy, device)
    for number, example in enumerate(examples):
        try:
            with torch.no_grad():
                seen = observe(copy, *example)
                break
        except (RuntimeError, ValueError, TypeError, IndexError):
            if number == len(examples) - 1:
                raise
    base = recognize(example.args[0], seen)
    if known is not None:
        if replace(base, attention=known.attention) != known:
            raise NotABlock("blocks of the same class compute different things")
        if differs(copy, known, example) is None:
            return known
    difference = differs(copy, base, example)
    if difference is not None:
        raise NotABlock(difference)
    if known is not None:
        return base
    for attention in list_attention_forms(copy, base, seen, example):
        better = replace(base, attention=attention)
        with contextlib.suppress(RuntimeError):  # a guess at the heads that does not fit the tensors
            if differs(copy, better, example) is None:
                return better
    return base


@contextlib.contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """Run examples on this device, with gradients, without autocast or effects on the random generators."""
    before = get_random_state(device)
    exact = torch.autocast(device.type, enabled=False)
    try:
        with exact, torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        set_random_state(before, device)


def _find_obstacle(block: nn.Module) -> str | None:
    """Return why a block cannot be observed or replaced as it is now."""
    for path, module in block.named_modules():
        if path and has_hooks(module):
            return f"{path} has hooks, which a fused block would not call"
        if "forward" in module.__dict__ or "forward" in module.__dict__.get(OWN, ()):
            return f"the forward of {path or 'the block'} was replaced"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, so that it must be called as a module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(module.__dict__.get(name) for name in hooks)


NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index")
"""Attributes that number the layers."""


def _make_key(block: nn.Module) -> Any:
    """Return what decides how a block computes: classes, code, shapes and simple settings of all its modules."""
    parts = []
    for path, module in block.named_modules():
        cls = original_class(module)
        settings = tuple(
            (name, value)
            for name, value in sorted(vars(module).items())
            if isinstance(value, int | float | str | bool) and name not in (*NUMBERS, "training")
        )
        shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        parts.append((path, cls, cls.forward.__code__, settings, shapes, implementation))
    return tuple(parts)


def get_output(output: Any) -> Tensor:
    """Return the hidden state of a block's output."""
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value
