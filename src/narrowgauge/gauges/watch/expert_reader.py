"""ExpertReader: reads how routers choose experts, in the first microbatch of an update that is read.

A module with stacked experts (parameters [E, ., .]) is called with tokens, the index of each token's experts, and their
weights, in narrowgauge's models and in those of transformers. A hook before its forward counts the indices on the
device. A hook on the router, the module beside it with a matrix [E, D], computes the logits once more: some routers
return only what follows from them. Experts whose weights get gradients of zeros are read before the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowgauge.gauges.watch.expert_readings import ExpertReading
from narrowgauge.parameters import is_sharded

Key = tuple[str, int, int, bool]
"""Path, experts, experts per token, and whether the router's logits are known."""
COLUMNS = 3
"""Of each expert: its tokens, whether its gradient is zero; and in the row of the first expert, the router's logits."""


@dataclass(frozen=True)
class ExpertLayer:
    """A module with stacked experts, and its router."""

    path: str
    module: nn.Module
    experts: int
    stacks: tuple[str, ...]
    """Names of the parameters, as in the model."""
    router: nn.Module | None
    matrix: str = ""
    """The router's parameter [E, D], by its path in the router."""


def find_expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the modules of a model with stacked experts: two or more parameters [E, ., .] of the same E."""
    found = []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        stacks = {name: p for name, p in module._parameters.items() if p is not None and _count_dims(p) == 3}
        if len(stacks) < 2 or len({p.shape[0] for p in stacks.values()}) > 1 or not path:
            continue
        experts = next(iter(stacks.values())).shape[0]
        router = _find_router(modules[path.rpartition(".")[0]], module, experts)
        names = tuple(f"{path}.{name}" for name in stacks)
        found.append(ExpertLayer(path, module, experts, names, *router))
    return [layer for layer in found if layer.experts > 1]


def _find_router(owner: nn.Module, stack: nn.Module, experts: int) -> tuple[nn.Module | None, str]:
    """Return the module beside the experts whose only matrix has a row for each expert, and the name of the matrix."""
    for part in owner.children():
        matrices = [(name, p) for name, p in part.named_parameters() if _count_dims(p) > 1]
        if part is not stack and len(matrices) == 1 and matrices[0][1].shape[0] == experts:
            return part, matrices[0][0]
    return None, ""


def _count_dims(parameter: nn.Parameter) -> int:
    """Return the number of dimensions; 0 for a parameter that the first forward will initialize."""
    return 0 if is_lazy(parameter) else parameter.dim()


class ExpertReader:
    """Reads the routing of one update."""

    def __init__(self, layers: list[ExpertLayer]) -> None:
        self._layers = layers
        self._counts: dict[str, Tensor] = {}
        self._chosen: dict[str, int] = {}
        self._logits: dict[str, Tensor] = {}
        self._idle: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Register hooks on experts and routers, for one forward."""
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                handle = layer.module.register_forward_pre_hook(self._make_counter(layer), with_kwargs=True)
                stack.callback(handle.remove)
                if layer.router is not None:
                    handle = layer.router.register_forward_pre_hook(self._make_logits_hook(layer), with_kwargs=True)
                    stack.callback(handle.remove)
            yield

    def _make_counter(self, layer: ExpertLayer) -> Callable[..., None]:
        def count(_: nn.Module, args: Any, kwargs: Any) -> None:
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
            index = next((one for one in given if not one.is_floating_point() and one.dim() == 2), None)
            if index is None or not torch.is_grad_enabled():
                return
            with torch.no_grad(), torch._C.DisableTorchFunction():
                # A place more for the indices of experts of other ranks. bincount would wait for the device.
                places = index.detach().flatten().long().clamp(0, layer.experts)
                counts = torch.zeros(layer.experts + 1, dtype=torch.int64, device=index.device)
                counts.scatter_add_(0, places, torch.ones_like(places))
                before = self._counts.get(layer.path)
                self._counts[layer.path] = counts[:-1] if before is None else before + counts[:-1]
                self._chosen[layer.path] = index.shape[1]

        return count

    def _make_logits_hook(self, layer: ExpertLayer) -> Callable[..., None]:
        def measure(router: nn.Module, args: Any, kwargs: Any) -> None:
            given = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
            hidden, weight = next(given, None), router.get_parameter(layer.matrix)
            if hidden is None or hidden.shape[-1] != weight.shape[-1] or not torch.is_grad_enabled():
                return
            with torch.no_grad(), torch._C.DisableTorchFunction(), torch.autocast(weight.device.type, enabled=False):
                logits = hidden.detach().flatten(0, -2).float() @ weight.detach().float().t()
                gap = (logits.amax(-1) - logits.mean(-1)).mean()
                before = self._logits.get(layer.path)
                self._logits[layer.path] = gap if before is None else torch.maximum(before, gap)

        return measure

    def read_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        """Read which experts have gradients of zeros in all of their matrices. Shards of experts are not read."""
        for layer in self._layers:
            found = [named[name] for name in layer.stacks if name in named]
            gradients = [p.grad for p in found if p.grad is not None and not is_sharded(p)]
            if layer.path in self._counts and gradients:
                zero = torch.stack([(gradient.detach() == 0).flatten(1).all(1) for gradient in gradients])
                self._idle[layer.path] = zero.all(0)

    def collect(self) -> tuple[list[Key], Tensor | None]:
        """Return what was read: a key for each layer, and one table with a row for each expert of all layers."""
        keys, tables = [], []
        for path, counts in self._counts.items():
            table = torch.zeros(len(counts), COLUMNS, dtype=torch.float64, device=counts.device)
            table[:, 0] = counts
            if path in self._idle:
                table[:, 1] = self._idle[path]
            if path in self._logits:
                table[0, 2] = self._logits[path]
            tables.append(table)
            keys.append((path, len(counts), self._chosen[path], path in self._logits))
        return keys, torch.cat([table.to(tables[0].device) for table in tables]) if tables else None


def make_expert_readings(keys: list[Key], rows: list[list[float]]) -> list[ExpertReading]:
    """Return the readings of a table that has arrived on the host."""
    start, found = 0, []
    for path, experts, chosen, has_logits in keys:
        part = rows[start : start + experts]
        start += experts
        found.append(
            ExpertReading(
                module=path,
                chosen=chosen,
                counts=tuple(int(row[0]) for row in part),
                logits=part[0][2] if has_logits else None,
                idle=tuple(number for number, row in enumerate(part) if row[1]),
            )
        )
    return found
