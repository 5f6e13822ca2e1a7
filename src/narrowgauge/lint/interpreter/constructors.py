"""Calls that create objects: autocasts, scalers, optimizers, loss modules and training arguments."""

from __future__ import annotations

import ast

from narrowgauge.lint.interpreter.call import NOT_HANDLED, Call, Handled
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.modules import note_trained_format
from narrowgauge.lint.interpreter.names import AUTOCASTS, CLIPS, DTYPES, LOSS_CLASSES, SCALERS, is_optimizer
from narrowgauge.lint.interpreter.values import (
    Arguments,
    Autocast,
    Const,
    LossFunction,
    Optimizer,
    Params,
    Ref,
    Scaler,
    Scheduler,
    heap,
)

_CLIPS = frozenset(Ref(name) for name in CLIPS)
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


class Constructors:
    """Handles constructors."""

    def __init__(self, context: Context) -> None:
        self.context, self.observations = context, context.observations

    def call(self, call: Call) -> Handled:
        """Return the created object, if the call is a known constructor."""
        name = call.name
        if not name:
            return NOT_HANDLED
        if name in AUTOCASTS:
            return True, self._autocast(call)
        if name in SCALERS:
            return True, self._scaler(call)
        if is_optimizer(name):
            return True, self._optimizer(call)
        if name in LOSS_CLASSES:
            return True, LossFunction(name, call.arg(-1, "reduction") == Const("sum"))
        if name.startswith("torch.optim.lr_scheduler.") and not name.endswith("ReduceLROnPlateau"):
            return True, Scheduler()
        given = call.arg(0)
        if name == "torch.finfo" and isinstance(given, Ref):
            return True, Ref(f"torch.finfo({DTYPES.get(given.name)})")
        if name == "functools.partial" and isinstance(given, Ref) and given in _CLIPS:
            return True, given
        if name == "contextlib.nullcontext":
            return True, Ref("contextlib.nullcontext()")
        return self._framework(call)

    def _autocast(self, call: Call) -> Autocast:
        old = is_old_amp(call)
        device: str | None = call.name.split(".")[1] if old else None
        if not old:
            given = call.arg(0, "device_type")
            device = str(given.value).split(":")[0] if isinstance(given, Const) else None
        dtype: str | None
        written = call.written(1, "dtype")
        if written is None:
            # A device that the script chooses at run time may be a GPU, where the default is FP16.
            dtype = {"cuda": "fp16", "cpu": "bf16", None: "fp16"}.get(device)
        else:
            known = call.arg(1, "dtype")
            dtype = DTYPES.get(known.name) if isinstance(known, Ref) else None
        enabled = call.written(0 if old else 2, "enabled")
        made = Autocast(dtype, device, _condition(enabled))
        if "**" in call.keywords:
            made = Autocast(None, device, "**")
        self.observations.autocasts.add(made)
        if made.active and dtype in ("fp16", "bf16"):
            self.observations.formats.add(dtype)
        return made

    def _scaler(self, call: Call) -> Scaler:
        enabled = call.written(init_scale_position(call) + 4, "enabled")
        text = "**" if "**" in call.keywords else _condition(enabled)
        made = Scaler((call.node.lineno, call.node.col_offset), text)
        if text != "False":
            self.observations.scalers[made.site] = call.node
        return made

    def _optimizer(self, call: Call) -> Optimizer:
        given = call.arg(0, "params")
        models = given.models if isinstance(given, Params) else ()
        made = Optimizer(self.context.site(call.node), call.name.split(".")[-1], models)
        # An optimizer created here before may belong to an engine; a model with a new one may have left its engine.
        for site in (made.site, *models):
            call.state.bind(heap(site, "!engine"), None)
        self.observations.optimizers[made.site] = call.node
        note_trained_format(self.context, made, call.state)
        return made

    def _framework(self, call: Call) -> Handled:
        """Handle trainers of Lightning and transformers, which run the training step themselves."""
        library, kind = call.name.split(".")[0], call.name.split(".")[-1]
        if library in LIGHTNING and kind in ("Trainer", "Fabric"):
            return True, None
        if library == "transformers" and kind.endswith("TrainingArguments"):
            mixed = [kind for kind in ("bf16", "fp16") if call.arg(-1, kind) == Const(True)]
            # DeepSpeed keeps FP32 master weights.
            return True, Arguments(mixed[0]) if mixed and call.written(-1, "deepspeed") is None else None
        if library == "transformers" and kind.endswith("Trainer"):
            return True, None
        return NOT_HANDLED


def is_old_amp(call: Call) -> bool:
    """Return whether a class is the deprecated one of torch.cuda.amp or torch.cpu.amp, without a device argument."""
    return call.name.startswith(("torch.cuda.amp", "torch.cpu.amp"))


def init_scale_position(call: Call) -> int:
    """Return the position of a scaler's first argument after the device."""
    return 0 if is_old_amp(call) or "Sharded" in call.name or "narrowgauge" in call.name else 1


def _condition(node: ast.expr | None) -> str:
    """Return the condition under which something is enabled; empty for always."""
    text = "" if node is None else ast.unparse(node)
    return "" if text == "True" else text
