"""Finds the blocks of a model, describes each kind once, and shows before use that the fused form computes the same.

    candidates   repeated modules (entries of a list) with at least three linear layers and a norm
    observed     a copy with random FP32 weights runs once, with all of its linear layers, if need be with an encoder's
                 output; ``recognize`` reads the equations off its tensors. It runs again with large values in its MLP,
                 which must satisfy the activation's equation too
    verified     the fused form and the original, in FP32: outputs and all gradients must agree, else the block stays
                 as it is and the report says why. So must they on variants of the example: with masks, and with packed
                 positions (``variants``). The fast forms of attention are tried the same way, best first, and also on
                 a sequence that is longer than any window (``long_examples``)

Blocks of one kind (``kinds``) are observed once, also across models; the first, the second and the last of a model are
verified.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from narrowgauge.errors import one_line
from narrowgauge.nn.blocks.attention_forms import list_attention_forms
from narrowgauge.nn.blocks.example import Example
from narrowgauge.nn.blocks.examples import LENGTH, make_examples, make_small
from narrowgauge.nn.blocks.kinds import Members, label_by_number, list_numbers, make_key
from narrowgauge.nn.blocks.long_examples import list_lengths
from narrowgauge.nn.blocks.observe import Observation, make_random_copy, observe
from narrowgauge.nn.blocks.output_capturing import is_idle
from narrowgauge.nn.blocks.projections import count_projections, find_projection
from narrowgauge.nn.blocks.recognize import has_activation, list_unused, recognize
from narrowgauge.nn.blocks.spec import BlockSpec, NotABlock
from narrowgauge.nn.blocks.variants import (
    MASKS,
    PACKED,
    SOURCE_MASK,
    list_other_masks,
    make_mask_variants,
    make_variants,
    name_boolean,
)
from narrowgauge.nn.module_changes import OWN, original_class
from narrowgauge.nn.products.linear import is_linear
from narrowgauge.nn.side_effects import undo_side_effects
from narrowgauge.random_state import get_random_state, set_random_state


class Differs(Protocol):
    """Returns how a block's fused form differs from the block on an example, or None if they agree."""

    def __call__(self, block: nn.Module, spec: BlockSpec, example: Example, gradients: bool = True) -> str | None:
        """Compare them; ``gradients``: also the gradients, and in training."""


@dataclass
class FoundBlocks:
    """The blocks of a model by path, and why other candidates are none."""

    specs: dict[str, BlockSpec] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


LARGE_ACTIVATIONS, LARGE_SCORES = 16.0, 4.0
"""Factors of weights that show limits: of ReLU6, of clipped values, of soft-capped scores. Powers of two, so that the
weights are the same again afterwards."""
MOST_LENGTHS = 8
"""Lengths of long examples that are tried."""
LARGEST_LIST_OF_PARTS = 3
"""Attention, cross-attention and MLP."""
LARGEST_ON_CPU = 10_000_000
"""Parameters of the largest block that is run on a CPU, which takes a second. Forecasts describe far larger ones."""
LARGEST_ON_GPU = 1_000_000_000
"""The same for a GPU, where a copy and its gradients need memory: a layer of experts may have more."""
NO_MEMORY = "there was not enough memory to compare it with its fused form"
_labels: dict[Any, bytes] = {}
"""What blocks of one key compute with their numbers: the same if the label is the same."""
_known: dict[Any, BlockSpec | str] = {}
"""Descriptions, or reasons against one, of the kinds that this process has seen, by type of device: a block that is too
large for a CPU is not too large for a GPU."""


