"""What can be known of a value by reading the script: enough to follow scalers, optimizers, models and losses by name.

None stands for everything else. Values are frozen and compare by what they are, so that two ways through a script that
end with the same values can be told to be one. A site is where a thing was made (line, column, then the same of each
call that led there: two models of one factory are two), or its name where the script got it from elsewhere.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

Site = tuple[int, ...] | str


@dataclass(frozen=True)
class Value:
    """Something that is known."""


OPAQUE = Value()
"""A local name of which nothing is known: it hides one of the same name further out."""


@dataclass(frozen=True)
class Ref(Value):
    """Something imported, by its full name."""

    name: str


@dataclass(frozen=True)
class Const(Value):
    """A literal."""

    value: object


@dataclass(frozen=True)
class Condition(Value):
    """What a comparison said."""

    test: ast.expr


@dataclass(frozen=True)
class Seq(Value):
    """A tuple or list written out."""

    items: tuple[Value | None, ...]


@dataclass(frozen=True)
class Scaler(Value):
    """A gradient scaler."""

    site: Site
    enabled: str = ""
    """Empty: always. Else the text of the expression that decides."""
    sure: bool = True
    """Whether it may be None instead."""


@dataclass(frozen=True)
class Autocast(Value):
    """A context manager or decorator of autocast."""

    dtype: str | None
    """fp16, bf16, or None where the script does not say."""
    device: str | None
    enabled: str = ""

    @property
    def active(self) -> bool:
        return self.enabled != "False"


@dataclass(frozen=True)
class Optimizer(Value):
    """An optimizer of torch, and the modules whose parameters it has."""

    site: Site
    name: str = ""
    models: tuple[Site, ...] = ()


@dataclass(frozen=True)
class Module(Value):
    """A neural network or a layer."""

    site: Site
    name: str
    """Full name of the class, or the name of one of the script's own."""
    definition: ast.ClassDef | None = None
    parts: tuple[Value | None, ...] = ()
    """Layers given to it, as to nn.Sequential."""


@dataclass(frozen=True)
class Instance(Value):
    """An object of one of the script's other classes."""

    site: Site
    definition: ast.ClassDef


@dataclass(frozen=True)
class Params(Value):
    """Parameters of modules."""

    models: tuple[Site, ...]


@dataclass(frozen=True)
class LossFunction(Value):
    """What computes a loss."""

    name: str
    """Full name of the function or class."""
    summed: bool = False


@dataclass(frozen=True)
class Function(Value):
    """A function of the script, and the frame it was defined in."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    frame: str
    owner: Value | None = None
    """The object it is a method of."""
    autocast: Autocast | None = None
    """From a decorator."""


@dataclass(frozen=True)
class Class(Value):
    """A class of the script."""

    node: ast.ClassDef
    frame: str
    bases: tuple[str, ...]
    """Full names of the bases, those of the script's own bases included."""


@dataclass(frozen=True)
class ScaleNumber(Value):
    """A number made from the loss scale."""


@dataclass(frozen=True)
class Cast(Value):
    """That a module was cast, and where."""

    dtype: str
    node: ast.AST


@dataclass(frozen=True)
class Arguments(Value):
    """transformers.TrainingArguments that ask for mixed precision."""

    mixed: str


@dataclass(frozen=True)
class Tensor(Value):
    """A tensor."""

    dtype: str | None = None
    """Set where the script casts it: fp16, bf16 or fp32."""
    under: Autocast | None = None
    """The autocast it was computed under."""
    role: str = ""
    """What it is part of: exp, exp-sum, shifted, max, transposed, scores, probs, softmax, sigmoid."""
    key: str = ""
    """Of an exp: the text of its argument, to recognise the sum of the same."""
    loss: str = ""
    """Of a loss: the name of the function; ``summed`` where it is not a mean."""
    scaler: Site | None = None
    """The scaler that multiplied it."""
    divided: bool = False
    multiplied: bool = False
    output: bool = False
    """Whether a model gave it."""
    makers: tuple[Site, ...] = ()
    """Models in an engine's care that it was computed by, with gradients."""


@dataclass(frozen=True)
class Engine(Value):
    """narrowgauge's Engine, and what is in its care."""

    site: Site
    node: ast.Call
    model: Module | None
    optimizers: tuple[Optimizer, ...]
    recipe: str | None
    """The text of its recipe; None where the script does not say."""
    accumulate: str = "1"
    """The expression for the microbatches of an update."""

    @property
    def is_lean(self) -> bool:
        """Whether the weights are certainly BF16, with the rest of each FP32 number beside them."""
        text = self.recipe or ""
        return "master=split" in text or ("-lean" in text and "master=fp32" not in text)

    @property
    def compute(self) -> str:
        """The format of its products; empty where the script does not say."""
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
    """``state_dict()`` of a model or optimizer that is in an engine's care."""

    engine: Engine
    node: ast.Call
    what: str


def join(first: Value | None, second: Value | None) -> Value | None:
    """What is known where either may be meant. A thing or None is the thing, though not for sure."""
    if first == second:
        return first
    for one, other in ((first, second), (second, first)):
        if other == Const(None) or other == Ref("contextlib.nullcontext()"):
            if isinstance(one, Scaler):
                return Scaler(one.site, one.enabled, sure=False)
            if isinstance(one, Autocast | EngineContext):
                return one
    return None


def dotted(node: ast.expr) -> str | None:
    """``a.b.c`` as text; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def heap(site: Site, name: str) -> str:
    """Where a state keeps an object's attribute."""
    return f"#{site}.{name}"


def is_module(value: Class) -> bool:
    """Whether a class is a neural network."""
    return any(base.startswith("torch.nn.") or base.endswith("LightningModule") for base in value.bases)


def is_static(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "staticmethod" for node in method.decorator_list)
