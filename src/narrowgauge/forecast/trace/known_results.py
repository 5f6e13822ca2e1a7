"""Results of operations on tensors without data, computed once for operands of equal shapes, strides and dtypes.

torch computes the shape of a result in Python, through several layers, which is most of the time of a forecast. Blocks
are alike, and so are steps: nine of ten operations have run before. What may differ between two such calls is computed
each time: operations that return or change an operand, and those whose sizes depend on values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_PLAIN = (Tensor, torch.nn.Parameter)
_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
META = torch.device("meta")


class KnownResults:
    """Layouts of results, by operation and operands."""

    def __init__(self) -> None:
        self._layouts: dict[Any, Any] = {}
        """For a call, the layout of its result, or the type of the sequence and the layout of each tensor in it."""

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., tuple[Any, bool]]
    ) -> tuple[Any, bool]:
        """Return what ``compute`` returns for an operation. If its second value is true, nothing is kept.

        Args:
            func: The operation.
            args: Its positional arguments.
            kwargs: Its other arguments.
            compute: Runs the operation; called with the three others.
        """
        if (
            not _is_function_of_layouts(func) or torch._C._len_torch_dispatch_stack()
        ):  # another mode sees every operation
            return compute(func, args, kwargs)
        try:
            key = func, torch.get_default_dtype(), _describe(args), tuple((k, _describe(v)) for k, v in kwargs.items())
            known = self._layouts.get(key)
        except TypeError:  # a tensor of another kind, or what has no hash
            return compute(func, args, kwargs)
        if known is not None:
            kind, layouts = known
            made = [None if layout is None else _make(layout) for layout in layouts]
            return made[0] if kind is None else kind(made), False
        result, is_special = compute(func, args, kwargs)
        layouts = None if is_special else _read_layouts(result, {*_list_storages((args, *kwargs.values()))})
        if layouts is not None:
            self._layouts[key] = (None if isinstance(result, Tensor) else type(result)), layouts
        return result, is_special


@functools.cache
def _is_function_of_layouts(func: Any) -> bool:
    """Whether an operation changes and returns no operand, and its sizes do not depend on values."""
    pieces = (*func._schema.arguments, *func._schema.returns)
    return not any(piece.alias_info for piece in pieces) and not any(tag in func.tags for tag in _BY_VALUE)


def _describe(value: Any) -> Any:
    """What a result depends on; 1, 1.0 and True are equal in Python, and differ in torch."""
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN or value.layout is not torch.strided:
            raise TypeError(type(value))
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return type(value), *map(_describe, value)
    return type(value), value


def _list_storages(value: Any) -> Iterator[int]:
    """The addresses of the storages of operands."""
    if isinstance(value, Tensor):
        yield value.untyped_storage()._cdata
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _list_storages(one)


def _read_layouts(result: Any, operands: set[int]) -> list[Layout | None] | None:
    """The layouts of a result; None for one that ``_make`` could not make, such as that of aten._unsafe_view."""
    if isinstance(result, Tensor):
        result = [result]
    elif type(result) not in (list, tuple):
        return None
    layouts: list[Layout | None] = []
    storages = set(operands)
    for one in result:
        if one is None:
            layouts.append(None)
            continue
        if type(one) is not Tensor or not one.is_meta or one.layout is not torch.strided or one.storage_offset():
            return None
        layout = one.shape, one.stride(), one.dtype
        if _make(layout).untyped_storage().nbytes() != one.untyped_storage().nbytes():
            return None
        layouts.append(layout)
        storages.add(one.untyped_storage()._cdata)
    return layouts if len(storages) == len(operands) + len(layouts) - layouts.count(None) else None


def _make(layout: Layout) -> Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=META)
