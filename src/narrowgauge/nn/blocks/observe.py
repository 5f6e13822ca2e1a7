"""Runs a module once and records the input and the output of everything inside it, and where dropout happens."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from narrowgauge.nn.blocks import multihead
from narrowgauge.nn.blocks.spec import Place
from narrowgauge.nn.module_changes import CHANGES, OWN, original_class
from narrowgauge.nn.products.linear import is_linear

SPREAD = 0.05
"""Standard deviation of random biases, and of other vectors around 1."""


@dataclass
class Call:
    """One call of a module inside the observed one, with the rows of its first tensor and of the one it returned."""

    path: str
    module: nn.Module
    input: Tensor
    output: Tensor
    is_projection: bool = False
    """Whether the module is a linear layer, or the call stands for a product of nn.MultiheadAttention."""
    is_alone: bool = False
    """Whether the tensor was the only argument."""


@dataclass
class DropoutCall:
    """One call of ``F.dropout``, also by nn.Dropout."""

    input: Tensor
    place: Place | None
    """Where the block holds the probability; None if it is held elsewhere."""


@dataclass
class Observation:
    """What a run showed."""

    output: Any
    calls: list[Call] = field(default_factory=list)
    dropouts: list[DropoutCall] = field(default_factory=list)
    entries: dict[str, int] = field(default_factory=dict)
    """How many entries the tuples have that modules returned, with a tensor in front; 0 if they returned a tensor."""
    of_tuples: list[Call] = field(default_factory=list)
    """Calls of modules that returned a tuple, with the tensor in front."""

    def once(self) -> list[Call]:
        """Return the calls of modules that were called exactly once."""
        counts: dict[str, int] = {}
        for call in self.calls:
            counts[call.path] = counts.get(call.path, 0) + 1
        return [call for call in self.calls if counts[call.path] == 1]


def observe(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Observation:
    """Run the module and record its submodules, in the order in which they return, and its dropout."""
    seen = Observation(None)
    handles = []

    def record(path: str) -> Any:
        def hook(inner: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if isinstance(output, Tensor):
                seen.entries[path] = 0
            elif isinstance(output, tuple) and output and isinstance(output[0], Tensor):
                seen.entries[path] = len(output)
            first = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
            if multihead.is_self_attention(inner):
                seen.calls += _split_multihead(path, inner, multihead.read_arguments(inner, inputs, named), output[0])
            elif first is not None and path in seen.entries:
                made = output if isinstance(output, Tensor) else output[0]
                rows = get_rows(first).clone(), get_rows(made).clone()
                call = Call(path, inner, *rows, is_linear(inner), len(inputs) + len(named) == 1)
                (seen.calls if isinstance(output, Tensor) else seen.of_tuples).append(call)

        return hook

    for path, inner in module.named_modules():
        if path:
            handles.append(inner.register_forward_hook(record(path), with_kwargs=True))
    try:
        # the caller may have disabled torch functions, for tensors of other subclasses
        with _label_probabilities(module) as places, torch._C._EnableTorchFunction(), _DropoutRecorder(seen, places):
            seen.output = module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _split_multihead(path: str, module: Any, arguments: Mapping[str, Any], output: Tensor) -> list[Call]:
    """Return the two products of nn.MultiheadAttention as if they were calls of linear layers."""
    if not multihead.reads_one_tensor(arguments):
        return []
    x = arguments["query"]
    qkv = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    mixed = multihead.attend(module, qkv, arguments)
    return [
        Call(f"{path}.in_proj", module, get_rows(x).clone(), get_rows(qkv), True),
        Call(f"{path}.out_proj", module.out_proj, get_rows(mixed), get_rows(output).clone(), True),
    ]


class _DropoutRecorder(TorchFunctionMode):
    """Records calls of ``F.dropout``."""

    def __init__(self, seen: Observation, places: Mapping[float, Place]) -> None:
        super().__init__()
        self._seen, self._places = seen, places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            x = args[0] if args else kwargs["input"]
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            self._seen.dropouts.append(DropoutCall(get_rows(x).clone(), self._places.get(p)))
        return func(*args, **kwargs)


def list_probabilities(block: nn.Module) -> Iterator[Place]:
    """Yield the places of numbers that may be probabilities of dropout."""
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            named = "drop" in name and isinstance(value, float)
            if (named or (isinstance(module, nn.Dropout) and name == "p")) and 0 <= value < 1:
                yield path, name


@contextlib.contextmanager
def _label_probabilities(block: nn.Module) -> Iterator[dict[float, Place]]:
    """Give every probability its own value, so that a call of dropout shows where its probability is held."""
    before = {place: vars(block.get_submodule(place[0]))[place[1]] for place in list_probabilities(block)}
    labels = {(number + 0.618034) / (len(before) + 1): place for number, place in enumerate(before)}
    try:
        for label, (path, name) in labels.items():
            setattr(block.get_submodule(path), name, label)
        yield labels
    finally:
        for (path, name), value in before.items():
            setattr(block.get_submodule(path), name, value)


def get_rows(x: Tensor) -> Tensor:
    """Return a tensor as rows: some blocks flatten batch and time in between."""
    return x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach()


def make_random_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy a module with random FP32 weights: of any device, sharded or not, and without our changes or any hooks.

    Freshly initialized models have zero biases and norm weights of one, which would hide how they are used.
    """
    known: dict[int, Any] = {}
    made = _copy(module, device, torch.Generator(device).manual_seed(0), known)
    for inner in made.modules():
        for name, value in vars(inner).items():
            if isinstance(value, types.FunctionType | types.MethodType):
                vars(inner)[name] = _rebind(value, known)
    return made


