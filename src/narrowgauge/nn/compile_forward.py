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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from narrowgauge.nn.changes import Change, apply_change, find_change
from narrowgauge.nn.grouped_mm import own_graphs
from narrowgauge.nn.step_context import StepContext


class CompiledForward(Change):
    """A model that runs as a compiled graph. A copy of the model runs uncompiled, in the same surroundings."""

    def __init__(self, step_context: StepContext, mode: str | None = None) -> None:
        self.step_context, self.mode = step_context, mode
        self.paused = False
        self._graph: Callable[..., Any] | None = None

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.paused:
            with self.step_context.attention(), self.step_context.autocast():
                return inner(*args, **kwargs)
        if self._graph is None:
            self._graph = self._compiled(inner)
        with own_graphs():
            return self._graph(*args, **kwargs)

    def _compiled(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        step_context = self.step_context

        def forward(*args: Any, **kwargs: Any) -> Any:
            with step_context.attention(), step_context.autocast():
                return inner(*args, **kwargs)

        forward.__code__ = forward.__code__.replace()  # an equal code object, but this engine's own
        return torch.compile(forward, mode=self.mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_graph": None, "paused": True}


def compile_forward(model: nn.Module, step_context: StepContext, mode: str | None = None) -> None:
    """Let the model run as a compiled graph; its state dictionary does not change."""
    apply_change(model, CompiledForward(step_context, mode))


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Let a model that was compiled run as it was written, for a while: its hooks are then called."""
    change = find_change(model, CompiledForward)
    if change is None:
        yield
        return
    before, change.paused = change.paused, True
    try:
        yield
    finally:
        change.paused = before
