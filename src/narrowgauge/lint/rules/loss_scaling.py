"""Rules about loss scaling: where it is missing, where it is not needed, its settings, and its checkpoint."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from narrowgauge.findings import NOTE, SERIOUS, WARNING, Finding
from narrowgauge.lint.detector import Detector, ModelCheck, TrainingSetup
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.constructors import init_scale_position
from narrowgauge.lint.interpreter.names import SCALERS
from narrowgauge.lint.interpreter.syntax import dotted, nodes_of
from narrowgauge.lint.interpreter.values import Const, Scaler, Tensor, Value
from narrowgauge.lint.rule import PYTORCH, Rule

SCALER_WITH_BF16 = Rule(
    name="scaler-with-bf16",
    severity=WARNING,
    about="a GradScaler scales a loss that was computed in BF16",
    why="BF16 has FP32's range, so scaling is not needed; the scaler costs a pass over all gradients and a GPU "
    "synchronization per step",
    fix="remove the scaler: loss.backward(), optimizer.step()",
)
FP16_WITHOUT_SCALER = Rule(
    name="fp16-without-scaler",
    severity=SERIOUS,
    about="backward runs on an FP16 loss without a loss scale",
    why="gradients below 6e-8 become zero in FP16, and layers stop learning without an error",
    fix="scale the loss with torch.amp.GradScaler('cuda'), or use dtype=torch.bfloat16, which needs no scale",
    url=f"{PYTORCH}/amp.html#gradient-scaling",
)
SCALE_SETTINGS = Rule(
    name="scale-settings",
    severity=WARNING,
    about="settings of the loss scale that have no effect or cause overflows",
    why="a scale of 1 does nothing: gradients underflow until it has grown, which takes 2,000 steps per doubling; a "
    "scale that grows every few steps overflows and skips steps just as often",
    fix="keep the defaults (init_scale=65536, growth_interval=2000): a scale that is too high is corrected within "
    "seconds",
    url=f"{PYTORCH}/amp.html#gradient-scaling",
)
FOUND_INF_TRUTHY = Rule(
    name="found-inf-truthy",
    severity=WARNING,
    about="_found_inf_per_device returns a dictionary, which is true whether or not there was an inf",
    why="every step counts as skipped",
    fix="compare the scale: before = scaler.get_scale(); scaler.update(); skipped = scaler.get_scale() < before",
)
SCALER_NOT_SAVED = Rule(
    name="scaler-not-saved",
    severity=NOTE,
    about="the checkpoint contains the optimizer but not the loss scale",
    why="a resumed run starts at 65,536 again, and skips steps until the scale has come down to its earlier value",
    fix="save scaler.state_dict() together with the optimizer's, and load it",
)
FRAMEWORKS = frozenset({
    "lightning", "pytorch_lightning", "colossalai", "fairscale", "ignite", "narrowgauge", "composer", "torchtune",
    "megatron",
})  # fmt: skip
"""Libraries that run the training loop and scale the loss themselves."""
_ENGINES = ("deepspeed.initialize", "deepspeed.init_inference", "apex.amp.scale_loss", "apex.fp16_utils.FP16_Optimizer")
"""Calls after which another object scales the loss."""
_SCALING = frozenset({"scale", "step", "unscale_", "backward", "scale_loss"})
_SCALER_NAME = re.compile(r"(?<!up)(?<!down)(?<!standard)(?<!minmax)(?<!robust)scaler", re.IGNORECASE)


class ScalerWithBf16(Detector):
    """Checks the format of every loss that is scaled."""

    def on_scale(self, call: Call, scaler: Scaler) -> None:
        if scaler.enabled == "False":
            return
        tensor = call.arg(0)
        place = self.observations.scalers.get(scaler.site, call.node)
        under = tensor.under if isinstance(tensor, Tensor) else None
        if under is None:
            self.context.event("scale-unknown", call.node, scaler=scaler.site, text=scaler.enabled)
        else:
            is_bad = under.dtype == "bf16" and scaler.enabled in ("", under.enabled)
            detail = f"the loss that is scaled in line {call.node.lineno} was computed under autocast in BF16"
            self.judge(SCALER_WITH_BF16, place, is_bad, detail)

    def on_end(self) -> None:
        """Judge scaled losses of unknown origin: all autocasts of the script are in BF16."""
        active = [cast for cast in self.observations.autocasts if cast.active]
        if not active or any(cast.dtype != "bf16" for cast in active):
            return
        for event in self.observations.of("scale-unknown"):
            place = self.observations.scalers.get(event.scaler) if event.scaler is not None else None
            if place is not None and all(event.text in ("", cast.enabled) for cast in active):
                detail = "every autocast in the script is in BF16, and the loss is scaled"
                self.judge(SCALER_WITH_BF16, place, True, detail)


class Fp16WithoutScaler(Detector):
    """Checks the format of every loss on which backward runs unscaled."""

    _scales = False

    def on_backward(self, call: Call, loss: Tensor | None) -> None:
        if loss is not None and loss.scaler is not None:
            return
        under = loss.under if loss else None
        is_fp16 = under is not None and under.dtype == "fp16" and under.enabled != "**"
        is_bad = is_fp16 and loss is not None and not loss.multiplied
        if under is None:
            return  # not under autocast, or unknown
        detail = "the loss was computed under autocast in FP16, and backward() is called on it unscaled"
        self.judge(FP16_WITHOUT_SCALER, call.node, is_bad, detail)

    def on_call(self, call: Call) -> None:
        if call.name in _ENGINES or call.method == "scale_loss":
            self._scales = True

    def on_end(self) -> None:
        """Withdraw the verdicts if the script really scales a loss somewhere, or passes it on to a library."""
        seen = self.observations
        if not self.verdicts.are_bad(FP16_WITHOUT_SCALER):
            return
        elsewhere = any(event.text == "elsewhere" for event in seen.of("backward"))
        used = seen.of("scale", "scaler-step") or seen.escaped or elsewhere or self._scales
        if used or self.context.libraries & FRAMEWORKS or self._uses_own_scaler() or not seen.of("step"):
            self.verdicts.clear(FP16_WITHOUT_SCALER)

    def _uses_own_scaler(self) -> bool:
        """Return whether a scaler of another file is used: ``loss_scaler(loss, optimizer)``, ``scaler.scale(loss)``."""
        for node in nodes_of(self.context.tree):
            if not isinstance(node, ast.Call) or not (node.args or node.keywords):
                continue
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            scales = owner is not None and getattr(node.func, "attr", "") in _SCALING
            if scales and owner is not None and _SCALER_NAME.search((dotted(owner) or "").split(".")[-1]):
                return True
            name = (dotted(node.func) or "").split(".")[-1]
            given = " ".join(ast.unparse(arg) for arg in node.args[:1])
            if _SCALER_NAME.search(name) and not name[:1].isupper() and "loss" in given.lower():
                return True
        return False


class ScaleSettings(Detector):
    """Checks the arguments of scalers, unless the script replaces them.

    ``update(new_scale)`` sets the scale by hand. Loading a checkpoint into the scaler replaces all settings; under a
    condition (``if resume:``) only those of resumed runs.
    """

    _is_set_by_hand = False

    def on_call(self, call: Call) -> None:
        name = call.method or call.name.split(".")[-1] or (dotted(call.node.func) or "")
        if "load" in name.split("_") and not self.context.guards:
            given = (call.receiver, *call.values)
            places = [self.observations.scalers.get(value.site) for value in given if isinstance(value, Scaler)]
            for place in (place for place in places if place is not None):
                self.judge(SCALE_SETTINGS, place, False)

    def on_result(self, call: Call, value: Value | None) -> None:
        if call.name not in SCALERS or not isinstance(value, Scaler) or value.enabled == "False":
            return
        place = init_scale_position(call)
        start, interval = call.arg(place, "init_scale"), call.arg(place + 3, "growth_interval")
        first = start.value if isinstance(start, Const) else None
        if isinstance(first, int | float) and not isinstance(first, bool) and first <= 1:
            detail = f"the loss scale starts at {first:g}, which scales nothing"
            self.judge(SCALE_SETTINGS, call.node, True, detail)
        if isinstance(interval, Const) and isinstance(interval.value, int) and interval.value <= 10:
            detail = f"the scale doubles after every {interval.value} good steps, and each overflow skips one"
            self.judge(SCALE_SETTINGS, call.node, True, detail)

    def on_scaler_update(self, call: Call, scaler: Scaler) -> None:
        if call.node.args or call.node.keywords:
            self._is_set_by_hand = True

    def on_end(self) -> None:
        if self._is_set_by_hand:
            self.verdicts.clear(SCALE_SETTINGS)


class FoundInfTruthy(Detector):
    """Checks conditions on GradScaler's private dictionaries."""

    def on_end(self) -> None:
        for node in nodes_of(self.context.tree):
            if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
                test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
                asked = test.func.attr if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) else ""
                if asked in ("_found_inf_per_device", "_check_inf_per_device"):
                    self.judge(FOUND_INF_TRUTHY, test, True, f"{asked}(...) is used as a condition")


