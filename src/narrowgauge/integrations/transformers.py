"""The Hugging Face Trainer under a recipe, with gauges, findings and captures.

    from narrowgauge.integrations.transformers import adapt

    trainer = adapt(Trainer(model, args, train_dataset=data), recipe="bf16")     # any subclass, such as SFTTrainer
    trainer.train()

A Trainer steps through an Accelerator, so this is Accelerate's integration (accelerate.py) with a callback. The Trainer
keeps its accumulation, clipping, schedules, evaluation and checkpoints. Each checkpoint's ``scaler.pt`` contains the
loss scale, the skip counters and the FP8 scales, and ``resume_from_checkpoint`` loads them.

``from_pretrained`` loads models in the format of their files, usually BF16. ``adapt`` gives the trained weights the
form that the recipe trains (trained_weights.py), so nothing has to be converted before. Stacked experts, which a
Trainer does not load when it resumes, are loaded (converted_weights.py).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.findings import Finding
from narrowgauge.gauges.watch.watch import EVERY
from narrowgauge.integrations.accelerate import EngineScaler, adopt
from narrowgauge.integrations.converted_weights import load_all_weights
from narrowgauge.integrations.gauges import Gauges
from narrowgauge.integrations.hosted import Hosted, check_options, import_library
from narrowgauge.integrations.trained_weights import convert_weights
from narrowgauge.nn.module_changes import has_own_method
from narrowgauge.recipe import Recipe, is_auto, parse


def adapt(
    trainer: Any,
    recipe: str | Recipe = "auto",
    *,
    watch: int = EVERY,
    captures: str | Path | None = None,
    **options: Any,
) -> Any:
    """Let a Trainer train under a recipe.

    Args:
        trainer: A ``transformers.Trainer`` or an instance of a subclass, with ``fp16`` and ``bf16`` off. Where ``bf16``
            is on by default (TRL), it is turned off.
        recipe: A recipe or its text.
        watch: Read tensors every so many updates. 0: never, and report no findings.
        captures: Folder for steps whose loss or gradients are not finite. None: capture nothing.
        **options: ``clip_norm``, ``compile``, ``blocks``, ``fused``, ``max_consecutive_skips`` and ``memory_budget`` of
            ``Engine``.

    Returns:
        The same Trainer.

    Raises:
        UsageError: The Trainer or an option cannot be combined with the recipe.

    Example:
        >>> trainer = adapt(Trainer(model, args, train_dataset=data), recipe="bf16")
        >>> trainer.train()
    """
    library = import_library("transformers", "'transformers[torch]'")
    if not isinstance(trainer, library.Trainer):
        raise UsageError(f"adapt: expected a transformers.Trainer, got {type(trainer).__name__}")
    if captures is not None and not watch:
        raise UsageError("adapt: captures need watch, an interval of at least 1")
    if getattr(trainer.args, "torch_compile", False):
        raise UsageError(
            "adapt: torch_compile compiles the model before the recipe changes it; use adapt(..., compile=True)"
        )
    check_options(recipe, options)
    _turn_off_default_bf16(trainer, recipe)
    recipe = _keep_head(trainer.model, recipe)
    scaler = adopt(trainer.accelerator, recipe, **options)
    convert_weights(trainer.model, recipe)
    load_all_weights(trainer)
    callback = _make_callback_class()(scaler, watch, captures)
    trainer.callback_handler.callbacks.insert(0, callback)  # first, so that reporters see what it adds
    return trainer


def _keep_head(model: Any, recipe: str | Recipe) -> str | Recipe:
    """Keep the head's weight readable where another forward reads it, as TRL's does: a stored FP8 weight is scaled."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if is_auto(recipe) or parse(recipe).frozen != "fp8" or not has_own_method(base, "forward"):
        return recipe
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        return recipe
    owners = [
        path
        for path, module in model.named_modules()
        if any(parameter is head.weight for parameter in module.parameters(recurse=False))
    ]
    found = parse(recipe)
    return found.replace(keep=tuple(dict.fromkeys((*found.keep, *owners))))


def _turn_off_default_bf16(trainer: Any, recipe: str | Recipe) -> None:
    """Turn ``bf16`` off if the configuration turns it on by default, as TRL's do, and make a new Accelerator."""
    arguments = trainer.args
    default = {field.name: field.default for field in dataclasses.fields(arguments)}.get("bf16")
    if not arguments.bf16 or default is not None or isinstance(trainer.accelerator.scaler, EngineScaler):
        return
    arguments.bf16, arguments.mixed_precision = False, "no"
    import_library("accelerate.state", "accelerate").AcceleratorState._reset_state()  # it refuses another precision
    trainer.create_accelerator_and_postprocess()
    logging.getLogger("narrowgauge").warning(
        "%s(bf16=True), which is its default, is turned off: recipe %s sets the formats",
        type(arguments).__name__,
        recipe,
    )


def gauges_of(trainer: Any) -> Any:
    """Return the callback that ``adapt`` added to a Trainer. It has ``findings`` and ``engine``.

    Args:
        trainer: An adapted Trainer.

    Raises:
        UsageError: The Trainer was not adapted.
    """
    found = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, _Callback)]
    if not found:
        raise UsageError("this Trainer has no recipe: call narrowgauge.integrations.transformers.adapt first")
    return found[0]


def replay_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the loss of a captured batch, for ``ng.replay(folder, model, replay_loss)``.

    Args:
        model: A model that returns a dictionary with ``loss``.
        batch: The captured keyword arguments of its forward.
    """
    loss: Tensor = model(**batch)["loss"]
    return loss


@functools.cache
def _make_callback_class() -> type:
    base = import_library("transformers", "'transformers[torch]'").TrainerCallback
    return type("NarrowgaugeCallback", (_Callback, base), {"__module__": __name__})


class _Callback:
    """Watches the engine of a Trainer: logs loss scale and skipped updates, and warns of findings."""

    def __init__(self, scaler: EngineScaler, watch: int, captures: str | Path | None) -> None:
        self._scaler, self._watch, self._captures = scaler, watch, captures
        self._log = logging.getLogger("narrowgauge")
        scaler.on_engine = self._start_gauges

    @property
    def engine(self) -> Hosted:
        """The engine that trains the model."""
        return self._scaler.engine

    @property
    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._scaler.gauges.findings if self._scaler.gauges is not None else []

    def _start_gauges(self, engine: Hosted) -> None:
        if self._watch:
            self._scaler.gauges = Gauges(engine, self._watch, self._captures, self._log.warning)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log what runs in which format."""
        engine = self.engine
        self._log.info("recipe %s on %s: %s", engine.recipe, engine.hardware.name, engine.conversion.summary())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add ``loss_scale``, ``skipped_updates`` and ``findings`` to the numbers of a training step."""
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
        """Report the last findings."""
        if self._scaler.gauges is not None:
            self._scaler.gauges.finish()
