"""Follows inf and NaN from tensor to tensor, so that the op that made them can be told from those that pass them on.

    for each op, in the order of execution:
        output finite:                      nothing; whatever came in ends here (softmax of a mask, clamp, where)
        output not finite, inputs finite:   the op is an *origin*
        output not finite, inputs neither:  the output inherits the earliest origin of its inputs
    the loss, or a gradient, is not finite: its origin is the producer

Infinities that are put there on purpose (a mask's -inf by masked_fill, where, full) are origins too, but *deliberate*:
an op that makes NaN out of nothing but deliberate infinities (softmax of a row that is masked whole, 0 * inf) is itself
the origin of that NaN. What never reaches the loss or a gradient is never blamed.

A tensor is known by its storage, which its views share; whether it is finite is always looked up in its values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from narrowgauge import random_state
from narrowgauge.gauges.replay.op_locations import BATCH, Place, Places, running_function

FILLS = frozenset(
    {
        *("full", "full_like", "new_full", "fill", "fill_", "index_fill", "index_fill_", "masked_fill", "masked_fill_"),
        *("scalar_tensor", "constant_pad_nd", "lift_fresh", "lift_fresh_copy"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"),
    }
)
"""Ops that put a number where it was asked for, or whatever lies in memory: not the result of a computation."""
OVERWRITE = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"})
"""Ops in place that do not read what they write over."""
WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
PROGRESS_S = 2.0


@dataclass(frozen=True)
class Event:
    """Where something that is not finite came from."""

    order: int
    kind: str
    """inf or nan."""
    deliberate: bool
    place: Place
    phase: str
    op: str
    function: str | None = None
    """The torch.autograd.Function the op is part of."""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)
    survives: dict[str, bool | None] = field(default_factory=dict)
    """By format, fp32 and fp64: whether the same op on the same inputs, widened, is finite."""


@dataclass(frozen=True)
class Source:
    """A tensor that was there before the step."""

    kind: str
    """parameter, buffer or input."""
    name: str
    module: str


class Dataflow(TorchDispatchMode):
    """While active, every op's outputs are looked at; open it innermost, above modes that change how ops compute."""

    def __init__(self, places: Places, progress: Callable[[str], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places
        self.ops = 0
        self.label = ""
        self._events = 0
        self._origins: dict[int, Event] = {}
        self._sources: dict[int, Source] = {}
        self._number: Event | None = None
        """Origin of the last number that was read off a tensor (``.item()``) and was not finite."""
        self._progress, self._next = progress, time.monotonic() + PROGRESS_S

    def know(self, tensor: Tensor, source: Source) -> None:
        """Say what a tensor is that was there before."""
        self._sources[_key(tensor)] = source

    def origin(self, tensor: Tensor) -> Event | None:
        """Where the inf or NaN in a tensor came from; None where it is finite."""
        kind = kind_of(tensor)
        if kind is None:
            return None
        known = self._origins.get(_key(tensor))
        if known is None:
            known = self._origins[_key(tensor)] = self._unseen(tensor, kind)
        return known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = _traits(func)
        before = _copy_written(func, args, kwargs) if traits.reads_what_it_writes else (args, kwargs)
        result = func(*args, **kwargs)
        self._count()
        if traits.is_view:
            return result
        if traits.name == "_local_scalar_dense":
            self._number = self.origin(args[0]) or self._number
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        outputs += [value for name, value in _named(func, args, kwargs) if name.partition("[")[0] in traits.written]
        kinds = [(output, kind) for output in outputs if (kind := kind_of(output)) is not None]
        if kinds:
            inputs = [
                (name, value)
                for name, value in _named(func, *before)
                if traits.reads_what_it_writes or name.partition("[")[0] not in traits.written
            ]
            event = self._judge(func, traits, before, inputs, kinds)
            for output, _ in kinds:
                self._origins[_key(output)] = event
        return result

    def _judge(
        self,
        func: Any,
        traits: _Traits,
        call: tuple[Any, Any],
        inputs: list[tuple[str, Any]],
        outputs: list[tuple[Tensor, str]],
    ) -> Event:
        tensors = [value for _, value in inputs if isinstance(value, Tensor)]
        bad = [(tensor, origin) for tensor in tensors if (origin := self.origin(tensor)) is not None]
        natural = [origin for _, origin in bad if not origin.deliberate]
        if natural:
            return min(natural, key=lambda event: event.order)
        numbers = [value for _, value in inputs if not isinstance(value, Tensor)]
        if self._number is not None and not bad and not all(map(math.isfinite, numbers)):
            return self._number
        output, kind = max(outputs, key=lambda pair: pair[1] == "nan")
        if bad:
            makes_nan = kind == "nan" and all(kind_of(tensor) == "inf" for tensor, _ in bad)
            if not makes_nan and not (traits.pointwise and _spreads(output, [tensor for tensor, _ in bad])):
                return min((origin for _, origin in bad), key=lambda event: event.order)
        deliberate = traits.name in FILLS and not bad
        self._events += 1
        place = self.places.here()
        return Event(
            order=self._events,
            kind=kind,
            deliberate=deliberate,
            place=place,
            phase=self.places.phase,
            op=str(func.overloadpacket),
            function=None if deliberate else running_function(),
            inputs=[describe(name, value) for name, value in inputs],
            output=describe("output", output),
            survives={} if deliberate else _survives(func, call, [tensor for tensor, _ in outputs]),
        )

    def _unseen(self, tensor: Tensor, kind: str) -> Event:
        """An event for what was not finite when it was first met: data, weights, or something made out of sight."""
        source = self._sources.get(_key(tensor))
        described = describe("value", tensor)
        self._events += 1
        if source is None:
            deliberate = kind == "inf"  # an attribute of a module that is used as a mask, most likely
            place, op = self.places.here(), "unseen"
        else:
            described["name"] = source.name
            place, op = Place(source.module, None), source.kind
            # A mask may come with the batch, or lie in a buffer. A weight has no business to be infinite.
            masks = {"input": kind == "inf" and not bool((tensor == torch.inf).any()), "buffer": kind == "inf"}
            deliberate = masks.get(source.kind, False)
        phase = "forward" if source is not None else self.places.phase
        return Event(self._events, kind, deliberate, place, phase, op, inputs=[described], output=described)

    def overflowing_norm(self, name: str, module: str, gradient: Tensor) -> Event:
        """An event for gradients that are finite, but whose norm is not; the largest is given."""
        self._events += 1
        told = describe(name, gradient)
        return Event(self._events, "inf", False, Place(module, None), "backward", "gradient norm", inputs=[told])

    def _count(self) -> None:
        self.ops += 1
        if self._progress is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            self._progress(f"{self.label}{self.places.phase}: {self.ops:,} operations")


def choose(events: list[Event]) -> Event | None:
    """Of the origins of several gradients the earliest, deliberate ones last."""
    return min(events, key=lambda event: (event.deliberate, event.order), default=None)


def input_source(place: str) -> Source:
    return Source("input", f"batch{place}", BATCH)


@dataclass(frozen=True)
class _Traits:
    """What an op's schema says about it."""

    name: str
    is_view: bool
    written: frozenset[str]
    reads_what_it_writes: bool
    pointwise: bool


_KNOWN_TRAITS: dict[Any, _Traits] = {}


def _traits(func: Any) -> _Traits:
    if func not in _KNOWN_TRAITS:
        schema = func._schema
        written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        name = schema.name.rpartition("::")[2]
        views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
        overwrites = name in OVERWRITE or any(a.is_out for a in schema.arguments)
        _KNOWN_TRAITS[func] = _Traits(
            name=name,
            # lift_fresh is called a view, but its tensor comes from Python and was never seen before.
            is_view=bool(views) and all(views) and not written and not name.startswith("lift_fresh"),
            written=written,
            reads_what_it_writes=bool(written) and not overwrites,
            pointwise=torch.Tag.pointwise in func.tags,
        )
    return _KNOWN_TRAITS[func]


def _named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers of a call with the names of their parameters; a list's as name[index]."""
    names = [argument.name for argument in func._schema.arguments]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, list | tuple):
            tensors = [item for item in value if isinstance(item, Tensor)]
            yield from ((f"{name}[{index}]", item) for index, item in enumerate(tensors))
        elif isinstance(value, Tensor) or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield name, value


def _copy_written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The call's arguments with copies of those that it will write over, as they were."""

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    written = _traits(func).written
    names = [argument.name for argument in func._schema.arguments]
    copied = [tree_map(copy, v) if n in written else v for n, v in zip(names, args, strict=False)]
    return tuple(copied), {n: tree_map(copy, v) if n in written else v for n, v in kwargs.items()}


def _key(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return id(tensor)


def values_of(tensor: Tensor) -> Tensor:
    """A tensor's numbers, in a format that torch can compare and add up."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def kind_of(tensor: Tensor) -> str | None:
    """nan where a tensor holds one, inf where it holds that alone, None where it is finite or not of that kind."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0 or tensor.is_meta:
        return None
    values = values_of(tensor)
    if not values.is_complex() and bool(torch.isfinite(values.sum(dtype=torch.float32))):
        return None  # one pass; a sum that overflows only looks closer
    if bool(torch.isfinite(values).all()):
        return None
    return "nan" if bool(torch.isnan(values).any()) else "inf"


def _spreads(output: Tensor, bad: list[Tensor]) -> bool:
    """Whether an elementwise op's output is bad in a place where no input is: it has made something of its own."""
    try:
        came = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
        for tensor in bad:
            came |= ~torch.isfinite(values_of(tensor))
    except RuntimeError:  # shapes that do not broadcast
        return False
    return bool((~torch.isfinite(values_of(output)) & ~came).any())


def describe(name: str, value: Any) -> dict[str, Any]:
    """The range of a tensor: over its finite values, and how many are not."""
    if not isinstance(value, Tensor):
        number = float(value)
        return {"name": name, "value": number if abs(number) < float("inf") else str(number)}
    values = values_of(value)
    told: dict[str, Any] = {"name": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    values = values.abs() if values.is_complex() else values.double()
    finite = values[torch.isfinite(values)]
    told |= {"min": None, "max": None, "amax": None}
    if finite.numel():
        low, high = float(finite.min()), float(finite.max())
        told |= {"min": low, "max": high, "amax": max(abs(low), abs(high))}
    for kind, count in (("nan", torch.isnan(values)), ("inf", torch.isinf(values))):
        if bool(count.any()):
            told[kind] = int(count.sum())
    return told


def _survives(func: Any, call: tuple[Any, Any], outputs: list[Tensor]) -> dict[str, bool | None]:
    """Whether the op would be finite on the same inputs in FP32 and in FP64; None where it does not run in them."""
    leaves = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
    narrow = any(t.is_floating_point() and t.dtype not in WIDE for t in [*leaves, *outputs])
    return {
        "fp32": _finite_in(func, call, torch.float32) if narrow else False,
        "fp64": _finite_in(func, call, torch.float64),
    }


def _finite_in(func: Any, call: tuple[Any, Any], dtype: torch.dtype) -> bool | None:
    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype, copy=True)
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return dtype
        return value

    try:
        with random_state.put_back():  # the op may draw numbers
            args, kwargs = tree_map(widen, call)
            result = func(*args, **kwargs)
    except Exception:  # a kernel that is made for one format
        return None
    written = [value for name, value in _named(func, args, kwargs) if name.partition("[")[0] in _traits(func).written]
    tensors = [leaf for leaf in tree_leaves((result, written)) if isinstance(leaf, Tensor)]
    return all(kind_of(tensor) is None for tensor in tensors)