def _rebind(function: Any, known: Mapping[int, Any]) -> Any:
    """Return a function that is an attribute of a module for the module's copy: what it encloses may be parts of it."""
    if isinstance(function, types.MethodType):
        return types.MethodType(function.__func__, known.get(id(function.__self__), function.__self__))
    cells = function.__closure__ or ()
    contents = [cell.cell_contents if _is_filled(cell) else None for cell in cells]
    if not any(id(value) in known for value in contents if isinstance(value, nn.Module)):
        return function
    closure = tuple(
        types.CellType(known[id(value)]) if id(value) in known else cell
        for cell, value in zip(cells, contents, strict=True)
    )
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _copy(module: nn.Module, device: torch.device, generator: torch.Generator, known: dict[int, Any]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]  # type: ignore[no-any-return]
    cls = _get_plain_class(module)
    made: Any = object.__new__(cls)
    known[id(module)] = made
    fresh = nn.Module()
    made.__dict__.update({name: value for name, value in vars(module).items() if name not in (CHANGES, OWN)})
    made.__dict__.update({name: value for name, value in vars(fresh).items() if name.startswith("_") and value == {}})
    made.__dict__.update(_parameters={}, _buffers={}, _modules={}, gradient_checkpointing=False)
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in known:
            known[id(parameter)] = _make_random(name, tuple(parameter.shape), device, generator)
        made._parameters[name] = None if parameter is None else known[id(parameter)]
    for name, buffer in module._buffers.items():
        made._buffers[name] = None if buffer is None else _copy_buffer(buffer, device)
    for name, inner in module._modules.items():
        made._modules[name] = None if inner is None else _copy(inner, device, generator, known)
    return made  # type: ignore[no-any-return]


def _get_plain_class(module: nn.Module) -> type[Any]:
    """Return a module's class without our changes and without FSDP2's."""
    cls = original_class(module)
    return next(base for base in cls.__mro__ if base is not FSDPModule and FSDPModule not in base.__mro__)


def _make_random(name: str, shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> nn.Parameter:
    value = torch.randn(shape, generator=generator, device=device)
    if len(shape) > 1:
        value *= shape[-1] ** -0.5  # outputs of about 1, where activations differ from each other
    else:
        value = value * SPREAD + (0.0 if "bias" in name else 1.0)
    return nn.Parameter(value)


def _copy_buffer(buffer: Tensor, device: torch.device) -> Tensor:
    plain = buffer.detach()
    if plain.device.type == "meta" or type(plain) is not Tensor:
        return torch.zeros(tuple(plain.shape), dtype=plain.dtype, device=device)
    plain = plain.to(device)
    return plain.float() if plain.is_floating_point() else plain.clone()