class ScalerNotSaved(Detector):
    """Checks that the scaler is saved where the optimizer is.

    A state that goes straight into ``load_state_dict`` is copied to another optimizer and not saved.
    """

    def on_end(self) -> None:
        seen = self.observations
        if not seen.of("optimizer-state"):
            return
        calls = [node for node in nodes_of(self.context.tree) if isinstance(node, ast.Call)]
        loads = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict"]
        copied = {argument for node in loads for argument in node.args}
        saved = [event for event in seen.of("optimizer-state") if event.node not in copied]
        used = {event.scaler for event in seen.of("scale")}
        if saved and used and not seen.of("scaler-state") and not (used & seen.escaped):
            self.judge(SCALER_NOT_SAVED, saved[0].node, True, "optimizer.state_dict() is saved, the scaler's is not")


class RecipeScale(ModelCheck):
    """Checks the loss scale of a recipe."""

    def check(self, setup: TrainingSetup) -> Iterator[Finding]:
        recipe = setup.recipe
        where, scale = f"recipe {recipe}", recipe.loss_scale
        if recipe.compute == "fp16" and scale == "none":
            detail = "matrix products run in FP16, and loss_scale=none"
            yield FP16_WITHOUT_SCALER.finding(where, detail, "loss_scale=dynamic")
        if isinstance(scale, int | float) and scale <= 1:
            yield SCALE_SETTINGS.finding(where, f"loss_scale={scale:g} scales nothing", "loss_scale=dynamic")
