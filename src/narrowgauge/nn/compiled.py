"""Compiles a model's forward for one engine, apart from every other engine of the process.

Three habits of torch.compile make this more than ``model.compile()``:
- The attention backend that a context outside allows is no part of what it guards on, so the context is opened inside.
- torch 2.11 seems to keep compiled graphs on disk under a key that knows whether autocast is on, but not its format: a
  BF16 loop after an FP16 one got another loss and speed (docs/results.md). So autocast is opened inside, too.
- Compiled code belongs to the Python code object, which all models share (``Module._call_impl``). A second engine would
  be handed the first one's graph where the guards let it, and after eight graphs (``recompile_limit``) torch.compile
  stops compiling without a word. Each engine therefore gets a code object of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from narrowgauge.nn.overrides import override
from narrowgauge.nn.precision import Surroundings


def compile_forward(model: nn.Module, surroundings: Surroundings, mode: str | None = None) -> None:
    """Replace the model's forward by a compiled one; its state dictionary does not change."""
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with surroundings.attention(), surroundings.autocast():
            return plain(*args, **kwargs)

    forward.__code__ = forward.__code__.replace()  # an equal code object, but this engine's own
    compiled = torch.compile(forward, mode=mode)
    functools.update_wrapper(compiled, plain)
    override(model, compiled)
    compiled.uncompiled = forward  # type: ignore[attr-defined]


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Let a model that was compiled run as it was written, for a while: its hooks are then called."""
    compiled = model.__dict__.get("forward")
    plain = getattr(compiled, "uncompiled", None)
    if plain is None:
        yield
        return
    model.__dict__["forward"] = plain
    try:
        yield
    finally:
        model.__dict__["forward"] = compiled
