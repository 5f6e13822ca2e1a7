"""Rules about parameters in 16 bits: optimizers that update them, norms, epsilons, scalers, pure 16-bit training."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.lint.detector import Detector, ModelCheck, TrainingSetup, more_like_it
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.constructors import LIGHTNING
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.modules import casts_of
from narrowgauge.lint.interpreter.names import OPTIMIZER_EPS, is_optimizer, words
from narrowgauge.lint.interpreter.observer import Operand
from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.syntax import dotted
from narrowgauge.lint.interpreter.values import (
    Arguments,
    Cast,
    Class,
    Const,
    Module,
    Optimizer,
    Ref,
    Scaler,
    Seq,
    Site,
    Tensor,
    Value,
    heap,
)
from narrowgauge.lint.rule import Rule
from narrowgauge.lint.verdicts import Verdicts

STATES_16BIT = Rule(
    name="states-16bit",
    severity=SERIOUS,
    about="an optimizer updates 16-bit parameters, without FP32 master weights",
    why="its states have the format of the parameters, and an update smaller than half a step of a 16-bit weight (0.2% "
    "of it in BF16, 0.02% in FP16) is rounded away: learning slows down and stops early",
    fix="keep parameters in FP32 under torch.autocast, or use an optimizer with master weights "
    "(narrowgauge's recipe bf16-lean: BF16 weights with exact FP32 masters, at 8 bytes per parameter)",
)
HALF_PARAMETERS = Rule(
    name="half-parameters",
    severity=SERIOUS,
    about="a parameter is in 16 bits before training begins",
    why="the FP32 master weights are already lost: narrowgauge refuses to train it",
    fix="create the model in FP32, or call model.float() before creating the optimizer; the recipe does the rest",
)
HALF_WITH_SCALER = Rule(
    name="half-with-scaler",
    severity=SERIOUS,
    about="a GradScaler steps a model whose parameters are FP16",
    why="it raises ValueError: Attempting to unscale FP16 gradients",
    fix="remove the cast of the model: keep the parameters in FP32 and let torch.autocast cast the operations that "
    "gain from it",
)
HALF_NORMS = Rule(
    name="half-norms",
    severity=WARNING,
    about="a normalization layer is cast to FP16",
    why="running statistics and variances of large activations overflow at 65,504, and small contributions are lost",
    fix="keep norms in FP32: torch.autocast does, or call .float() on them after the cast",
)
EPS_BELOW_FORMAT = Rule(
    name="eps-below-format",
    severity=SERIOUS,
    about="an epsilon that the format rounds to zero",
    why="the smallest FP16 number is 6e-8, so 1e-8 becomes 0, and a division by 0 + eps gives inf or NaN (Adam's first "
    "step of an unused weight)",
    fix="keep it in FP32, or use an eps of at least 1e-4 in FP16",
)
BF16_TRUE = Rule(
    name="bf16-true",
    severity=WARNING,
    about="pure 16-bit training, where mixed precision may be intended",
    why="weights, gradients and optimizer states are all in 16 bits, and small updates are rounded away",
    fix="use mixed precision: precision='bf16-mixed', or FP32 weights with bf16=True",
)
SMALLEST_FP16 = 2.0**-25
"""Numbers below this become 0 in FP16."""
NORMS = frozenset(
    f"torch.nn.{name}"
    for name in words(
        "LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm LazyBatchNorm1d LazyBatchNorm2d "
        "LazyBatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d"
    )
)
WITH_NORMS = ("torch.nn.Transformer", "torchvision.models.resnet", "torchvision.models.efficientnet",
              "torchvision.models.mobilenet", "torchvision.models.densenet", "torchvision.models.convnext",
              "torchvision.models.vit", "torchvision.models.swin", "torchvision.models.regnet",
              "torchvision.models.resnext", "torchvision.models.wide_resnet", "transformers.")  # fmt: skip
"""Prefixes of names of library models that contain norms."""
_NORM_NAMES = ("norm", "bn", "ln")


class TrainedFormats(Detector):
    """Checks the format of parameters where an optimizer is created, and at each of its steps.

    Both are judged separately, because the model may be cast in between. If only some paths cast it, it is an option.
    """

    def __init__(self, context: Context, verdicts: Verdicts) -> None:
        super().__init__(context, verdicts)
        self._eps: dict[Site, float | None] = {}
        """The eps of each optimizer; None if it has none or it is unknown."""
        self._consequences: dict[tuple[ast.AST, str], tuple[Rule, ast.AST, str]] = {}
        """What else is wrong if an optimizer, by the call that creates it, updates 16-bit parameters."""

    def on_result(self, call: Call, value: Value | None) -> None:
        if is_optimizer(call.name) and isinstance(value, Optimizer):
            self._eps[value.site] = _eps_of(call)
            self._check(value, call.state, "create")
            given, eps = call.arg(0, "params"), self._eps[value.site]
            tensors = given.items if isinstance(given, Seq) else ()
            is_half = any(isinstance(one, Tensor) and one.dtype == "fp16" for one in tensors)
            if is_half and eps is not None and eps < SMALLEST_FP16:
                detail = f"eps={eps:g} of {value.name} is 0 in FP16, the format of the tensor that it updates"
                self.judge(EPS_BELOW_FORMAT, call.node, True, detail)

    def on_optimizer_step(self, call: Call, optimizer: Optimizer) -> None:
        self._check(optimizer, call.state, "step")

    def on_scaler_step(self, call: Call, scaler: Scaler, optimizer: Site) -> None:
        given = call.arg(0, "optimizer")
        if isinstance(given, Optimizer):
            self._check(given, call.state, "step")
            casts = casts_of(given, call.state) or self._casts_of_layers(given, call.state)
            half = [cast for _, cast in casts if cast.dtype == "fp16"]
            detail = f"the parameters were cast to FP16 in line {getattr(half[0].node, 'lineno', 0)}" if half else ""
            always = scaler.enabled == "" and scaler.sure and not self.context.guards
            self.verdicts.judge(HALF_WITH_SCALER, call.node, bool(half), detail, certain=always)

    def _casts_of_layers(self, optimizer: Optimizer, state: State) -> list[tuple[Site, Cast]]:
        """Return the casts of single layers of the models that an optimizer updates, if the script freezes none."""
        if {"requires_grad", "requires_grad_"} & self.context.words:
            return []
        owners = tuple(heap(site, "") for site in optimizer.models)
        layers = [value for key, value in state.env.items() if owners and key.startswith(owners)]
        casts = [(one.site, state.env.get(heap(one.site, "!cast"))) for one in layers if isinstance(one, Module)]
        return [(site, cast) for site, cast in casts if isinstance(cast, Cast)]

    def _check(self, optimizer: Optimizer, state: State, when: str) -> None:
        node = self.observations.optimizers.get(optimizer.site)
        if node is None or not optimizer.models or self.context.is_in_test:
            return
        casts = casts_of(optimizer, state)
        if not casts:
            self.verdicts.judge(STATES_16BIT, node, False, when=when)
            return
        site, cast = casts[0]
        kind, bits, line = optimizer.name, cast.dtype.upper(), getattr(cast.node, "lineno", 0)
        what = "weights" if kind == "SGD" else "weights and states"
        detail = f"{kind} gets parameters that line {line} casts to {bits}: its {what} are {bits}"
        self.verdicts.judge(STATES_16BIT, node, True, detail, when=when)
        if cast.dtype == "fp16":
            self._add_consequences(node, optimizer, site, cast, state)

    def _add_consequences(self, node: ast.Call, optimizer: Optimizer, site: Site, cast: Cast, state: State) -> None:
        eps = self._eps.get(optimizer.site)
        if eps is not None and eps < SMALLEST_FP16:
            line = getattr(cast.node, "lineno", 0)
            detail = f"eps={eps:g} of {optimizer.name} is 0 in FP16, the format of its parameters (line {line})"
            self._consequences[node, "eps"] = (EPS_BELOW_FORMAT, node, detail)
        module = next((one for one in state.env.values() if isinstance(one, Module) and one.site == site), None)
        if module is not None and self._has_norms(module, state, set()):
            detail = f"{module.name.split('.')[-1] or 'the model'} has norms, and all of it is cast to FP16"
            self._consequences[node, "norms"] = (HALF_NORMS, cast.node, detail)

    def on_end(self) -> None:
        if "FullyShardedDataParallelPlugin" in self.context.words:  # Accelerate shards FP32 copies of the parameters
            self.verdicts.clear(STATES_16BIT)
        certain = {verdict.node for verdict in self.verdicts.are_bad(STATES_16BIT)}
        for (optimizer, _), (rule, node, detail) in self._consequences.items():
            if optimizer in certain:
                self.judge(rule, node, True, detail)

    def _has_norms(self, module: Module, state: State, seen: set[str]) -> bool:
        if module.name in NORMS or module.name.startswith(WITH_NORMS):
            return True
        if any(isinstance(part, Module) and self._has_norms(part, state, seen) for part in module.parts):
            return True
        return module.definition is not None and self._defines_norms(module.definition, state, seen)

    def _defines_norms(self, definition: ast.ClassDef, state: State, seen: set[str]) -> bool:
        """Return whether a class creates norms, or modules of the script that do."""
        if definition.name in seen:
            return False
        seen.add(definition.name)
        for node in ast.walk(definition):
            if not isinstance(node, ast.Call) or dotted(node.func) is None:
                continue
            value = self.context.value(node.func, state)
            if isinstance(value, Ref) and (value.name in NORMS or value.name.startswith("torch.nn.Transformer")):
                return True
            if isinstance(value, Class) and self._defines_norms(value.node, state, seen):
                return True
        return False


def _eps_of(call: Call) -> float | None:
    """Return the eps of the optimizer that a call creates; None if it has none or it is unknown."""
    default, known = OPTIMIZER_EPS[call.name.split(".")[-1]], call.arg(-1, "eps")
    if default is not None and call.written(-1, "eps") is not None:
        return float(known.value) if isinstance(known, Const) and isinstance(known.value, int | float) else None
    return None if len(call.args) > 2 else default  # it may be a positional argument


class HalfNorms(Detector):
    """Checks casts of single norms; must come after ``TrainedFormats``, whose verdicts it may clear."""

    def on_cast(self, call: Call, dtype: str) -> None:
        part = (dotted(call.receiver_node) if call.receiver_node else None) or ""
        kind = None
        if isinstance(call.receiver, Module):
            kind = call.receiver.name if call.receiver.name in NORMS else None
        else:
            for _, test in self.context.guards if part and dtype in ("fp16", "fp32") else ():
                kind = self._norm_in_test(test, part, call.state) or kind
            if kind and dtype == "fp32":
                self.context.event("norms-kept", call.node)
        if kind and dtype == "fp16":
            self.judge(HALF_NORMS, call.node, True, f"{kind.split('.')[-1]} is cast to FP16")
        is_tensor = call.receiver is not None and not isinstance(call.receiver, Module)
        if dtype == "fp32" and "." in part and not is_tensor and part.split(".")[-1].lower().startswith(_NORM_NAMES):
            self.context.event("norms-kept", call.node)

    def _norm_in_test(self, test: ast.expr, part: str, state: State) -> str | None:
        """Return the norm that a condition ``isinstance(part, ...)`` names."""
        for node in ast.walk(test):
            if isinstance(node, ast.Call) and dotted(node.func) == "isinstance" and len(node.args) == 2:
                if dotted(node.args[0]) != part:
                    continue
                for inner in ast.walk(node.args[1]):
                    value = self.context.value(inner, state) if isinstance(inner, ast.Attribute | ast.Name) else None
                    if isinstance(value, Ref) and value.name in NORMS:
                        return value.name
        return None

    def on_end(self) -> None:
        trains = self.observations.of("backward", "step", "scaler-step")
        if self.observations.of("norms-kept") or not trains:
            self.verdicts.clear(HALF_NORMS)


class EpsInFp16(Detector):
    """Checks epsilons that are added to FP16 tensors."""

    def on_binary(self, node: ast.BinOp, left: Value | None, right: Value | None) -> None:
        if not isinstance(node.op, ast.Add) or not isinstance(left, Tensor) or not left.is_fp16:
            return
        if isinstance(right, Const) and isinstance(right.value, float) and 0 < right.value < SMALLEST_FP16:
            detail = f"{right.value:g} is added to a tensor in FP16, where it is 0"
            self.judge(EPS_BELOW_FORMAT, node, True, detail)

    def on_operation(self, call: Call, op: str, operands: list[Operand]) -> None:
        given = operands[0][1]
        if op not in ("clamp", "clamp_", "clamp_min", "clip") or not isinstance(given, Tensor) or not given.is_fp16:
            return
        least = call.keywords.get("min") or (operands[1][1] if len(operands) > 1 else None)
        if isinstance(least, Const) and isinstance(least.value, float) and 0 < least.value < SMALLEST_FP16:
            detail = f"a tensor in FP16 is clamped to at least {least.value:g}, which is 0 in FP16"
            self.judge(EPS_BELOW_FORMAT, call.node, True, detail)


class PureBf16(Detector):
    """Checks the precision of Lightning's and transformers' trainers."""

    def on_call(self, call: Call) -> None:
        library, kind = call.name.split(".")[0], call.name.split(".")[-1]
        if library in LIGHTNING and kind in ("Trainer", "Fabric"):
            precision = call.arg(-1, "precision")
            strategy = call.written(-1, "strategy")
            has_masters = strategy is not None and "deepspeed" in ast.unparse(strategy).lower()
            text = str(precision.value) if isinstance(precision, Const) else ""
            is_true = text in ("bf16-true", "16-true") and not self.context.is_in_test
            if is_true and not has_masters and _may_train(call.node, self.context.scopes[-1]):
                self.context.event("true-precision", call.node, text=text)
        elif library == "transformers" and kind.endswith("Trainer"):
            self._check_trainer(call)

    def _check_trainer(self, call: Call) -> None:
        model, arguments = call.arg(0, "model"), call.arg(1, "args")
        cast = call.state.env.get(heap(model.site, "!cast")) if isinstance(model, Module) else None
        if isinstance(cast, Cast) and isinstance(arguments, Arguments) and cast.dtype in ("fp16", "bf16"):
            detail = (
                f"the model is loaded in {cast.dtype.upper()}, and {arguments.mixed}=True in the TrainingArguments "
                "needs FP32 parameters for mixed precision"
            )
            fix = "load it in torch.float32: the Trainer casts for the matrix products itself"
            if cast.dtype == arguments.mixed == "fp16":  # the Trainer's scaler refuses FP16 gradients
                self.judge(HALF_WITH_SCALER, cast.node, True, detail, fix)
                return
            self.judge(BF16_TRUE, cast.node, True, detail, fix)

    def on_end(self) -> None:
        if "train" not in self.context.words or "deepspeed" in self.context.libraries:
            self.verdicts.clear(BF16_TRUE)
        if not {"fit", "backward"} & self.context.words:
            return
        for event in self.observations.of("true-precision"):
            bits, mixed = ("BF16", "bf16-mixed") if event.text == "bf16-true" else ("FP16", "16-mixed")
            detail = f"precision='{event.text}' trains in {bits} alone, without FP32 weights"
            self.judge(BF16_TRUE, event.node, True, detail, f"precision='{mixed}'")


def _may_train(created: ast.Call, scope: ast.AST) -> bool:
    """Return whether a Trainer or Fabric trains where it is created, or is passed on to code that may."""
    nodes = list(ast.walk(scope))
    targets = [node.targets[0] for node in nodes if isinstance(node, ast.Assign) and node.value is created]
    if not targets or not isinstance(targets[0], ast.Name):
        return True
    name = targets[0].id
    launched = {node.func for node in nodes if isinstance(node, ast.Call) and node.args}  # fabric.launch(function)
    methods: dict[ast.expr, ast.Attribute] = {node.value: node for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            used = methods.get(node)
            if used is None or used.attr in ("fit", "backward") or (used.attr == "launch" and used in launched):
                return True
    return False


class ModelFormats(ModelCheck):
    """Checks the formats of a model's parameters and of its optimizer's eps."""

    def check(self, setup: TrainingSetup) -> Iterator[Finding]:
        import torch

        from narrowgauge.optim.masters import has_master

        halves = {torch.float16: "FP16", torch.bfloat16: "BF16"}
        narrow = [
            (name, parameter)
            for name, parameter in setup.model.named_parameters()
            if parameter.requires_grad and parameter.dtype in halves and not has_master(parameter)
        ]
        if narrow:
            name, first = narrow[0]
            yield HALF_PARAMETERS.finding(name, f"{name} is {halves[first.dtype]}{more_like_it(len(narrow))}")
        norms = [
            (path, type(module).__name__)
            for path, module in setup.model.named_modules()
            if "Norm" in type(module).__name__
            and any(one.dtype is torch.float16 for one in (*module.parameters(False), *module.buffers(False)))
        ]
        if norms:
            path, kind = norms[0]
            yield HALF_NORMS.finding(path, f"{kind} {path} has FP16 tensors{more_like_it(len(norms))}")
        for number, group in enumerate(setup.optimizer.param_groups if setup.optimizer is not None else ()):
            eps = group.get("eps")
            half = [one for one in group["params"] if one.dtype is torch.float16 and one.requires_grad]
            if isinstance(eps, float) and half and eps < SMALLEST_FP16:
                kind = type(setup.optimizer).__name__
                detail = f"eps={eps:g} of {kind} is 0 in FP16, the format of {len(half)} of its parameters"
                yield EPS_BELOW_FORMAT.finding(f"optimizer group {number}", detail)


class RecipeStates(ModelCheck):
    """Checks the formats of weights and moments in a recipe."""

    def check(self, setup: TrainingSetup) -> Iterator[Finding]:
        recipe = setup.recipe
        where = f"recipe {recipe}"
        if recipe.master == "none":
            detail = "master=none: BF16 weights without FP32 masters"
            yield STATES_16BIT.finding(where, detail, "master=split", WARNING)
        if recipe.moments == "bf16":
            detail = "moments=bf16: the second moment changes by 0.1% per step at beta2=0.999, less than BF16's spacing"
            fix = "moments=8bit, which is smaller and has scales, or moments=fp32"
            yield STATES_16BIT.finding(where, detail, fix, WARNING)
