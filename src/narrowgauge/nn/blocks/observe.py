"""Runs a module once and records the input and the output of everything inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from narrowgauge.nn.module_changes import CHANGES, OWN, original_class

SPREAD = 0.05
"""Standard deviation of random biases, and of the weights of norms around 1."""


@dataclass
class Call:
    """One call of a module inside the observed one, with the rows of its first tensor and of the one it returned."""

    path: str
    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass
class Observation:
    """What a run showed."""

    output: Any
    calls: list[Call] = field(default_factory=list)

    def once(self) -> list[Call]:
        """Return the calls of modules that were called exactly once."""
        counts: dict[str, int] = {}
        for call in self.calls:
            counts[call.path] = counts.get(call.path, 0) + 1
        return [call for call in self.calls if counts[call.path] == 1]


def observe(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Observation:
    """Run the module and record its submodules, in the order in which they return."""
    seen = Observation(None)
    handles = []

    def record(path: str) -> Any:
        def hook(inner: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            first = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
            if first is not None and isinstance(output, Tensor):
                seen.calls.append(Call(path, inner, get_rows(first).clone(), get_rows(output).clone()))

        return hook

    for path, inner in module.named_modules():
        if path:
            handles.append(inner.register_forward_hook(record(path), with_kwargs=True))
    try:
        seen.output = module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def get_rows(x: Tensor) -> Tensor:
    """Return a tensor as rows: some blocks flatten batch and time in between."""
    return x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach()


def make_random_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy a module with random FP32 weights: of any device, sharded or not, and without our changes or any hooks.

    Freshly initialized models have zero biases and norm weights of one, which would hide how they are used.
    """
    return _copy(module, device, torch.Generator().manual_seed(0), {})


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
    value = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        value *= shape[-1] ** -0.5  # outputs of about 1, where activations differ from each other
    else:
        value = value * SPREAD + (1.0 if name == "weight" else 0.0)
    return nn.Parameter(value.to(device))


def _copy_buffer(buffer: Tensor, device: torch.device) -> Tensor:
    plain = buffer.detach()
    if plain.device.type == "meta" or type(plain) is not Tensor:
        return torch.zeros(tuple(plain.shape), dtype=plain.dtype, device=device)
    plain = plain.to(device)
    return plain.float() if plain.is_floating_point() else plain.clone()
