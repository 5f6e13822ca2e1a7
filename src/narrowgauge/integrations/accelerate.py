"""Accelerate under a recipe: the Accelerator keeps its loop, accumulation, clipping and checkpoints.

    from narrowgauge.integrations.accelerate import prepare

    accelerator = Accelerator(gradient_accumulation_steps=4)                # mixed_precision="no": the recipe decides
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="fp16")

An Accelerator calls its ``scaler`` for everything that differs between precisions: where backward starts, how an
optimizer steps, what a checkpoint contains. ``EngineScaler`` takes that role with an engine, for every recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.integrations.gauges import Gauges
from narrowgauge.integrations.hosted import Hosted, check_options, import_library
from narrowgauge.nn.module_changes import Change, apply_change
from narrowgauge.nn.products.bf16_for_now import for_evaluation
from narrowgauge.ranks.distribute import unwrap_ddp
from narrowgauge.recipe import Recipe

SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Accelerate's distributed types that do not shard parameters or optimizer."""


def prepare(accelerator: Any, *objects: Any, recipe: str | Recipe = "auto", **options: Any) -> Any:
    """Call ``accelerator.prepare`` under a recipe.

    Args:
        accelerator: An ``accelerate.Accelerator`` with ``mixed_precision="no"``.
        *objects: A model, its optimizer, and any loaders and schedulers.
        recipe: A recipe or its text.
        **options: ``clip_norm``, ``compile``, ``blocks``, ``fused``, ``max_consecutive_skips`` and ``memory_budget`` of
            ``Engine``.

    Returns:
        The prepared objects, in the same order.

    Raises:
        UsageError: The objects, the Accelerator or an option cannot be trained under the recipe.

    Example:
        >>> model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="bf16")
    """
    _find_pair(objects)
    adopt(accelerator, recipe, **options)
    return accelerator.prepare(*objects)


def adopt(accelerator: Any, recipe: str | Recipe = "auto", **options: Any) -> EngineScaler:
    """Let every later ``accelerator.prepare(model, optimizer, ...)`` train under a recipe.

    Args:
        accelerator: An ``accelerate.Accelerator`` with ``mixed_precision="no"``.
        recipe: A recipe or its text.
        **options: ``clip_norm``, ``compile``, ``blocks``, ``fused``, ``max_consecutive_skips`` and ``memory_budget`` of
            ``Engine``.

    Returns:
        The object that replaces the Accelerator's GradScaler.

    Raises:
        UsageError: The Accelerator has a recipe or a mixed precision already, or shards the optimizer.
    """
    library = import_library("accelerate", "accelerate")
    if not isinstance(accelerator, library.Accelerator):
        raise UsageError(f"expected an accelerate.Accelerator, got {type(accelerator).__name__}")
    if isinstance(accelerator.scaler, EngineScaler):
        raise UsageError("this Accelerator has a recipe already; create another Accelerator for another recipe")
    if accelerator.mixed_precision != "no":
        raise UsageError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}) conflicts with a recipe, which sets the "
            "precision: leave mixed_precision (fp16 and bf16 in TrainingArguments) off"
        )
    distributed = str(accelerator.distributed_type.value)
    if distributed not in SUPPORTED:
        raise UsageError(
            f"{distributed} shards the optimizer in its own way, which a recipe does not support; use ng.Engine with "
            "FSDP2 instead: docs/ranks.md"
        )
    check_options(recipe, options)
    return EngineScaler(accelerator, recipe, options)


def engine_of(accelerator: Any) -> Hosted:
    """Return the engine that trains an Accelerator's model, for ``ng.watch``, ``skipped`` or ``report``.

    Args:
        accelerator: An Accelerator that was passed to ``prepare`` or ``adopt``.

    Raises:
        UsageError: The Accelerator has no recipe, or nothing is prepared yet.
    """
    scaler = getattr(accelerator, "scaler", None)
    if not isinstance(scaler, EngineScaler):
        raise UsageError("this Accelerator has no recipe: prepare its model and optimizer with narrowgauge first")
    return scaler.engine


