"""Accelerate under a recipe: the Accelerator keeps its loop, accumulation, clipping and checkpoints.

    from narrowgauge.integrations.accelerate import prepare

    accelerator = Accelerator(gradient_accumulation_steps=4)                # mixed_precision="no": the recipe says it
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="fp16")

An Accelerator asks its ``scaler`` for everything that differs between precisions: what backward starts from, how an
optimizer steps, what a checkpoint holds. ``Bridge`` answers in its place with an engine, for every recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.integrations.gauges import Gauges
from narrowgauge.integrations.hosted import Hosted, check_options, import_library
from narrowgauge.nn.changes import Change, apply_change
from narrowgauge.ranks.distribute import unwrap_ddp
from narrowgauge.recipe import Recipe

SPREADS = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Accelerate's kinds of distribution that leave parameters and optimizer whole."""


def prepare(accelerator: Any, *objects: Any, recipe: str | Recipe = "auto", **options: Any) -> Any:
    """``accelerator.prepare`` under a recipe: a model, its optimizer, and whatever else there is to prepare.

    ``options`` are the engine's: clip_norm, compile, blocks, fused, max_consecutive_skips.
    """
    _pair(objects)
    adopt(accelerator, recipe, **options)
    return accelerator.prepare(*objects)


def adopt(accelerator: Any, recipe: str | Recipe = "auto", **options: Any) -> Bridge:
    """Let every later ``accelerator.prepare(model, optimizer, ...)`` train under a recipe."""
    library = import_library("accelerate", "accelerate")
    if not isinstance(accelerator, library.Accelerator):
        raise UsageError(f"expected an accelerate.Accelerator, got {type(accelerator).__name__}")
    if isinstance(accelerator.scaler, Bridge):
        raise UsageError("this Accelerator has a recipe already; make a new one for another")
    if accelerator.mixed_precision != "no":
        raise UsageError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}) and a recipe are two answers to one "
            "question: leave mixed_precision (fp16 and bf16 in TrainingArguments) off"
        )
    spread = str(accelerator.distributed_type.value)
    if spread not in SPREADS:
        raise UsageError(f"{spread} spreads the optimizer in its own way; narrowgauge shards by itself: docs/ranks.md")
    check_options(recipe, options)
    return Bridge(accelerator, recipe, options)


def engine_of(accelerator: Any) -> Hosted:
    """The engine that trains an Accelerator's model: for ``ng.watch``, ``skipped``, ``report``."""
    bridge = getattr(accelerator, "scaler", None)
    if not isinstance(bridge, Bridge):
        raise UsageError("this Accelerator has no recipe: prepare its model and optimizer with narrowgauge first")
    return bridge.engine


class Bridge:
    """Stands where an Accelerator has its GradScaler, and hands what it is asked to an engine."""

    def __init__(self, accelerator: Any, recipe: str | Recipe, options: dict[str, Any]) -> None:
        self._recipe, self._options = recipe, options
        self._engine: Hosted | None = None
        self._plain_prepare = accelerator.prepare
        self.gauges: Gauges | None = None
        """Who is shown the batches, where captures are wanted."""
        self.on_engine: Callable[[Hosted], None] | None = None
        """Called with an engine that was just made."""
        accelerator.scaler = self
        accelerator.prepare = self._prepare
        accelerator.unscale_gradients = self._unscale_gradients  # Accelerate's own asks for mixed_precision="fp16"

    @property
    def engine(self) -> Hosted:
        if self._engine is None:
            raise UsageError("nothing is prepared yet: call accelerator.prepare(model, optimizer) first")
        return self._engine

    def _prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """``accelerator.prepare``; a model that comes with its optimizer gets an engine in between."""
        if not any(isinstance(thing, Optimizer) for thing in objects):
            return self._plain_prepare(*objects, **kwargs)
        model, optimizer = _pair(objects)
        bare = getattr(optimizer, "optimizer", optimizer)  # what was prepared before comes back in its wrapper
        if self._engine is None or bare not in self._engine.optimizers:
            placed = self._plain_prepare(model)
            bare = self._make(placed, bare)
            objects = tuple(placed if o is model else bare if o is optimizer else o for o in objects)
        return self._plain_prepare(*objects, **kwargs)

    def _make(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        if self._engine is not None and self._engine.inner is not unwrap_ddp(model):
            raise UsageError("an Accelerator under a recipe trains one model: one loss scale serves one; make another")
        self._engine = engine = Hosted(model, optimizer, self._recipe, **self._options)
        _surround(self, engine)
        if self.on_engine is not None:
            self.on_engine(engine)
        return engine.optimizers[0]

    def _unscale_gradients(self, optimizer: Any = None) -> None:
        self.engine.unscale()

    def scale(self, loss: Tensor) -> _Loss:
        return _Loss(self.engine, loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        self.engine.unscale()

    def step(self, optimizer: Optimizer, *closure: Any) -> None:
        if optimizer not in self.engine.optimizers:
            raise UsageError("an optimizer that was not prepared with the model cannot be stepped under a recipe")
        self.engine.step(*(one for one in closure if one is not None))

    def update(self) -> None:
        """The engine's step has moved the scale."""

    def get_scale(self) -> float:
        scaler = self.engine.scaler
        return scaler.get_scale() if scaler is not None else 1.0

    def is_enabled(self) -> bool:
        return self.engine.scaler is not None

    def state_dict(self) -> dict[str, Any]:
        return self.engine.precision_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_precision_state_dict(state)


class _Loss:
    """What ``scaler.scale(loss)`` gives an Accelerator, which asks it for ``backward`` and nothing else."""

    def __init__(self, engine: Hosted, loss: Tensor) -> None:
        self._engine, self._loss = engine, loss

    def backward(self, **kwargs: Any) -> None:
        self._engine.run_backward(self._loss, lambda scaled: scaled.backward(**kwargs))


def _surround(bridge: Bridge, engine: Hosted) -> None:
    """Run the model's forward in the recipe's surroundings, and hand out FP32: losses are often computed outside."""
    apply_change(engine.inner, _Surrounded(bridge, engine))


class _Surrounded(Change):
    """See ``_surround``. A copy of the model, which no engine trains, keeps the surroundings alone."""

    def __init__(self, bridge: Bridge | None, engine: Hosted | None) -> None:
        self.bridge, self.engine = bridge, engine
        self.step_context = engine.step_context if engine is not None else None

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        widen = import_library("accelerate.utils", "accelerate").convert_to_fp32
        if self.bridge is not None and self.bridge.gauges is not None:
            self.bridge.gauges.saw({**{str(i): value for i, value in enumerate(args)}, **kwargs})
        assert self.step_context is not None
        with self.engine.forward() if self.engine is not None else self.step_context.forward():
            output = inner(*args, **kwargs)
        return widen(output)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bridge": None, "engine": None}


def _pair(objects: tuple[Any, ...]) -> tuple[nn.Module, Optimizer]:
    """The one model and the one optimizer among what is to be prepared."""
    models = [thing for thing in objects if isinstance(thing, nn.Module)]
    optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
    if len(models) != 1 or len(optimizers) != 1:
        raise UsageError(
            f"a recipe trains one model by one optimizer, prepared together (parameter groups may differ); got "
            f"{len(models)} models and {len(optimizers)} optimizers. Models that are not trained: accelerator.prepare"
        )
    return models[0], optimizers[0]
