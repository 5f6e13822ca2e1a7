"""Balanced routing: how many tokens each expert of a mixture gets, in a trace without data.

Code that loops over experts needs numbers that only data has: ``torch.where(chosen == expert)``, ``tokens[mask]``,
``counts.tolist()``. In a trace each expert gets the same number of tokens. That follows from the source of a number:

    topk, argmax, sort over E scores      an index that is each of E values equally often       Range(E)
    index == e, one_hot(index)            True once in E                                        Mean(1 / E)
    any, sum over n of these              n / E on average                                      Mean(n / E)
    bincount, histc                       all indices divided by the number of bins             Mean(indices / bins)
    cumsum                                multiples of the mean                                 Mean(..., adds_up=True)
    nonzero, x[mask], masked_select       mean x number of values rows

The facts are attributes of the tensors and survive views, casts and selections. Sizes that come from anything else
(``x[x > 0]``) stay unknown, and the operation fails as it would without this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
_FACT = "_narrowgauge_expected"


class Range(NamedTuple):
    """An index that takes each of ``size`` values equally often."""

    size: int


class Mean(NamedTuple):
    """A number or a truth value with a known average."""

    value: float
    adds_up: bool = False
    """Cumulative: value number i is i + 1 times ``value``."""


Fact = Range | Mean
_INDICES = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argsort": 0, "argmin": 0, "multinomial": 0}
"""Operations that return indices into a dimension, and the position of the indices among their results."""
_SAME = frozenset(
    (
        "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "select",
        "slice", "unbind", "split", "split_with_sizes", "chunk", "index", "index_select", "gather", "clone",
        "contiguous", "_to_copy", "to", "alias", "detach", "flatten", "unflatten", "as_strided", "lift_fresh",
        "cat", "stack", "repeat", "flip", "view_as", "_reshape_alias", "clamp", "clamp_min", "clamp_max",
    )
)  # fmt: skip
"""Operations whose results have the distribution of their first operand."""
_GROUPED = ("_grouped_mm", "multiply_by_experts", "multiply_wide_by_experts")
"""Products of tokens that are sorted by expert: torch's, and narrowgauge's in FP8 and BF16."""
_ABOVE, _EQUAL, _DIFFERENT = ("gt", "greater", "ge"), ("eq",), ("ne",)


def get_fact(tensor: Any) -> Fact | None:
    """What is known about the values of a tensor; None for nothing."""
    found: Fact | None = getattr(tensor, _FACT, None) if isinstance(tensor, Tensor) else None
    return found


def get_values(tensor: Tensor) -> Tensor | None:
    """Whole numbers on the host with the mean of a tensor and the right sum; None where nothing is known."""
    fact = get_fact(tensor)
    if not isinstance(fact, Mean):
        return None
    count = tensor.numel()
    ends = [math.floor((index + 1) * fact.value + 1e-6) for index in range(count)]
    values: list[int]
    if tensor.dtype is torch.bool:
        values = [int(fact.value >= 0.5)] * count
    elif fact.adds_up:
        values = ends
    elif count == 1:
        values = [round(fact.value)]
    else:
        values = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return torch.tensor(values, dtype=torch.int64).reshape(tensor.shape).to(tensor.dtype)


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Run an operation whose result depends on data; the result, and whether balanced routing was assumed.

    Raises:
        NotImplementedError: The operation's sizes are not known (from the operation itself).
    """
    name = func._schema.name.split("::")[1]
    first: Any = args[0] if args else None
    if name == "nonzero" and (rows := _count_rows(first)) is not None:
        return first.new_empty((rows, first.dim()), dtype=torch.int64), True
    if name == "masked_select" and (rows := _count_rows(args[1])) is not None:
        return first.new_empty(rows), True
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        indices, found = _replace_masks(args[1])
        if found:
            return func(first, indices, *args[2:], **kwargs), True
    if name == "bincount" and first.is_meta and isinstance(fact := get_fact(first), Range):
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return first.new_empty(max(least, fact.size), dtype=torch.int64), True
    return func(*args, **kwargs), name in _GROUPED and first.is_meta


