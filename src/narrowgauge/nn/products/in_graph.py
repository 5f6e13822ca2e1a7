"""Methods that torch.compile writes into its graph as one call, which only its back end traces.

torch.compile's front end, Dynamo, interprets Python instruction by instruction, and creates a guard for every value it
reads. For an FP8 linear layer with its backward that took six times as long as for a plain one. Its back end,
AOTAutograd, runs the Python code itself and records the tensor operations. Such a method must get all its tensors as
arguments; what else it reads from its object is a constant of the graph. Equal layers have equal objects, so that one
graph serves all equal blocks of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor

from narrowgauge import events


class InGraph:
    """Base class of objects with such a method, ``compute``. Hashable, without tensors, and never freed."""

    def compute(self, *args: Any) -> Any:
        """Compute as plain torch would, from tensors, numbers and None."""
        raise NotImplementedError


_keys: dict[InGraph, str] = {}
_objects: dict[str, InGraph] = {}


def get_graph_key(one: InGraph) -> str:
    """Return the name of all equal objects in a graph. A string: torch.compile may take a number for a variable."""
    key = _keys.setdefault(one, str(len(_keys)))
    _objects.setdefault(key, one)
    return key


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def compute_in_graph(graph_key: str, *args: Any) -> Any:
    """Call ``compute`` of the objects with this key."""
    with events.paused():
        return _objects[graph_key].compute(*args)


def skip_version_checks(tensors: Iterable[Tensor]) -> None:
    """Let backward's graph change these inputs of the whole graph, while other backwards are still to come.

    A graph's forward saves what its backward reads, and torch checks that nothing has changed it. Here every backward
    raises the same amax, and reads it only to raise it. torch has this setting for tensors that an autograd.Function
    stores without ``save_for_backward``; a version without it fails if two forwards precede their backwards.
    """
    get_proxies: Callable[[Tensor], list[Any]] = getattr(proxy_tensor, "_get_proxies", lambda _: [])
    for tensor in tensors:
        for proxy in get_proxies(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True
