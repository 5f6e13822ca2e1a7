"""Lightning under a recipe: one precision plugin for Fabric and for the Trainer.

    from narrowgauge.integrations.lightning import ng_precision

    fabric = Fabric(plugins=ng_precision("fp16"))
    trainer = Trainer(plugins=ng_precision("fp8"), gradient_clip_val=1.0, accumulate_grad_batches=4)

The plugin trains by an engine. A Trainer shows it model and optimizer (``connect``). Fabric shows the model alone, so
that the engine is made at the first forward and meets the optimizer at its first step; recipes that put an optimizer of
their own in the place of yours need it earlier: ``model, optimizer = plugin.setup(fabric, model, optimizer)``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from narrowgauge import hardware
from narrowgauge.engine.setup import is_emulated
from narrowgauge.errors import UsageError
from narrowgauge.integrations.hosted import Hosted, check_options, import_library
from narrowgauge.nn.changes import remove_changes
from narrowgauge.nn.step_context import StepContext
from narrowgauge.optim import full_precision
from narrowgauge.recipe import Recipe, parse

FAMILIES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning", "lightning_fabric": ""}
"""The packages Lightning comes in, and where each has the Trainer: their classes are not each other's."""


def ng_precision(recipe: str | Recipe = "auto", *, family: str | None = None, **options: Any) -> Any:
    """A plugin for ``Fabric(plugins=...)`` or ``Trainer(plugins=...)`` that trains under a recipe.

    ``options`` are the engine's: clip_norm, compile, blocks, fused, max_consecutive_skips. ``family`` says which of
    Lightning's packages the plugin is for (lightning, pytorch_lightning or lightning_fabric); by default the one that
    the program has imported.
    """
    check_options(recipe, options)
    return _plugin_class(family or _imported_family())(recipe, options)


def _imported_family() -> str:
    """The package that the program uses; before it has imported one, the first that is installed."""
    imported = [name for name in FAMILIES if name in sys.modules]
    installed = imported or [name for name in FAMILIES if importlib.util.find_spec(name) is not None]
    return installed[0] if installed else "lightning"


@functools.cache
def _plugin_class(family: str) -> type:
    if family not in FAMILIES:
        raise UsageError(f"family={family!r} is unknown; expected one of {', '.join(FAMILIES)}")
    import_library(family, "lightning")
    home = FAMILIES[family] or family
    base = import_library(f"{home}.plugins.precision", "lightning").Precision
    name = "NarrowgaugePrecision"  # also the key of the plugin's state in a Trainer's checkpoints
    return type(name, (_Plugin, base), {"__module__": __name__, "__qualname__": name, "_base": base})


