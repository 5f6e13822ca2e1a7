"""Models of transformers that make their positions themselves do not look for packed documents in them.

Without a cache, transformers reads the positions of each batch to find out whether they start again within a row. The
host waits for the GPU at this place, in every forward. If the caller gives no positions, the model counts tokens, and
the answer does not depend on the batch: it is asked for once, and used from then on if it was that there are none.

transformers looks the function up by name in its module. It is replaced there by one that asks first whether a changed
model is running, and otherwise does what it did.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from narrowgauge.nn.module_changes import Change, apply_change, find_change, original_class

MASKS, SEARCH, POSITIONS = "transformers.masking_utils", "find_packed_sequence_indices", "position_ids"


class OwnPositions(Change):
    """A model that looks for documents only in positions that it was given."""

    def __init__(self, place: int) -> None:
        self.place = place
        """The number of arguments before the positions."""
        self.has_none: bool | None = None
        """Whether its own positions have no documents; None before they were searched."""

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # transformers does not search then
            return inner(*args, **kwargs)
        given = args[self.place] if len(args) > self.place else kwargs.get(POSITIONS)
        token = _running.set(self if given is None else None)
        try:
            return inner(*args, **kwargs)
        finally:
            _running.reset(token)


_running: ContextVar[OwnPositions | None] = ContextVar("narrowgauge_own_positions", default=None)
"""The change of the model that runs, if it makes its positions itself."""


def skip_search(model: nn.Module) -> list[str]:
    """Let models of transformers within a model search documents only in positions they are given; return their paths.

    Args:
        model: Any model.
    """
    masks = sys.modules.get(MASKS)
    if masks is None or not hasattr(masks, SEARCH):
        return []
    found = []
    for path, module in model.named_modules():
        place = _find_place(original_class(module))
        if place is not None and find_change(module, OwnPositions) is None:
            apply_change(module, OwnPositions(place))
            found.append(path)
    search = getattr(masks, SEARCH)
    if found and not hasattr(search, "asks_narrowgauge"):
        setattr(masks, SEARCH, _ask_first(search))
    return found


def _find_place(kind: type[Any]) -> int | None:
    """Return the place of the positions among a forward's arguments, if it calls a function that makes masks."""
    forward = inspect.unwrap(kind.forward) if hasattr(kind, "forward") else None
    if not inspect.isfunction(forward):
        return None
    names = {name for name in forward.__code__.co_names if _is_mask_function(forward.__globals__.get(name))}
    arguments = list(inspect.signature(forward).parameters)[1:]
    return arguments.index(POSITIONS) if names and POSITIONS in arguments else None


def _is_mask_function(value: Any) -> bool:
    return inspect.isfunction(value) and value.__module__ == MASKS


def _ask_first(search: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(search)
    def search_given(position_ids: Any) -> Any:
        if torch.compiler.is_compiling():
            return search(position_ids)
        change = _running.get()
        if change is None:
            return search(position_ids)
        if change.has_none:
            return None
        found = search(position_ids)
        change.has_none = found is None
        return found

    search_given.asks_narrowgauge = True  # type: ignore[attr-defined]
    return search_given
