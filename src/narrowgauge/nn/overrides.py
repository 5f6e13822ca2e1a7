"""Puts functions in the place of a module's methods, and takes them out again.

An engine changes how a model computes (keepers, recomputation, compilation, FP8) by setting methods on its modules, not
by changing classes or parameters. A second engine over the same model starts from the model as the user made it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

METHODS = ("forward", "trunk", "finish")


def override(module: nn.Module, function: Callable[..., Any], name: str = "forward") -> None:
    """Let ``function`` stand for the module's method until ``remove_overrides``."""
    function.overrides = module.__dict__.get(name)  # type: ignore[attr-defined]
    setattr(module, name, function)


def remove_overrides(model: nn.Module) -> None:
    """Give every module its own methods back, and those that the user had set on it."""
    for module in model.modules():
        for name in METHODS:
            while hasattr(module.__dict__.get(name), "overrides"):
                before = module.__dict__[name].overrides
                if before is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = before
