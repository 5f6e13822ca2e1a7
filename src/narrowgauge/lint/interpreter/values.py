"""The values that the interpreter knows: enough to follow scalers, optimizers, models and losses by name.

None stands for every other value. Values are frozen and compare by content, so that two paths through a script that end
with the same values can be merged. A site identifies an object: where it was created (line, column, then line and
column of each call that led there, so that two models from one factory differ), or its name if other code created it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

Site = tuple[int, ...] | str


@dataclass(frozen=True)
class Value:
    """A known value."""


OPAQUE = Value()
"""The value of a local name of which nothing is known; it hides an outer name."""


@dataclass(frozen=True)
class Ref(Value):
    """An imported object, by its full name."""

    name: str


@dataclass(frozen=True)
class Const(Value):
    """A literal."""

    value: object


@dataclass(frozen=True)
class Condition(Value):
    """The result of a comparison."""

    test: ast.expr


@dataclass(frozen=True)
class Seq(Value):
    """A tuple or list display."""

    items: tuple[Value | None, ...]


@dataclass(frozen=True)
class Scaler(Value):
    """A gradient scaler."""

    site: Site
    enabled: str = ""
    """Empty: always. Otherwise the text of the expression for ``enabled``."""
    sure: bool = True
    """False if the name may be None instead."""


@dataclass(frozen=True)
class Autocast(Value):
    """A context manager or decorator of autocast."""

    dtype: str | None
    """fp16, bf16, or None if the script does not determine it."""
    device: str | None
    enabled: str = ""

    @property
    def active(self) -> bool:
        """Whether it is not switched off."""
        return self.enabled != "False"


@dataclass(frozen=True)
class Optimizer(Value):
    """An optimizer of torch, and the modules whose parameters it updates."""

    site: Site
    name: str = ""
    models: tuple[Site, ...] = ()


@dataclass(frozen=True)
class Module(Value):
    """A neural network or a layer."""

    site: Site
    name: str
    """Full name of the class, or the name of a class of the script."""
    definition: ast.ClassDef | None = None
    parts: tuple[Value | None, ...] = ()
    """Positional arguments, such as the layers of nn.Sequential."""


@dataclass(frozen=True)
class Instance(Value):
    """An object of a class of the script that is not a module."""

    site: Site
    definition: ast.ClassDef


@dataclass(frozen=True)
class Params(Value):
    """Parameters of modules."""

    models: tuple[Site, ...]


@dataclass(frozen=True)
class LossFunction(Value):
    """A loss function or a loss module."""

    name: str
    """Full name of the function or class."""
    summed: bool = False


@dataclass(frozen=True)
class Function(Value):
    """A function of the script, and the frame it was defined in."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    frame: str
    owner: Value | None = None
    """The object, for a bound method."""
    autocast: Autocast | None = None
    """The autocast that decorates it."""


@dataclass(frozen=True)
class Class(Value):
    """A class of the script."""

    node: ast.ClassDef
    frame: str
    bases: tuple[str, ...]
    """Full names of the bases, including the bases of bases in the script."""


@dataclass(frozen=True)
class ScaleNumber(Value):
    """A number computed from the loss scale."""


@dataclass(frozen=True)
class Cast(Value):
    """A cast of a module, and its place."""

    dtype: str
    node: ast.AST


@dataclass(frozen=True)
class Arguments(Value):
    """transformers.TrainingArguments with mixed precision switched on."""

    mixed: str


@dataclass(frozen=True)
class Tensor(Value):
    """A tensor."""

    dtype: str | None = None
    """fp16, bf16 or fp32 if the script casts it."""
    under: Autocast | None = None
    """The autocast it was computed under."""
    role: str = ""
    """Its part in a known computation: exp, exp-shifted, exp-sum, shifted, max, transposed, scores, probs, softmax,
    sigmoid, square, one-hot."""
    key: str = ""
    """For exp: the text of its argument, to recognise the sum of the same exp. For one-hot: the number of classes."""
    loss: str = ""
    """For a loss: the name of the function; ``summed`` if it is not a mean."""
    scaler: Site | None = None
    """The scaler that multiplied it."""
    divided: bool = False
    multiplied: bool = False
    product: bool = False
    """Whether it is a matrix product or convolution, or computed from one without an operation in FP32: under autocast
    it has autocast's format."""
    output: bool = False
    """Whether it is the output of a model."""
    makers: tuple[Site, ...] = ()
    """Models of engines that it was computed by, with gradients."""
    like: str = ""
    """For probabilities in FP32 and one-hot masks: the format at run time that they were cast to, ``x.dtype``."""

    @property
    def is_fp16(self) -> bool:
        """Whether it is certainly in FP16: by a cast, or as a product under autocast."""
        computed = self.product and self.under is not None and self.under.dtype == "fp16"
        return self.dtype == "fp16" or (self.dtype is None and computed)


@dataclass(frozen=True)
class Scheduler(Value):
    """A learning-rate scheduler that steps without arguments."""


@dataclass(frozen=True)
class Engine(Value):
    """narrowgauge's Engine, with its model and optimizers."""

    site: Site
    node: ast.Call
    model: Module | None
    optimizers: tuple[Optimizer, ...]
    recipe: str | None
    """The text of its recipe; None if the script does not determine it."""
    accumulate: str = "1"
    """The expression for the number of microbatches per update; ``?`` if unknown."""

    @property
    def is_lean(self) -> bool:
        """Whether the weights are certainly BF16, with the low bits of each FP32 number stored separately."""
        text = self.recipe or ""
        return "master=split" in text or ("-lean" in text and "master=fp32" not in text)

    @property
    def compute(self) -> str:
        """The format of its matrix products; empty if the script does not determine it."""
        return (self.recipe or "").partition("[")[0].removesuffix("-lean")


@dataclass(frozen=True)
class EngineMethod(Value):
    """A method of an engine, called or not."""

    engine: Engine
    name: str


@dataclass(frozen=True)
class EngineContext(Value):
    """``engine.forward()`` or ``engine.evaluating()``."""

    engine: Site
    node: ast.Call
    evaluates: bool


@dataclass(frozen=True)
class StateDict(Value):
    """``state_dict()`` of a model or optimizer of an engine."""

    engine: Engine
    node: ast.Call
    what: str


def join(first: Value | None, second: Value | None) -> Value | None:
    """Return what is known if the value is one of two. A scaler or None stays a scaler that may be None."""
    if first == second:
        return first
    if isinstance(first, Tensor) and isinstance(second, Tensor) and (first.scaler is None) != (second.scaler is None):
        return first if first.scaler is not None else second  # scaler.scale(loss) if scaler else loss
    for one, other in ((first, second), (second, first)):
        if other == Const(None) or other == Ref("contextlib.nullcontext()"):
            if isinstance(one, Scaler):
                return Scaler(one.site, one.enabled, sure=False)
            if isinstance(one, Autocast | EngineContext):
                return one
    return None


def heap(site: Site, name: str) -> str:
    """Return the key of an object's attribute in ``State.env``."""
    return f"#{site}.{name}"


def is_module(value: Class) -> bool:
    """Return whether a class is a subclass of nn.Module."""
    return any(base.startswith("torch.nn.") or base.endswith("LightningModule") for base in value.bases)