def find_blocks(model: nn.Module, device: torch.device, differs: Differs) -> FoundBlocks:
    """Describe every block of the model that can be fused."""
    found = FoundBlocks()
    groups: dict[Any, Members] = {}
    candidates = list(list_candidates(model))
    users = Counter(id(layer) for _, block in candidates for layer in block.modules() if is_linear(layer))
    for path, module in candidates:
        shared = next((name for name, layer in module.named_modules() if users[id(layer)] > 1), None)
        reason = _find_obstacle(module) or (shared and f"{shared} is a layer of another block, too")
        if reason is not None:
            found.reasons[path] = reason
        else:
            groups.setdefault((device.type, make_key(module)), []).append((path, module))
    for kind, group in groups.items():
        for label, members in _split(kind, group, device):
            key = *kind, label
            known = _known[key] if key in _known else _describe_members(members, device, differs)
            if known is not NO_MEMORY:  # there may be some later
                _known[key] = known
            for path, _ in members:
                if isinstance(known, str):
                    found.reasons[path] = known
                else:
                    found.specs[path] = known
    return found


def describe_block(block: nn.Module, device: torch.device, differs: Differs) -> BlockSpec | str:
    """Describe one block as it is now, or return why it is none that can be fused."""
    found = find_blocks(nn.ModuleList([block]), device, differs)
    return found.specs.get("0") or found.reasons.get("0", "it is no block any more")


def _split(kind: Any, members: Members, device: torch.device) -> list[tuple[bytes, Members]]:
    """Return blocks with the same key in groups that compute the same whatever their numbers, with a label of each."""
    block, numbers = members[0][1], [list_numbers(block) for _, block in members]
    if _is_too_large(block, device):
        return [(b"", members)]
    if any((kind, number) not in _labels for number in numbers):
        try:
            with _quiet(device), undo_side_effects(block):
                copy = make_random_copy(block, device).eval()
                labels = label_by_number(numbers, copy, make_examples(copy, device))
        except Exception:  # which a description of the block raises, too, and explains
            labels = [b""] * len(members)
        _labels.update({(kind, number): label for number, label in zip(numbers, labels, strict=True)})
    groups: dict[bytes, Members] = {}
    for number, member in zip(numbers, members, strict=True):
        groups.setdefault(_labels[kind, number], []).append(member)
    return list(groups.items())


def _is_too_large(block: nn.Module, device: torch.device) -> bool:
    """Whether a block is not run on this device to look what it computes."""
    return sum(p.numel() for p in block.parameters()) > (LARGEST_ON_CPU if device.type == "cpu" else LARGEST_ON_GPU)


def list_candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost entries of module lists that may be blocks."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if not path[-1:].isdigit() or any(path.startswith(f"{outer}.") for outer in inside):
            continue
        parent, _, name = path.rpartition(".")
        if not name.isdigit() and not isinstance(model.get_submodule(parent), nn.Sequential | nn.ModuleDict):
            continue  # an attribute with a number; torchvision numbers the entries of a list in their names
        if "expert" in parent.rpartition(".")[2] and not _has_vector(module):
            continue
        if count_projections(module) >= (2 if _has_stack(module) else 3) and not _has_inner_list(module):
            inside.append(path)
            yield path, module


def _has_vector(module: nn.Module) -> bool:
    """Whether some part has a parameter with one dimension, as norms do."""
    return any(p.dim() == 1 for p in module.parameters() if not is_lazy(p))


def _may_have_norms(module: nn.Module) -> bool:
    """Whether some part without parameters may be a norm, by the name of its class."""
    leaves = (part for part in module.modules() if not part._modules and next(part.parameters(), None) is None)
    return any("norm" in original_class(part).__name__.lower() for part in leaves)


def _has_stack(module: nn.Module) -> bool:
    """Whether some part has stacked matrices, as experts do, in place of an MLP's linear layers."""
    return any(p.dim() == 3 for p in module.parameters() if not is_lazy(p))


