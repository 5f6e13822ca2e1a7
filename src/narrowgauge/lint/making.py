"""Rules about how scalers, autocasts and optimizers are made: their arguments, and names that are deprecated."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from narrowgauge.lint.names import (
    AUTOCASTS,
    DEPRECATED,
    DTYPES,
    LOSS_CLASSES,
    OPTIMIZER_EPS,
    SCALERS,
    is_optimizer,
)
from narrowgauge.lint.values import (
    Arguments,
    Autocast,
    Cast,
    Const,
    LossFunction,
    Module,
    Optimizer,
    Params,
    Ref,
    Scaler,
    Site,
    Value,
    heap,
)

if TYPE_CHECKING:
    from narrowgauge.lint.evaluate import Call, Evaluator

Handled = tuple[bool, Value | None]
"""Whether a rule knows a call, and what the call gives."""
MINE_NOT: Handled = (False, None)
SMALLEST_FP16 = 2.0**-25
"""What is smaller becomes 0 in FP16."""
_VERSIONS = ("hasattr", "version", "TORCH_")


class Making:
    """Looks at constructors."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.notebook = evaluator, evaluator.notebook
        self.optimizers: dict[Site, tuple[ast.Call, str, float | None]] = {}
        """Where each optimizer was made, its class and its eps."""

    def call(self, call: Call) -> Handled:
        name = call.name
        if not name:
            return MINE_NOT
        self.check_deprecated(name, call.node)
        if name in AUTOCASTS:
            return True, self._autocast(call)
        if name in SCALERS:
            return True, self._scaler(call)
        if is_optimizer(name):
            return True, self._optimizer(call)
        if name in LOSS_CLASSES:
            return True, LossFunction(name, call.arg(-1, "reduction") == Const("sum"))
        if name == "contextlib.nullcontext":
            return True, Ref("contextlib.nullcontext()")
        return self._framework(call)

    def check_deprecated(self, name: str, node: ast.AST) -> None:
        follower = self.evaluator.follower
        if name not in DEPRECATED or follower.compatible:
            return
        tests = [ast.unparse(test) for _, test in follower.guards]
        if any(word in test for test in tests for word in _VERSIONS):
            return
        self.notebook.judge("deprecated-amp", node, True, f"{name} is deprecated", f"{DEPRECATED[name]} in its place")

    def _autocast(self, call: Call) -> Autocast:
        old = call.name.startswith(("torch.cuda.amp", "torch.cpu.amp"))
        device: str | None = call.name.split(".")[1] if old else None
        if not old:
            given = call.arg(0, "device_type")
            device = str(given.value).split(":")[0] if isinstance(given, Const) else None
        first = call.arg(0)
        if old and isinstance(first, Ref) and first.name in DTYPES:
            self.notebook.judge(
                "autocast-argument",
                call.node,
                True,
                f"{first.name} is given for `enabled`, so the format is FP16 whatever it says",
                f"torch.autocast('{device}', dtype={first.name})",
            )
        dtype: str | None
        written = call.written(1, "dtype")
        if written is None:
            dtype = {"cuda": "fp16", "cpu": "bf16"}.get(device or "")
        else:
            known = call.arg(1, "dtype")
            dtype = DTYPES.get(known.name) if isinstance(known, Ref) else None
        enabled = call.written(0 if old else 2, "enabled")
        made = Autocast(dtype, device, _text(enabled))
        if "**" in call.keywords:
            made = Autocast(None, device, "**")
        self.notebook.autocasts.add(made)
        if made.active and dtype in ("fp16", "bf16"):
            self.notebook.formats.add(dtype)
        return made

    def _scaler(self, call: Call) -> Scaler:
        old = call.name.startswith(("torch.cuda.amp", "torch.cpu.amp"))
        place = 0 if old or "Sharded" in call.name or "narrowgauge" in call.name else 1
        enabled = call.written(place + 4, "enabled")
        text = "**" if "**" in call.keywords else _text(enabled)
        made = Scaler((call.node.lineno, call.node.col_offset), text)
        if text != "False":
            self.notebook.scalers[made.site] = call.node
            self._settings(call, place)
        return made

    def _settings(self, call: Call, place: int) -> None:
        start = call.arg(place, "init_scale")
        interval = call.arg(place + 3, "growth_interval")
        if isinstance(start, Const) and isinstance(start.value, bool):
            self.notebook.judge(
                "autocast-argument",
                call.node,
                True,
                f"{start.value} is given for `init_scale`, so the loss scale begins at {float(start.value):g}",
                f"enabled={start.value}",
            )
        elif isinstance(start, Const) and isinstance(start.value, int | float) and start.value <= 1:
            detail = f"the loss scale begins at {start.value:g}, which scales nothing"
            self.notebook.judge("scale-settings", call.node, True, detail)
        if isinstance(interval, Const) and isinstance(interval.value, int) and interval.value <= 10:
            detail = f"the scale doubles after every {interval.value} good steps, and each overflow skips one"
            self.notebook.judge("scale-settings", call.node, True, detail)

    def _optimizer(self, call: Call) -> Optimizer:
        kind = call.name.split(".")[-1]
        given = call.arg(0, "params")
        models = given.models if isinstance(given, Params) else ()
        made = Optimizer(self.evaluator.follower.site(call.node), kind, models)
        # The optimizer made here before may have had an engine; a model that gets a new one may have left its own.
        for site in (made.site, *models):
            call.state.bind(heap(site, "!engine"), None)
        eps, known = OPTIMIZER_EPS[kind], call.arg(-1, "eps")
        if eps is not None and call.written(-1, "eps") is not None:
            eps = float(known.value) if isinstance(known, Const) and isinstance(known.value, int | float) else None
        elif len(call.args) > 2:
            eps = None  # it may be among those given by place
        self.optimizers[made.site] = (call.node, kind, eps)
        self.evaluator.casts.trained(made, call.state, "make")
        return made

    def _framework(self, call: Call) -> Handled:
        """Trainers of Lightning and transformers: only whether 16 bits alone are asked for."""
        library, kind = call.name.split(".")[0], call.name.split(".")[-1]
        if library in ("lightning", "pytorch_lightning", "lightning_fabric") and kind in ("Trainer", "Fabric"):
            precision = call.arg(-1, "precision")
            if isinstance(precision, Const) and precision.value in ("bf16-true", "16-true"):
                bits = "BF16" if precision.value == "bf16-true" else "FP16"
                self.evaluator.follower.event("true-precision", call.node, text=f"{precision.value}: {bits}")
            return True, None
        if library == "transformers" and kind.endswith("TrainingArguments"):
            mixed = [kind for kind in ("bf16", "fp16") if call.arg(-1, kind) == Const(True)]
            return True, Arguments(mixed[0]) if mixed else None
        if library == "transformers" and kind.endswith("Trainer"):
            model, arguments = call.arg(0, "model"), call.arg(1, "args")
            cast = call.state.env.get(heap(model.site, "!cast")) if isinstance(model, Module) else None
            if isinstance(cast, Cast) and isinstance(arguments, Arguments) and cast.dtype in ("fp16", "bf16"):
                self.notebook.judge(
                    "bf16-true",
                    cast.node,
                    True,
                    f"the model is loaded in {cast.dtype.upper()}, and {arguments.mixed}=True in the TrainingArguments "
                    "makes it mixed only where parameters are FP32",
                    "load it in torch.float32: the Trainer casts for the products itself",
                )
            return True, None
        return MINE_NOT


def _text(node: ast.expr | None) -> str:
    """The condition under which something is on; empty for always."""
    text = "" if node is None else ast.unparse(node)
    return "" if text == "True" else text
