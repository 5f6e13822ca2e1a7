"""Lightning under a recipe: one precision plugin for Fabric and for the Trainer.

    from narrowgauge.integrations.lightning import ng_precision

    fabric = Fabric(plugins=ng_precision("fp16"))
    trainer = Trainer(plugins=ng_precision("fp8"), gradient_clip_val=1.0, accumulate_grad_batches=4)

The plugin trains with an engine. A Trainer passes it the model and the optimizer (``connect``). Fabric passes only the
model, so the plugin creates the engine at the first forward and adds the optimizer at its first step. Recipes that
replace the optimizer need it earlier: ``model, optimizer = plugin.setup(fabric, model, optimizer)``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from narrowgauge import hardware
from narrowgauge.engine.setup import is_emulated
from narrowgauge.errors import UsageError
from narrowgauge.integrations.hosted import Hosted, check_options, import_library
from narrowgauge.nn.module_changes import remove_changes
from narrowgauge.nn.products.bf16_for_now import for_evaluation
from narrowgauge.nn.step_context import StepContext
from narrowgauge.optim import full_precision
from narrowgauge.recipe import Recipe, parse

FAMILIES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning", "lightning_fabric": ""}
"""Lightning's packages, and the module of each that has the Trainer. Their classes are not interchangeable."""


def ng_precision(recipe: str | Recipe = "auto", *, family: str | None = None, **options: Any) -> Any:
    """Return a precision plugin for ``Fabric(plugins=...)`` or ``Trainer(plugins=...)``.

    Args:
        recipe: A recipe or its text.
        family: The Lightning package that the plugin is for: ``lightning``, ``pytorch_lightning`` or
            ``lightning_fabric``. Default: the one that the program has imported.
        **options: ``clip_norm``, ``compile``, ``blocks``, ``fused``, ``max_consecutive_skips`` and ``memory_budget`` of
            ``Engine``.

    Returns:
        The plugin. Its ``engine`` is the engine that trains the model.

    Raises:
        UsageError: The recipe, the family or an option is unknown, or Lightning is not installed.

    Example:
        >>> trainer = Trainer(plugins=ng_precision("fp8"), gradient_clip_val=1.0)
    """
    check_options(recipe, options)
    return _make_plugin_class(family or _find_family())(recipe, options)


def _find_family() -> str:
    """Return the package that the program has imported, or the first that is installed."""
    imported = [name for name in FAMILIES if name in sys.modules]
    installed = imported or [name for name in FAMILIES if importlib.util.find_spec(name) is not None]
    return installed[0] if installed else "lightning"


@functools.cache
def _make_plugin_class(family: str) -> type:
    if family not in FAMILIES:
        raise UsageError(f"family={family!r} is unknown; expected one of {', '.join(FAMILIES)}")
    import_library(family, "lightning")
    home = FAMILIES[family] or family
    base = import_library(f"{home}.plugins.precision", "lightning").Precision
    name = "NarrowgaugePrecision"  # also the key of the plugin's state in a Trainer's checkpoints
    return type(name, (_Plugin, base), {"__module__": __name__, "__qualname__": name, "_base": base})