class EngineScaler:
    """Replaces an Accelerator's GradScaler, and passes its calls to an engine.

    Attributes:
        gauges: Receives each batch before its forward, if steps are captured.
        on_engine: Called with each new engine.
    """

    def __init__(self, accelerator: Any, recipe: str | Recipe, options: dict[str, Any]) -> None:
        self._recipe, self._options = recipe, options
        self._engine: Hosted | None = None
        self._accelerators_prepare = accelerator.prepare
        self.gauges: Gauges | None = None
        self.on_engine: Callable[[Hosted], None] | None = None
        accelerator.scaler = self
        accelerator.prepare = self._prepare
        accelerator.unscale_gradients = self._unscale_gradients  # Accelerate's own requires mixed_precision="fp16"

    @property
    def engine(self) -> Hosted:
        """The engine; UsageError before ``accelerator.prepare``."""
        if self._engine is None:
            raise UsageError("nothing is prepared yet: call accelerator.prepare(model, optimizer) first")
        return self._engine

    def _prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """``accelerator.prepare``, which creates an engine for a model that comes with its optimizer."""
        if not any(isinstance(one, Optimizer) for one in objects):
            return self._accelerators_prepare(*objects, **kwargs)
        model, optimizer = _find_pair(objects)
        bare = getattr(optimizer, "optimizer", optimizer)  # a prepared optimizer is wrapped
        if self._engine is None or bare not in self._engine.optimizers:
            placed = self._accelerators_prepare(model)
            bare = self._make_engine(placed, bare)
            objects = tuple(placed if o is model else bare if o is optimizer else o for o in objects)
        return self._accelerators_prepare(*objects, **kwargs)

    def _make_engine(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        if self._engine is not None and self._engine.inner is not unwrap_ddp(model):
            raise UsageError(
                "an Accelerator under a recipe trains one model, because it has one loss scale; create another one"
            )
        self._engine = engine = Hosted(model, optimizer, self._recipe, **self._options)
        apply_change(engine.inner, _InStepContext(self, engine))
        if self.on_engine is not None:
            self.on_engine(engine)
        return engine.optimizers[0]

    def _unscale_gradients(self, optimizer: Any = None) -> None:
        self.engine.unscale()

    def scale(self, loss: Tensor) -> _Loss:
        """Return an object whose ``backward`` the engine runs."""
        return _Loss(self.engine, loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients in place."""
        self.engine.unscale()

    def step(self, optimizer: Optimizer, *closure: Any) -> None:
        """Update the weights."""
        if optimizer not in self.engine.optimizers:
            raise UsageError("this optimizer was not prepared with the model, so it cannot be stepped under a recipe")
        self.engine.step(*(one for one in closure if one is not None))

    def update(self) -> None:
        """Do nothing: the engine's step has updated the scale."""

    def get_scale(self) -> float:
        """Return the loss scale; 1 if the recipe does not scale the loss."""
        scaler = self.engine.scaler
        return scaler.get_scale() if scaler is not None else 1.0

    def is_enabled(self) -> bool:
        """Return whether the recipe scales the loss."""
        return self.engine.scaler is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's precision state."""
        return self.engine.precision_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the engine's precision state."""
        self.engine.load_precision_state_dict(state)


class _Loss:
    """What ``scaler.scale(loss)`` returns: an Accelerator calls its ``backward`` and nothing else."""

    def __init__(self, engine: Hosted, loss: Tensor) -> None:
        self._engine, self._loss = engine, loss

    def backward(self, **kwargs: Any) -> None:
        self._engine.run_backward(self._loss, lambda scaled: scaled.backward(**kwargs))


class _InStepContext(Change):
    """Runs a model's forward in the engine's context and returns FP32: losses are often computed outside of it.

    A copy of the model has no engine, and keeps only the recipe's context.
    """

    def __init__(self, scaler: EngineScaler | None, engine: Hosted | None) -> None:
        self.scaler, self.engine = scaler, engine
        self.step_context = engine.step_context if engine is not None else None

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        convert_to_fp32 = import_library("accelerate.utils", "accelerate").convert_to_fp32
        if self.scaler is not None and self.scaler.gauges is not None:
            self.scaler.gauges.record_batch({**{str(i): value for i, value in enumerate(args)}, **kwargs})
        assert self.step_context is not None
        evaluates = not module.training and not torch.is_grad_enabled()
        context = self.engine.forward() if self.engine is not None else self.step_context.forward()
        with context, for_evaluation(self.step_context.recipe) if evaluates else contextlib.nullcontext():
            output = inner(*args, **kwargs)
        return convert_to_fp32(output)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "scaler": None, "engine": None}


def _find_pair(objects: tuple[Any, ...]) -> tuple[nn.Module, Optimizer]:
    """Return the one model and the one optimizer among the objects to prepare."""
    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    if len(models) != 1 or len(optimizers) != 1:
        raise UsageError(
            f"a recipe trains one model with one optimizer, prepared together (parameter groups may differ); got "
            f"{len(models)} models and {len(optimizers)} optimizers. Prepare other models with accelerator.prepare"
        )
    return models[0], optimizers[0]
