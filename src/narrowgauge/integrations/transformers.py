"""The Hugging Face Trainer under a recipe, with gauges, findings and captures.

    from narrowgauge.integrations.transformers import adapt

    trainer = adapt(Trainer(model, args, train_dataset=data), recipe="bf16")     # any subclass of Trainer
    trainer.train()

A Trainer runs its steps through an Accelerator, so this is Accelerate's integration (accelerate.py) with a callback:
accumulation, clipping, schedules, evaluation and checkpoints stay the Trainer's. The loss scale, the counters and the
FP8 scales are in each checkpoint's ``scaler.pt``, and ``resume_from_checkpoint`` goes on from them.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.findings import Finding
from narrowgauge.gauges.watch.watch import EVERY
from narrowgauge.integrations.accelerate import Bridge, adopt
from narrowgauge.integrations.gauges import Gauges
from narrowgauge.integrations.hosted import Hosted, import_library
from narrowgauge.recipe import Recipe


def adapt(
    trainer: Any,
    recipe: str | Recipe = "auto",
    *,
    watch: int = EVERY,
    captures: str | Path | None = None,
    **options: Any,
) -> Any:
    """Let a Trainer train under a recipe; returns the same Trainer.

    Tensors are read every ``watch`` updates (0: never, and no findings); steps that go wrong are written to the folder
    ``captures``. ``options`` are the engine's: clip_norm, compile, blocks, fused, max_consecutive_skips.
    """
    library = import_library("transformers", "'transformers[torch]'")
    if not isinstance(trainer, library.Trainer):
        raise UsageError(f"adapt: expected a transformers.Trainer, got {type(trainer).__name__}")
    if captures is not None and not watch:
        raise UsageError("adapt: captures need watch, an interval of at least 1")
    if getattr(trainer.args, "torch_compile", False):
        raise UsageError("adapt: torch_compile compiles the model before the recipe is in it; take compile=True here")
    bridge = adopt(trainer.accelerator, recipe, **options)
    callback = _callback_class()(bridge, watch, captures)
    trainer.callback_handler.callbacks.insert(0, callback)  # first, so that reporters see what it adds to the logs
    return trainer


def gauges_of(trainer: Any) -> Any:
    """The callback that ``adapt`` gave a Trainer: ``findings``, ``engine``."""
    found = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, _Callback)]
    if not found:
        raise UsageError("this Trainer has no recipe: call narrowgauge.integrations.transformers.adapt first")
    return found[0]


def replay_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss of a captured batch: ``ng.replay(folder, model, replay_loss)``."""
    loss: Tensor = model(**batch)["loss"]
    return loss


@functools.cache
def _callback_class() -> type:
    base = import_library("transformers", "'transformers[torch]'").TrainerCallback
    return type("NarrowgaugeCallback", (_Callback, base), {"__module__": __name__})


class _Callback:
    """Watches the engine that a Trainer trains by; logs its loss scale and skips, and warns of what it finds."""

    def __init__(self, bridge: Bridge, watch: int, captures: str | Path | None) -> None:
        self._bridge, self._watch, self._captures = bridge, watch, captures
        self._log = logging.getLogger("narrowgauge")
        bridge.on_engine = self._begin

    @property
    def engine(self) -> Hosted:
        return self._bridge.engine

    @property
    def findings(self) -> list[Finding]:
        return self._bridge.gauges.findings if self._bridge.gauges is not None else []

    def _begin(self, engine: Hosted) -> None:
        if self._watch:
            self._bridge.gauges = Gauges(engine, self._watch, self._captures, self._log.warning)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = self.engine
        self._log.info("recipe %s on %s: %s", engine.recipe, engine.hardware.name, engine.conversion.summary())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """``loss_scale``, ``skipped_updates`` and ``findings`` beside a training step's numbers."""
        if logs is None or "loss" not in logs:
            return
        engine = self.engine
        extra: dict[str, Any] = {"skipped_updates": engine.skipped, "findings": len(self.findings)}
        if engine.scaler is not None:
            extra["loss_scale"] = engine.scaler.get_scale()
        logs.update(extra)
        if state.log_history:
            state.log_history[-1].update(extra)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bridge.gauges is not None:
            self._bridge.gauges.finish()
