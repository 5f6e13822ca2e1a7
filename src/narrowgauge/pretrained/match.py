"""Finds out which stored tensor is which parameter of a model, before any weight is read.

The model is made on the meta device, and the names in the files are translated as transformers translates them when it
loads a model: its own renamings, and the prefix of the base model added or removed. What is left over on either side,
or has another shape, is an error: transformers would initialize or ignore it, and training would start from nonsense.

Experts that are stored one by one, and are one tensor in the model, are stacked (``stacked_tensors``). Classes that
need other operations have a ``conversion``, and transformers itself has to load them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import UsageError, one_line
from narrowgauge.pretrained.folder import PretrainedFolder, StoredTensor
from narrowgauge.pretrained.fp8_weights import attach_scales
from narrowgauge.pretrained.stacked_tensors import AnyTensor, find_stacking, stack
from narrowgauge.pretrained.transformers_model import FoundModel, find_model, quiet

OUTDATED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")
"""Tensors in older files that models compute themselves today."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A model on the meta device, and the stored tensor of each of its parameters and persistent buffers."""

    found: FoundModel
    folder: PretrainedFolder
    model: nn.Module
    stored: Mapping[str, AnyTensor] = field(default_factory=dict)
    """By the model's names; one of the names that share a parameter."""
    expected: Mapping[str, Tensor] = field(default_factory=dict)
    """The model's state when it was matched. Adapters that are added later rename parameters, but keep the objects."""
    twins: tuple[tuple[AnyTensor, AnyTensor], ...] = ()
    """Pairs of stored tensors of one tied parameter: they have to be equal."""
    conversion: str | None = None
    """Why only transformers can load the weights; None: each stored tensor is a parameter."""


def match_folder(folder: PretrainedFolder) -> Match:
    """Match the weights of a folder with the model that its config.json describes."""
    return match_weights(find_model(str(folder.path), {}, folder.option, quantized=True), folder)


def match_weights(found: FoundModel, folder: PretrainedFolder) -> Match:
    """Match the weights of a folder with a model.

    Args:
        found: The class and the configuration of the model.
        folder: The folder.

    Raises:
        UsageError: The weights are quantized in a way that cannot be read, or they are not those of the model.
    """
    tensors = attach_scales(folder)
    model = found.make_on_meta()
    expected = model.state_dict(keep_vars=True)
    names, stacks, conversion = _translate(model, tensors, expected)
    if conversion is not None:
        _refuse_conversion(folder, conversion)
        return Match(found=found, folder=folder, model=model, conversion=conversion)
    stored: dict[str, AnyTensor] = stacks
    unexpected = []
    for name, new in names.items():
        if new not in expected or new in stored:
            unexpected.append(name)
        else:
            stored[new] = tensors[name]
    ignored = [*_list_patterns(model, "unexpected"), *OUTDATED]
    unexpected = [name for name in unexpected if not _matches(name, ignored)]
    chosen, twins, missing = _choose_among_tied(expected, stored)
    wrong = [name for name, tensor in chosen.items() if not _fits(tensor, expected[name])]
    optional = _list_patterns(model, "missing")
    if missing and not wrong and not unexpected and all(_matches(name, optional) for name in missing):
        why = f"it has no {one_line(missing[0])}, which transformers initializes"
        _refuse_conversion(folder, why)
        return Match(found=found, folder=folder, model=model, conversion=why)
    if wrong or missing or unexpected:
        raise UsageError(
            f"{folder.option}: the weights cannot be loaded into {found.name}: "
            f"{_describe_mismatch(wrong, missing, unexpected, chosen, expected)}; config.json and the weights do not "
            "belong together"
        )
    return Match(found=found, folder=folder, model=model, stored=chosen, expected=expected, twins=tuple(twins))


def _refuse_conversion(folder: PretrainedFolder, why: str) -> None:
    if folder.quantization is not None:
        raise UsageError(f"{folder.option}: its FP8 weights cannot be loaded: {why}; give the original model")


def _translate(
    model: nn.Module, tensors: Mapping[str, StoredTensor], expected: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, AnyTensor], str | None]:
    """Return the model's name for each stored name, what is stacked, and why only transformers can load it, if so."""
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        loading: Any = importlib.import_module("transformers.core_model_loading")
        importlib.import_module("transformers.initialization")
    except ImportError:
        return {}, {}, "this version of transformers has other functions for it; use version 5"
    with quiet():
        changes = mapping.get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, loading.WeightRenaming)]
    converters = [change for change in changes if isinstance(change, loading.WeightConverter)]
    prefix = getattr(model, "base_model_prefix", "") or None
    found: dict[str, str] = {}
    parts: dict[str, dict[str, list[StoredTensor]]] = {}
    orders: dict[str, Sequence[str]] = {}
    for name in sorted(tensors, key=loading.dot_natural_key):  # experts in their order, as transformers stacks them
        new, pattern = loading.rename_source_key(name, renamings, converters, prefix, expected)
        if new not in expected and name in expected:
            new, pattern = loading.rename_source_key(name, [], [], prefix, expected)
        if pattern is None or new not in expected:
            found[name] = new
            continue
        order = find_stacking(converters, pattern)
        if order is None or tensors[name].scale is not None:
            why = f"transformers computes {one_line(new)} from several stored tensors or from another layout"
            return {}, {}, why
        orders[new] = order
        parts.setdefault(new, {}).setdefault(pattern, []).append(tensors[name])
    stacks: dict[str, AnyTensor] = {}
    for new, order in orders.items():
        if (tensor := stack(new, order, parts[new])) is not None:
            stacks[new] = tensor
    return found, stacks, None


def _choose_among_tied(
    expected: Mapping[str, Tensor], stored: Mapping[str, AnyTensor]
) -> tuple[dict[str, AnyTensor], list[tuple[AnyTensor, AnyTensor]], list[str]]:
    """Return the tensor of each parameter, pairs of tensors for the same parameter, and names without any tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        groups.setdefault(id(tensor), []).append(name)
    chosen, twins, missing = {}, [], []
    for names in groups.values():
        there = [name for name in names if name in stored]
        if not there:
            missing.append(names[0])
            continue
        chosen[there[0]] = stored[there[0]]
        twins += [(stored[there[0]], stored[name]) for name in there[1:]]
    return chosen, twins, missing


def _fits(tensor: AnyTensor, expected: Tensor) -> bool:
    same_kind = tensor.dtype.is_floating_point == expected.dtype.is_floating_point
    return same_kind and tensor.shape == tuple(expected.shape)


def _describe_mismatch(
    wrong: list[str],
    missing: list[str],
    unexpected: list[str],
    chosen: Mapping[str, AnyTensor],
    expected: Mapping[str, Tensor],
) -> str:
    parts = []
    if wrong:
        tensor, name = chosen[wrong[0]], wrong[0]
        given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        parts.append(f"{one_line(tensor.name)} is {given}, expected {list(expected[name].shape)}{_more(wrong)}")
    if missing:
        parts.append(f"{one_line(missing[0])} is missing{_more(missing)}")
    if unexpected:
        parts.append(f"the model has no {one_line(unexpected[0])}{_more(unexpected)}")
    return ", ".join(parts)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _list_patterns(model: nn.Module, kind: str) -> list[str]:
    """Return the patterns of names that a class of transformers allows to be missing or unexpected."""
    found: Any = getattr(model, f"_keys_to_ignore_on_load_{kind}", None)
    return list(found or ())


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
