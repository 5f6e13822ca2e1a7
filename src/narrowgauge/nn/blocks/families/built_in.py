"""The blocks of the built-in models: a small one of the same kind stands for a large one that is never run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from narrowgauge.nn.blocks.example import Example
from narrowgauge.nn.module_changes import original_class

HEAD_SIZE = 16


def make_examples(block: nn.Module, x: Tensor) -> list[Example] | None:
    """Return None: the conventions of other families cover these blocks."""
    return None


def make_small(block: nn.Module) -> nn.Module | None:
    """Return a block of the same class with as many heads and a smaller width, or None for other families."""
    cls = original_class(block)
    if not cls.__module__.startswith("narrowgauge.models."):
        return None
    whole: Any = block
    is_shared = getattr(getattr(whole, "mixture", None), "shared", None) is not None
    sizes = SimpleNamespace(
        width=HEAD_SIZE * whole.heads, heads=whole.heads, kv_heads=getattr(whole, "kv_heads", whole.heads),
        head_size=HEAD_SIZE, hidden=64, experts=2, chosen=1, shared=int(is_shared),
    )  # fmt: skip
    made: nn.Module = cls(sizes)
    return made
