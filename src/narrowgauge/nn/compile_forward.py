"""Compiles a model's forward for one engine, separately from every other engine of the process.

Three properties of torch.compile make this more than ``model.compile()``:
- torch.compile does not guard on the allowed attention backend, so that context is opened inside the compiled function.
- torch 2.11 seems to cache compiled graphs on disk under a key that includes whether autocast is on, but not its dtype:
  a BF16 loop after an FP16 one had a different loss and speed (docs/results.md). So autocast is opened inside, too.
- Compiled code belongs to the Python code object, which all models share (``Module._call_impl``). A second engine would
  get the first one's graph if the guards allow it, and after eight graphs (``recompile_limit``) torch.compile silently
  stops compiling. Each engine therefore gets its own code object.

A model is one graph, or its equal blocks share one: then compiling takes as long as for one block, and what is around
the blocks runs as without torch.compile, its loss without logits.

Under delayed FP8 scaling the first update runs uncompiled: no scale is known yet, and a graph that reads each tensor
before its cast would serve for one update only, while compiling it takes as long as compiling the other one. If the
uncompiled model does not fit in memory, the first update is compiled as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from narrowgauge.hardware import is_assumed
from narrowgauge.nn.autocast_rules import separate_compile_cache
from narrowgauge.nn.module_changes import Change, apply_change, call_below, count_changes, find_change
from narrowgauge.nn.step_context import StepContext
from narrowgauge.scaling.tensor import TensorScales

SPARE_GRAPHS = 8
"""Graphs of blocks beyond one for each: for evaluation and other lengths. It is torch.compile's own limit."""


WORKERS_TIMEOUT_S = 15


class CompiledForward(Change):
    """A model that runs as a compiled graph. A copy of the model runs uncompiled, in the same step context."""

    def __init__(self, step_context: StepContext, mode: str | None = None, scales: TensorScales | None = None) -> None:
        self.step_context, self.mode, self.scales = step_context, mode, scales
        self.paused = False
        self._fits_uncompiled = True
        self._graph: Callable[..., Any] | None = None

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.paused:
            return self._run_uncompiled(inner, *args, **kwargs)
        if self._fits_uncompiled and self.is_waiting_for_scales():
            try:
                return self._run_uncompiled(inner, *args, **kwargs)
            except torch.OutOfMemoryError:  # it holds the tensors of the failed forward until this block ends
                self._fits_uncompiled = False
        if self.scales is not None:
            self.scales.renew_tables()
        return self._run_compiled(inner, *args, **kwargs)

    def is_waiting_for_scales(self) -> bool:
        """Whether this forward trains and no update has set the scales yet. An evaluation does not read them."""
        scales = self.scales
        return scales is not None and scales.mode == "delayed" and not scales.delayed and torch.is_grad_enabled()

    def _run_uncompiled(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.step_context.attention(), self.step_context.autocast():
            return inner(*args, **kwargs)

    def _run_compiled(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._graph is None:
            self._graph = _compile(inner, self.step_context, self.mode)
        with separate_compile_cache():
            return self._graph(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_graph": None, "paused": True}


class ForwardOfCompiledBlocks(CompiledForward):
    """A model whose equal blocks run as compiled graphs."""

    compiles = False
    """Whether the last forward ran its blocks compiled. Recomputation in backward must do the same."""
    count = 0
    """Number of blocks."""

    def _run_uncompiled(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.compiles = False
        return super()._run_uncompiled(inner, *args, **kwargs)

    def _run_compiled(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.compiles = True
        return super()._run_uncompiled(inner, *args, **kwargs)

    def run_block(self, module: Any, level: int, /, *args: Any, **kwargs: Any) -> Any:
        """Run a block as a graph, with the first ``level`` changes of the module."""
        if self._graph is None:
            wait_for_compile_workers(self.step_context.device)
            self._graph = _compile(call_below, self.step_context, self.mode)
        if self.scales is not None:
            self.scales.renew_tables()  # blocks after this one change the tables that it saves for recomputation
        limit: Any = torch._dynamo.config.patch(recompile_limit=self.count + SPARE_GRAPHS)
        with separate_compile_cache(), limit:
            return self._graph(module, "forward", level, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "compiles": False}


class CompiledBlock(Change):
    """A block that runs as a graph, which equal blocks share."""

    def __init__(self, owner: ForwardOfCompiledBlocks, level: int) -> None:
        self.owner, self.level = owner, level

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self.owner.compiles or torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        return self.owner.run_block(module, self.level, *args, **kwargs)


def _compile(function: Callable[..., Any], step_context: StepContext, mode: str | None) -> Callable[..., Any]:
    """Compile a function in a step context."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with step_context.attention(), step_context.autocast():
            return function(*args, **kwargs)

    forward.__code__ = forward.__code__.replace()  # an equal code object, but this engine's own
    return torch.compile(forward, mode=mode)


def compile_forward(
    model: nn.Module,
    step_context: StepContext,
    mode: str | None = None,
    scales: TensorScales | None = None,
    blocks: Collection[nn.Module] = (),
) -> None:
    """Make the model run as a compiled graph; its state dictionary does not change.

    Args:
        model: The model.
        step_context: The context to compile in.
        mode: A mode of ``torch.compile``.
        scales: The model's FP8 scales. While they are unknown, training steps run uncompiled.
        blocks: Blocks to compile instead of the model.
    """
    if not blocks:
        apply_change(model, CompiledForward(step_context, mode, scales))
        return
    start_compile_workers(step_context.device)
    owner = ForwardOfCompiledBlocks(step_context, mode, scales)
    owner.count = len(blocks)
    for block in blocks:
        apply_change(block, CompiledBlock(owner, count_changes(block)))
    apply_change(model, owner)


def start_compile_workers(device: torch.device) -> None:
    """Start inductor's worker processes now, so that they are ready after the first, uncompiled step.

    They need some seconds. Until then inductor compiles one kernel after another in this process, and one block is
    traced before they are ready. Not a public interface of torch: without it, compiling takes longer.
    """
    _call_compile_workers(device, "use_process_pool")  # creates the pool, and gives it a first task


def wait_for_compile_workers(device: torch.device) -> None:
    """Wait until inductor's worker processes are ready, some seconds at most."""
    _call_compile_workers(device, "wait_pool_ready", WORKERS_TIMEOUT_S)


def _call_compile_workers(device: torch.device, method: str, *args: Any) -> None:
    if device.type == "cuda" and not is_assumed():
        with contextlib.suppress(ImportError, AttributeError, TimeoutError):
            from torch._inductor.async_compile import AsyncCompile

            getattr(AsyncCompile, method)(*args)


@contextlib.contextmanager
def run_uncompiled(model: nn.Module) -> Iterator[None]:
    """Context manager in which a compiled model runs eagerly, so that its hooks are called."""
    change = find_change(model, CompiledForward)
    if change is None:
        yield
        return
    before, change.paused = change.paused, True
    try:
        yield
    finally:
        change.paused = before