class _Plugin:
    """Everything of the plugin that does not need Lightning to be imported; ``_base`` is its Precision."""

    _base: Any

    def __init__(self, recipe: str | Recipe, options: dict[str, Any]) -> None:
        self.recipe, self._options = recipe, options
        self._module: nn.Module | None = None
        self._engine: Hosted | None = None
        self._optimizer_seen = False
        self._in_trainer = False
        self._saved: dict[str, Any] | None = None
        """A state that came before the engine."""

    @property
    def engine(self) -> Hosted:
        """The engine: for ``ng.watch``, ``skipped``, ``report``. Under Fabric there is one once a model is set up."""
        if self._engine is None:
            if self._module is None:
                raise UsageError("there is no engine yet: set a model up first (fabric.setup, trainer.fit)")
            _refuse_lean(self.recipe, self._module)
            with torch.inference_mode(False), torch.enable_grad():
                stand_in = SGD([p for p in self._module.parameters() if p.requires_grad], lr=0.0)
                self._take(Hosted(self._module, stand_in, self.recipe, **self._options), seen=False)
        assert self._engine is not None
        return self._engine

    def setup(self, fabric: Any, model: nn.Module, optimizer: Optimizer) -> Any:
        """``fabric.setup(model, optimizer)`` where the recipe takes the optimizer over (bf16-lean, fp8-lean)."""
        self._check_free(model)
        self._take(Hosted(fabric.to_device(model), optimizer, self.recipe, **self._options))
        return fabric.setup(model, *self.engine.optimizers)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Remember the model that is trained; one without trainable parameters needs the surroundings alone."""
        if any(p.requires_grad for p in module.parameters()) and not self._in_trainer:
            self._check_free(module)
            self._module = module
        return module

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """A Trainer's model and optimizers, once they are in their places; to evaluate, it has no optimizer."""
        self._in_trainer = True
        if not optimizers:
            self._engine, self._module = None, model
            return model, optimizers, lr_schedulers
        if len(optimizers) > 1:
            raise UsageError(
                f"a recipe trains one model by one optimizer (parameter groups may differ), and configure_optimizers "
                f"returns {len(optimizers)}"
            )
        if self._engine is not None and optimizers[0] in self._engine.optimizers:  # to evaluate after training
            self._saved = self._engine.precision_state_dict()
        self._take(Hosted(model, optimizers[0], self.recipe, **self._options))
        return model, self.engine.optimizers, lr_schedulers

    def forward_context(self) -> contextlib.AbstractContextManager[None]:
        if self._engine is None and (self._in_trainer or self._module is None):
            return self._evaluation()
        return self.engine.forward()

    def convert_input(self, data: Any) -> Any:
        return data

    def convert_output(self, data: Any) -> Any:
        """Fabric's models hand out FP32: losses are computed outside of the surroundings."""
        apply = import_library("lightning_utilities.core.apply_func", "lightning").apply_to_collection
        return apply(data, Tensor, lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        return self._base.pre_backward(self, tensor, module) if self._in_trainer else tensor

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """``args`` begin with the optimizer under a Trainer."""

        def run(scaled: Tensor) -> None:
            if self._in_trainer:
                self._base.backward(self, scaled, model, *args, **kwargs)  # which asks the LightningModule
            else:
                scaled.backward(*args, **kwargs)

        self.engine.run_backward(tensor, run)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        return self._base.post_backward(self, tensor, module) if self._in_trainer else tensor

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        if kwargs:
            raise UsageError(f"optimizer.step takes no {next(iter(kwargs))} under a recipe")
        if not self._in_trainer:
            if closure is not None:
                raise UsageError("optimizer.step takes no closure under a recipe: call fabric.backward, then step")
            self._meet(optimizer)
            self.engine.step()
            return None
        result = closure() if closure is not None else None
        if result is None and model.automatic_optimization:  # training_step gave no loss: there is nothing to step with
            self._base._after_closure(self, model, optimizer)
            return result
        self.engine.unscale()  # before the hooks that look at gradients, and before clipping
        self._base._after_closure(self, model, optimizer)
        self.engine.step()
        return result

    def unscale_gradients(self, optimizer: Any) -> None:
        self.engine.unscale()

    def state_dict(self) -> dict[str, Any]:
        return self._engine.precision_state_dict() if self._engine is not None else dict(self._saved or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._engine is not None:
            self._engine.load_precision_state_dict(state)
        else:
            self._saved = state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Weights that are split leave as the FP32 numbers they stand for; loading splits them again."""
        if self._engine is not None and self._engine.lean and "state_dict" in checkpoint:
            checkpoint["state_dict"] |= full_precision(self._engine.inner, "cpu")

    def teardown(self) -> None:
        """The model is its owner's again, as Lightning takes it back to the CPU."""
        if self._engine is not None and self._in_trainer:
            remove_changes(self._engine.inner)

    def _take(self, engine: Hosted, seen: bool = True) -> None:
        self._engine, self._module, self._optimizer_seen = engine, engine.inner, seen
        if self._saved:
            engine.load_precision_state_dict(self._saved)
        self._saved = None

    def _check_free(self, module: nn.Module) -> None:
        if self._module is not None and self._module is not module:
            raise UsageError(
                "a plugin's recipe trains one model, as one loss scale serves one: put both into one nn.Module, or "
                "take a Fabric for each; a model that is not trained: requires_grad_(False) before fabric.setup"
            )

    def _meet(self, optimizer: Any) -> None:
        """Put the optimizer that Fabric steps in the place of the stand-in."""
        engine = self.engine
        if not self._optimizer_seen:
            engine.set_optimizer(optimizer)
            self._optimizer_seen = True
        if optimizer not in engine.optimizers:
            raise UsageError("a recipe trains one model by one optimizer, and another one was stepped before")

    def _evaluation(self) -> contextlib.AbstractContextManager[None]:
        """The recipe's surroundings for a model that is not trained: products that FP8 would convert stay in BF16."""
        first = next(self._module.parameters(), None) if self._module is not None else None
        place = first.device if first is not None else torch.get_default_device()
        device = hardware.detect(str(place))
        recipe = parse(self.recipe, device)
        return StepContext(recipe, place, is_emulated(recipe, device)).forward()


def _refuse_lean(recipe: str | Recipe, module: nn.Module) -> None:
    device = hardware.detect(str(next(module.parameters()).device))
    parsed = parse(recipe, device)
    if (parsed.master, parsed.moments) != ("fp32", "fp32"):
        raise UsageError(
            f"recipe {recipe} takes the optimizer over, which Fabric does not show to a plugin: write "
            "model, optimizer = plugin.setup(fabric, model, optimizer) instead of fabric.setup(model, optimizer)"
        )