def _has_inner_list(module: nn.Module) -> bool:
    """Whether a module holds a list of modules with several linear layers each, so that it is a stack of blocks.

    A short list of different modules (T5's) holds the parts of a block.
    """
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential))
    for part in lists:
        if part is module and isinstance(part, nn.Sequential):
            continue
        entries = [entry for entry in part if entry is not None]
        are_parts = len(part) <= LARGEST_LIST_OF_PARTS and len(set(map(original_class, entries))) == len(entries)
        if any(count_projections(entry) >= 3 for entry in entries) and not (are_parts and len(part) > 1):
            return True
    return False


def _describe_members(members: Members, device: torch.device, differs: Differs) -> BlockSpec | str:
    tried = {0, min(1, len(members) - 1), len(members) - 1}
    if _is_too_large(members[0][1], device):
        small, size = make_small(members[0][1]), sum(parameter.numel() for parameter in members[0][1].parameters())
        if small is None:
            return f"it has {size / 1e6:.0f} million parameters, too many to compare its fused form on this device"
        members, tried = [("", small)], {0}
    spec: BlockSpec | None = None
    for number in sorted(tried):
        try:
            with _quiet(device), undo_side_effects(members[number][1]):
                spec = _describe(members[number][1], device, differs, spec)
        except NotABlock as reason:
            return str(reason)
        except torch.OutOfMemoryError:
            return NO_MEMORY
        except Exception as problem:
            return f"its forward did not run on an example: {one_line(f'{type(problem).__name__}: {problem}', 200)}"
    assert spec is not None
    return spec


def _describe(block: nn.Module, device: torch.device, differs: Differs, known: BlockSpec | None) -> BlockSpec:
    """Describe and verify one block; with ``known`` only verify, and fall back to the model's own attention."""
    copy = make_random_copy(block, device)
    copy.eval()
    examples = make_examples(copy, device)
    example, base, seen = _recognize_first(copy, examples)
    form = next(number for number, one in enumerate(examples) if one is example)
    given = tuple(name for name, value in example.kwargs.items() if value is not None)
    base = replace(base, given=given)
    _shrink_adapters(copy, base)
    with _scaled(copy, base.ups, LARGE_ACTIVATIONS), torch.no_grad():
        if not base.mlp and not has_activation(observe(copy, *example), base):
            raise NotABlock(f"its activation is {base.activation} of small values, but not of large ones")
    variants = make_variants(copy, example)
    base = replace(base, masks=_verify_masks(copy, base, example, differs))
    if known is not None:
        if replace(base, attention=known.attention) != known:
            raise NotABlock("blocks of the same class compute different things")
        if _find_difference(copy, known, example, variants, differs) is None and (
            known.attention.kind == "own" or not _differs_when_long(copy, known, form, device, differs)
        ):
            return known
    difference = _find_difference(copy, base, example, variants, differs)
    if difference is not None:
        raise NotABlock(difference)
    if known is not None:
        return base
    # with a mask of self-attention, all forms run as base
    packed = {name: variant for name, variant in variants.items() if name == PACKED or SOURCE_MASK in name}
    for attention in list_attention_forms(copy, base, seen, example):
        better = replace(base, attention=attention)
        with contextlib.suppress(RuntimeError):  # a guess at the heads that does not fit the tensors
            if _find_difference(copy, better, example, packed, differs) is None:
                with _scaled(copy, base.inputs, LARGE_SCORES):
                    if differs(copy, better, example) is not None:
                        return base
                    if _differs_when_long(copy, better, form, device, differs):
                        return base
                return _with_mask(copy, better, variants, differs)
    return base


def _verify_masks(block: nn.Module, spec: BlockSpec, example: Example, differs: Differs) -> tuple[str, ...]:
    """Return the other arguments that are masks, and with which fused form and block agree."""
    found = []
    for name in list_other_masks(block):
        variants = make_mask_variants(block, name, example)
        masked = replace(spec, masks=(name,))
        if variants and all(differs(block, masked, variant) is None for variant in variants):
            found.append(name)
    return tuple(found)