def track(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Set what is known about the values of a result."""
    name = func._schema.name.split("::")[1]
    first = args[0] if args else None
    if name in _INDICES and isinstance(first, Tensor) and first.is_floating_point():
        made = result if isinstance(result, tuple | list) else (result,)
        if len(made) > _INDICES[name] and (size := _get_size(name, args, kwargs)):
            _set(made[_INDICES[name]], Range(size))
        return
    rule = _RULES.get(name.rstrip("_") if name.endswith("_") else name)
    if rule is not None:
        _set(result, rule(name, args, kwargs))
    elif name in _SAME or (name == "sort" and get_fact(first) is not None):
        source = first[0] if isinstance(first, list | tuple) and first else first
        for tensor in result if isinstance(result, tuple | list) else (result,):
            _set(tensor, get_fact(source))
            if name == "sort":
                break


def _set(tensor: Any, fact: Fact | None) -> None:
    if fact is not None and isinstance(tensor, Tensor) and tensor.device.type == "meta":
        setattr(tensor, _FACT, fact)


def _get_size(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The size of the dimension that indices point into; 0 where no dimension was given."""
    place = {"topk": 2, "multinomial": 99}.get(name, 1)
    dim = kwargs.get(
        "dim", args[place] if len(args) > place else -1 if name in ("topk", "sort", "multinomial") else None
    )
    return args[0].shape[dim] if isinstance(dim, int) and not isinstance(dim, bool) and args[0].dim() else 0


def _count_rows(mask: Any) -> int | None:
    fact = get_fact(mask)
    return max(1, round(min(fact.value, 1.0) * mask.numel())) if isinstance(fact, Mean) and mask.is_meta else None


def _replace_masks(indices: Any) -> tuple[list[Any], bool]:
    """Masks of known size as indices."""
    made, found = [], False
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        rows = _count_rows(index) if is_mask else None
        if rows is None:
            made.append(index)
        else:
            made += [index.new_empty(rows, dtype=torch.int64) for _ in range(index.dim())]
            found = True
    return made, found


def _compare(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fact | None:
    """Of an index: each value is equally likely. Of a number: what its mean says."""
    facts = [fact for fact in map(get_fact, args[:2]) if fact is not None]
    kind = name.rstrip("_")
    place = next((place for place in range(2) if isinstance(get_fact(args[place]), Range)), None)
    if place is not None:
        share = _get_share(args[place], args[1 - place])
        return Mean(share) if kind in _EQUAL else Mean(1 - share) if kind in _DIFFERENT else None
    if not facts or isinstance(args[1], Tensor) or not isinstance(facts[0], Mean) or facts[0].adds_up:
        return None
    mean, other = facts[0].value, float(args[1])
    if other == 0 and mean < 1 and kind != "ge":  # a truth value, or a count that is seldom above zero
        return Mean(1 - mean if kind in _EQUAL else mean)
    if kind in _EQUAL + _DIFFERENT:
        equal = float(round(mean) == other)
        return Mean(equal if kind in _EQUAL else 1 - equal)
    return Mean(float(mean >= other if kind == "ge" else mean > other))


def _get_share(index: Tensor, other: Any) -> float:
    """How often an index equals a number, or one of a list of different numbers that it is compared with."""
    fact = get_fact(index)
    assert isinstance(fact, Range)
    several = isinstance(other, Tensor) and math.prod(torch.broadcast_shapes(index.shape, other.shape))
    return index.numel() / several if several and several > index.numel() else 1 / max(1, fact.size)


def _reduce(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fact | None:
    fact = get_fact(args[0])
    if not isinstance(fact, Mean) or fact.adds_up:
        return None
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = [dims] if isinstance(dims, int) else dims or list(range(args[0].dim()))
    total = fact.value * math.prod(args[0].shape[dim] for dim in dims)
    return Mean(min(1.0, total) if name == "any" else total)


def _scatter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fact | None:
    """One value or one added for each index, as in one_hot and in counting by scatter."""
    target, _, index, value = args[:4]
    fact = get_fact(index)
    if not isinstance(fact, Range) or (isinstance(value, int | float) and value != 1):
        return None
    return (
        Mean(index.numel() / max(1, target.numel())) if target.dtype in (torch.int64, torch.int32, torch.bool) else None
    )


def _count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fact | None:
    fact, bins = get_fact(args[0]), 0
    if name == "histc":
        bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    elif isinstance(fact, Range):
        bins = fact.size
    return Mean(args[0].numel() / bins) if isinstance(fact, Range) and bins else None


def _add_up(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fact | None:
    fact = get_fact(args[0])
    return Mean(fact.value, adds_up=True) if isinstance(fact, Mean) and args[0].dim() == 1 else None


def _both(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fact | None:
    one, other = get_fact(args[0]), get_fact(args[1])
    if not isinstance(one, Mean) or not isinstance(other, Mean):
        return None
    product = one.value * other.value
    return Mean(product if name.startswith(("bitwise_and", "logical_and")) else one.value + other.value - product)


def _invert(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fact | None:
    fact = get_fact(args[0])
    return Mean(1 - fact.value) if isinstance(fact, Mean) and args[0].dtype is torch.bool else None


_RULES: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], Fact | None]] = {
    **dict.fromkeys((*_ABOVE, *_EQUAL, *_DIFFERENT), _compare),
    **dict.fromkeys(("any", "sum"), _reduce),
    **dict.fromkeys(("scatter", "scatter_add"), _scatter),
    **dict.fromkeys(("bincount", "histc"), _count),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "logical_and", "logical_or"), _both),
    **dict.fromkeys(("bitwise_not", "logical_not"), _invert),
    "cumsum": _add_up,
}