class _Plugin:
    """The plugin without its Lightning base class ``Precision``, which is ``_base``: see ``ng_precision``."""

    _base: Any

    def __init__(self, recipe: str | Recipe, options: dict[str, Any]) -> None:
        self.recipe, self._options = recipe, options
        self._module: nn.Module | None = None
        self._engine: Hosted | None = None
        self._optimizer_seen = False
        self._in_trainer = False
        self._saved: dict[str, Any] | None = None
        """A state that was loaded before the engine existed."""

    @property
    def engine(self) -> Hosted:
        """The engine, for ``ng.watch``, ``skipped`` or ``report``. Under Fabric it exists once a model is set up."""
        if self._engine is None:
            if self._module is None:
                raise UsageError("there is no engine yet: call fabric.setup or trainer.fit first")
            _refuse_lean_recipe(self.recipe, self._module)
            with torch.inference_mode(False), torch.enable_grad():
                placeholder = SGD([p for p in self._module.parameters() if p.requires_grad], lr=0.0)
                self._use_engine(Hosted(self._module, placeholder, self.recipe, **self._options), seen=False)
        assert self._engine is not None
        return self._engine

    def setup(self, fabric: Any, model: nn.Module, optimizer: Optimizer) -> Any:
        """Call ``fabric.setup(model, optimizer)`` for recipes that replace the optimizer (bf16-lean, fp8-lean).

        Args:
            fabric: The Fabric that has this plugin.
            model: The model.
            optimizer: Its AdamW.

        Returns:
            The model and the optimizer, as ``fabric.setup`` returns them.
        """
        self._check_one_model(model)
        self._use_engine(Hosted(fabric.to_device(model), optimizer, self.recipe, **self._options))
        return fabric.setup(model, *self.engine.optimizers)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Remember the model to train. A model without trainable parameters only needs the recipe's context."""
        if any(p.requires_grad for p in module.parameters()) and not self._in_trainer:
            self._check_one_model(module)
            self._module = module
        return module

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Create the engine for a Trainer's model and optimizer. To evaluate, a Trainer passes no optimizer."""
        self._in_trainer = True
        if not optimizers:
            self._engine, self._module = None, model
            return model, optimizers, lr_schedulers
        if len(optimizers) > 1:
            raise UsageError(
                f"a recipe trains one model with one optimizer (parameter groups may differ), but configure_optimizers "
                f"returns {len(optimizers)}"
            )
        if self._engine is not None and optimizers[0] in self._engine.optimizers:  # to evaluate after training
            self._saved = self._engine.precision_state_dict()
        self._use_engine(Hosted(model, optimizers[0], self.recipe, **self._options))
        return model, self.engine.optimizers, lr_schedulers

    def forward_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward pass."""
        if self._engine is None and (self._in_trainer or self._module is None):
            return self._evaluation_context()
        return self.engine.forward()

    @contextlib.contextmanager
    def val_step_context(self) -> Iterator[None]:
        """Context manager for a step of a Trainer's evaluation: as in ``Engine.evaluating``."""
        engine = self._engine
        with self.forward_context(), contextlib.nullcontext() if engine is None else for_evaluation(engine.recipe):
            yield

    test_step_context = predict_step_context = val_step_context

    def convert_input(self, data: Any) -> Any:
        """Return the data unchanged: autocast casts."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Cast outputs to FP32, because under Fabric the loss is computed outside of the forward context."""
        apply = import_library("lightning_utilities.core.apply_func", "lightning").apply_to_collection
        return apply(data, Tensor, lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        return self._base.pre_backward(self, tensor, module) if self._in_trainer else tensor

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward through Lightning. Under a Trainer the first of ``args`` is the optimizer."""

        def run(scaled: Tensor) -> None:
            if self._in_trainer:
                self._base.backward(self, scaled, model, *args, **kwargs)  # calls the LightningModule
            else:
                scaled.backward(*args, **kwargs)

        self.engine.run_backward(tensor, run)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        return self._base.post_backward(self, tensor, module) if self._in_trainer else tensor

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Update the weights."""
        if kwargs:
            raise UsageError(f"optimizer.step takes no {next(iter(kwargs))} under a recipe")
        if not self._in_trainer:
            if closure is not None:
                raise UsageError("optimizer.step takes no closure under a recipe: call fabric.backward, then step")
            self._use_optimizer(optimizer)
            self.engine.step()
            return None
        result = closure() if closure is not None else None
        if result is None and model.automatic_optimization:  # training_step returned no loss
            self._base._after_closure(self, model, optimizer)
            return result
        self.engine.unscale()  # before clipping and the hooks that read gradients
        self._base._after_closure(self, model, optimizer)
        self.engine.step()
        return result

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale the gradients in place, before Fabric clips them."""
        self.engine.unscale()

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's precision state."""
        return self._engine.precision_state_dict() if self._engine is not None else dict(self._saved or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the precision state now, or when the engine is created."""
        if self._engine is not None:
            self._engine.load_precision_state_dict(state)
        else:
            self._saved = state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save split weights as the FP32 weights they represent. Loading splits them again."""
        if self._engine is not None and self._engine.lean and "state_dict" in checkpoint:
            checkpoint["state_dict"] |= full_precision(self._engine.inner, "cpu")

    def teardown(self) -> None:
        """Undo the engine's changes to the model, as Lightning moves it back to the CPU."""
        if self._engine is not None and self._in_trainer:
            remove_changes(self._engine.inner)

    def _use_engine(self, engine: Hosted, seen: bool = True) -> None:
        self._engine, self._module, self._optimizer_seen = engine, engine.inner, seen
        if self._saved:
            engine.load_precision_state_dict(self._saved)
        self._saved = None

    def _check_one_model(self, module: nn.Module) -> None:
        if self._module is not None and self._module is not module:
            raise UsageError(
                "a plugin's recipe trains one model, because it has one loss scale: put both into one nn.Module, or "
                "use one Fabric for each. For a model that is not trained, call requires_grad_(False) before setup"
            )

    def _use_optimizer(self, optimizer: Any) -> None:
        """Replace the placeholder by the optimizer that Fabric steps."""
        engine = self.engine
        if not self._optimizer_seen:
            engine.set_optimizer(optimizer)
            self._optimizer_seen = True
        if optimizer not in engine.optimizers:
            raise UsageError("a recipe trains one model with one optimizer, but another optimizer was stepped before")

    def _evaluation_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the recipe's context for a model that is not trained. Under FP8 its layers compute in BF16."""
        first = next(self._module.parameters(), None) if self._module is not None else None
        place = first.device if first is not None else torch.get_default_device()
        device = hardware.detect(str(place))
        recipe = parse(self.recipe, device)
        return StepContext(recipe, place, is_emulated(recipe, device)).forward()


def _refuse_lean_recipe(recipe: str | Recipe, module: nn.Module) -> None:
    device = hardware.detect(str(next(module.parameters()).device))
    parsed = parse(recipe, device)
    if (parsed.master, parsed.moments) != ("fp32", "fp32"):
        raise UsageError(
            f"recipe {recipe} replaces the optimizer, which Fabric does not pass to a plugin: call "
            "model, optimizer = plugin.setup(fabric, model, optimizer) instead of fabric.setup(model, optimizer)"
        )