def _recognize_first(block: nn.Module, examples: list[Example]) -> tuple[Example, BlockSpec, Observation]:
    """Return the description by the first example that runs all linear layers and with which the block is one.

    Cross-attention of Whisper's decoder runs without an encoder's output too, on the hidden state, but is no form of
    block then. If no example runs all layers, it is the first that the block can run.
    """
    partial: tuple[Example, Observation] | None = None
    problem: Exception | None = None
    reason: NotABlock | None = None
    for example in examples:
        try:
            with torch.no_grad():
                seen = observe(block, *example)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError, KeyError) as error:
            problem = problem or error
            continue
        if list_unused(block, seen):
            partial = partial or (example, seen)
            continue
        try:
            return example, recognize(block, example, seen), seen
        except NotABlock as found:
            reason = reason or found
    if reason is not None:
        raise reason
    if partial is None:
        assert problem is not None
        raise problem
    return partial[0], recognize(block, *partial), partial[1]


def _differs_when_long(block: nn.Module, spec: BlockSpec, form: int, device: torch.device, differs: Differs) -> bool:
    """Whether the fused form differs from the block on a long sequence: the longest of a few that the block takes.

    Args:
        block: The block, with weights that make attention choose.
        spec: Its description.
        form: The number of the example that it was seen with.
        device: Where it runs.
        differs: Compares both.
    """
    for length in list_lengths(block, LENGTH, device)[:MOST_LENGTHS]:
        try:
            example = make_examples(block, device, 1, length)[form]
            with torch.no_grad():
                block(*example.args, **example.kwargs)
            return differs(block, spec, example, gradients=False) is not None
        except Exception:  # too long for one of its masks, or for the memory
            continue
    return False


def _with_mask(block: nn.Module, spec: BlockSpec, variants: dict[str, Example], differs: Differs) -> BlockSpec:
    """Return the description with the mask that the fast form of attention can take, if there is one."""
    for name in MASKS:
        masked = replace(spec, attention=replace(spec.attention, mask=name))
        variant = variants.get(name_boolean(name))
        if variant is not None and differs(block, masked, variant) is None:
            return masked
    return spec


def _shrink_adapters(block: nn.Module, spec: BlockSpec) -> None:
    """Let adapters add about 1 whatever their scale, as layers do: larger values lose digits in attention's scores."""
    with torch.no_grad():
        for adapter in spec.adapters:
            find_projection(block, adapter.b).weight.div_(max(1.0, abs(adapter.scale)))


@contextlib.contextmanager
def _scaled(block: nn.Module, paths: tuple[str, ...], factor: float) -> Iterator[None]:
    """Multiply the weights of projections, so that limits show that small values do not reach."""
    weights = [find_projection(block, path).weight for path in paths]
    try:
        with torch.no_grad():
            for weight in weights:
                weight.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for weight in weights:
                weight.div_(factor)


def _find_difference(
    block: nn.Module, spec: BlockSpec, example: Example, variants: dict[str, Example], differs: Differs
) -> str | None:
    """Return how the fused form differs on the example, or on a variant that the block itself can run."""
    difference = differs(block, spec, example)
    if difference is not None:
        return difference
    for name, variant in variants.items():
        difference = differs(block, spec, variant)
        if difference is not None:
            return f"with {name}, {difference}"
    return None


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
    if isinstance(block, nn.ModuleList | nn.ModuleDict):
        return "it is a list of modules, which the model calls one by one"
    if not _has_vector(block) and not _may_have_norms(block):
        return "none of its modules is a norm"
    for path, module in block.named_modules():
        if path and has_hooks(module):
            return f"{path} has hooks, which a fused block would not call"
        if "forward" in module.__dict__ or "forward" in module.__dict__.get(OWN, ()):
            return f"the forward of {path or 'the block'} was replaced"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, so that it must be called as a module."""
    hooks = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(not is_idle(hook) for hook in module.__dict__["_forward_hooks"].values()):
        return True
    return any(module.__dict__.get(name) for name in hooks)
