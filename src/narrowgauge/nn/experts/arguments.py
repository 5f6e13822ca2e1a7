"""Reads the arguments of a call of experts: tokens, index and weights, by position or by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from narrowgauge.nn.experts.find import ExpertsSpec
from narrowgauge.nn.module_changes import original_class

EXPERT_PARALLEL = "_is_expert_parallel"
"""Attribute of transformers' experts that are distributed over ranks: their index has entries for other ranks."""


class ExpertsCall(NamedTuple):
    """The arguments of experts."""

    x: Tensor
    """[..., D], the tokens."""
    chosen: Tensor
    """[N, k], the experts of each token."""
    weights: Tensor
    """[N, k], the router's weights."""


def read_call(
    module: nn.Module, spec: ExpertsSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ExpertsCall | None:
    """Return a call's arguments; None if the module's own code has to run it."""
    names = _list_names(original_class(module))  # type: ignore[arg-type]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names) or list(names[:3]) != [name for name in names if name in given] or len(given) != 3:
        return None
    call = ExpertsCall(*(given[name] for name in names[:3]))
    if call.x.shape[-1] != spec.width or not call.x.numel() or getattr(module, EXPERT_PARALLEL, False):
        return None
    return call


@functools.cache
def _list_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the parameters of a class's forward."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def ignore_others(index: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return index and weights without choices that are none of the ``count`` experts: their weight is 0.

    Mixtures mark so what no expert shall compute, such as tokens beyond a capacity: -1, or the number of experts. The
    host does not know whether there are any.
    """
    inside = index.clamp(0, count - 1)
    return inside, weights.where((inside == index).reshape(weights.shape), 0.0)
