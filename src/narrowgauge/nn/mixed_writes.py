"""Writes of values into a tensor of another dtype under autocast, where torch raises an error (``autocast_rules``).

Where a model collects results (the outputs of experts, tokens in place of masked ones), it writes values that a layer
returns in 16 bits into a tensor that it made in FP32, or values in FP32 into one in BF16:

    out = torch.zeros_like(x)                      out.index_add_(0, tokens, expert(x[tokens]) * weight)
    out[mask] = layer(x[mask])

Without autocast both are FP32. A sum in place (``out += y``) converts its operand, and so do these writes under the
rule: the values get the dtype of the tensor that is written to. Operations that return a new tensor get the wider
dtype, as autocast has it for those that it knows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowgauge.nn.grouped_mm import CASTABLE

aten = torch.ops.aten
IN_PLACE = {
    "index_add_": 3, "index_copy_": 3, "index_put_": 2, "index_reduce_": 3, "masked_scatter_": 2, "scatter_.src": 3,
    "scatter_add_": 3, "scatter_reduce_.two": 3,
}  # fmt: skip
"""Operations, and the number of the argument with the values. The first argument is written to."""
NEW = {
    "index_add": 3, "index_copy": 3, "index_put": 2, "index_reduce": 3, "masked_scatter": 2, "scatter.src": 3,
    "scatter_add": 3, "scatter_reduce.two": 3,
}  # fmt: skip
"""The same of operations that return a new tensor."""


def list_rules() -> Iterator[tuple[str, Any]]:
    """Yield the names of operations, and their rules."""
    for table, rule in ((IN_PLACE, _write), (NEW, _make)):
        for name, place in table.items():
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(aten, packet), overload or "default")
            yield name, functools.partial(rule, operation, place)


def _write(operation: Any, place: int, dtype: torch.dtype | None, /, *args: Any, **kwargs: Any) -> Any:
    if dtype is not None and _differ(args, place):
        args = _replace(args, place, args[0].dtype)
    return operation(*args, **kwargs)


def _make(operation: Any, place: int, dtype: torch.dtype | None, /, *args: Any, **kwargs: Any) -> Any:
    if dtype is not None and _differ(args, place):
        wide = torch.promote_types(args[0].dtype, args[place].dtype)
        args = _replace(_replace(args, place, wide), 0, wide)
    return operation(*args, **kwargs)


def _differ(args: tuple[Any, ...], place: int) -> bool:
    """Whether both tensors have formats that autocast mixes, and not the same."""
    if len(args) <= place or not isinstance(args[place], Tensor):
        return False
    one, other = args[0].dtype, args[place].dtype
    return one is not other and one in CASTABLE and other in CASTABLE


def _replace(args: tuple[Any, ...], place: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return (*args[:place], args[place].to(dtype), *args[place + 1 :])
