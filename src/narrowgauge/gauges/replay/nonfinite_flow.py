"""NonfiniteFlow: follows inf and NaN from tensor to tensor, to find the op that produced them.

    for each op, in the order of execution:
        output finite:                          nothing; inf or NaN in an input ends here (softmax of a mask, clamp)
        output not finite, all inputs finite:   the op is an *origin*
        output not finite, an input not finite: the output inherits the earliest origin of its inputs
    the loss or a gradient is not finite: its origin is the producer

Infinities that are put there on purpose (a mask's -inf by masked_fill, where, full) are origins too, but *deliberate*.
An op that makes NaN from nothing but deliberate infinities (softmax of a fully masked row, 0 * inf) is itself the
origin of that NaN. An inf or NaN that never reaches the loss or a gradient is not reported.

A tensor is identified by its storage, which its views share. Whether it is finite is always read from its values. An
in-place op overwrites its input, so the input is copied first; the copy has the origin of the original tensor.
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
from narrowgauge.gauges.replay.op_locations import BATCH, OpLocation, OpLocator, find_running_function
from narrowgauge.gauges.replay.tensor_values import adds_nonfinite, classify_nonfinite, describe, read_values

FILLS = frozenset(
    {
        *("full", "full_like", "new_full", "fill", "fill_", "index_fill", "index_fill_", "masked_fill", "masked_fill_"),
        *("scalar_tensor", "constant_pad_nd", "lift_fresh", "lift_fresh_copy"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"),
    }
)
"""Ops that write a given number or uninitialized memory, not the result of a computation."""
OVERWRITE = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"})
"""In-place ops that do not read what they overwrite."""
WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
PROGRESS_S = 2.0


@dataclass(frozen=True)
class Origin:
    """The op or tensor that an inf or NaN comes from."""

    order: int
    kind: str
    """inf or nan."""
    deliberate: bool
    place: OpLocation
    phase: str
    op: str
    function: str | None = None
    """The torch.autograd.Function that the op is part of."""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)
    survives: dict[str, bool | None] = field(default_factory=dict)
    """For fp32 and fp64: whether the op is finite on the same inputs in that format."""


@dataclass(frozen=True)
class Source:
    """A tensor that existed before the step."""

    kind: str
    """parameter, buffer or input."""
    name: str
    module: str


class NonfiniteFlow(TorchDispatchMode):
    """While active, checks the outputs of every op. Enter it innermost, above modes that change how ops compute."""

    def __init__(self, locator: OpLocator, progress: Callable[[str], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.locator = locator
        self.ops = 0
        self.label = ""
        self._origin_count = 0
        self._origins: dict[int, Origin] = {}
        self._sources: dict[int, Source] = {}
        self._parameters: dict[int, Tensor] = {}
        self._copied: dict[int, int] = {}
        """While an in-place op is checked: the storage from which each copy (by id) was made."""
        self._number: Origin | None = None
        """Origin of the last nonfinite number that was read with ``.item()``."""
        self._progress, self._next = progress, time.monotonic() + PROGRESS_S

    def register_source(self, tensor: Tensor, source: Source) -> None:
        """Name a tensor that existed before the step."""
        self._sources[_storage_key(tensor)] = source
        if source.kind == "parameter":
            self._parameters[_storage_key(tensor)] = tensor

    def find_origin(self, tensor: Tensor) -> Origin | None:
        """Return the origin of the inf or NaN in a tensor, or None if it is finite."""
        kind = classify_nonfinite(tensor)
        if kind is None:
            return None
        key = self._copied.get(id(tensor)) or _storage_key(tensor)
        known = self._origins.get(key)
        if known is None:
            known = self._origins[key] = self._make_unseen(tensor, kind, key)
        return known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = _read_traits(func)
        before = self._copy_written(func, args, kwargs) if traits.reads_what_it_writes else (args, kwargs)
        result = func(*args, **kwargs)
        self._count()
        if traits.is_view:
            return result
        if traits.name == "_local_scalar_dense":
            self._number = self.find_origin(args[0]) or self._number
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        outputs += [
            value for name, value in _list_arguments(func, args, kwargs) if name.partition("[")[0] in traits.written
        ]
        kinds = [(output, kind) for output in outputs if (kind := classify_nonfinite(output)) is not None]
        if kinds:
            inputs = [
                (name, value)
                for name, value in _list_arguments(func, *before)
                if traits.reads_what_it_writes or name.partition("[")[0] not in traits.written
            ]
            found = self._decide_origin(func, traits, before, inputs, kinds)
            for output, _ in kinds:
                self._set_origin(output, found, bool(traits.written))
        self._copied.clear()
        return result

    def _set_origin(self, output: Tensor, found: Origin, in_place: bool) -> None:
        """Note the origin of an output. If a part of a tensor was written, the rest may have an earlier one."""
        key = _storage_key(output)
        known = self._origins.get(key)
        if in_place and known is not None and known is not found and _is_nonfinite_elsewhere(output):
            found = choose_origin([known, found]) or found
        self._origins[key] = found

    def _copy_written(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """The call's arguments, with copies of those that it will overwrite."""

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            copied = value.clone()
            self._copied[id(copied)] = _storage_key(value)
            return copied

        written = _read_traits(func).written
        names = [argument.name for argument in func._schema.arguments]
        copied = [tree_map(copy, v) if n in written else v for n, v in zip(names, args, strict=False)]
        return tuple(copied), {n: tree_map(copy, v) if n in written else v for n, v in kwargs.items()}

    def _decide_origin(
        self,
        func: Any,
        traits: _Traits,
        call: tuple[Any, Any],
        inputs: list[tuple[str, Any]],
        outputs: list[tuple[Tensor, str]],
    ) -> Origin:
        tensors = [value for _, value in inputs if isinstance(value, Tensor)]
        bad = [(tensor, origin) for tensor in tensors if (origin := self.find_origin(tensor)) is not None]
        natural = [origin for _, origin in bad if not origin.deliberate]
        if natural:
            return min(natural, key=lambda origin: origin.order)
        numbers = [value for _, value in inputs if not isinstance(value, Tensor)]
        if self._number is not None and not bad and not all(map(math.isfinite, numbers)):
            return self._number
        output, kind = max(outputs, key=lambda pair: pair[1] == "nan")
        if bad:
            makes_nan = kind == "nan" and all(classify_nonfinite(tensor) == "inf" for tensor, _ in bad)
            if not makes_nan and not (traits.pointwise and adds_nonfinite(output, [tensor for tensor, _ in bad])):
                return min((origin for _, origin in bad), key=lambda origin: origin.order)
        deliberate = traits.name in FILLS and not bad
        self._origin_count += 1
        place = self.locator.locate()
        return Origin(
            order=self._origin_count,
            kind=kind,
            deliberate=deliberate,
            place=place,
            phase=self.locator.phase,
            op=str(func.overloadpacket),
            function=None if deliberate else find_running_function(),
            inputs=[describe(name, value) for name, value in inputs],
            output=describe("output", output),
            survives={} if deliberate else _check_wider_formats(func, call, [tensor for tensor, _ in outputs]),
        )

    def _make_unseen(self, tensor: Tensor, kind: str, key: int) -> Origin:
        """Make an origin for a tensor that no observed op produced: data, weights, or memory written elsewhere."""
        source = self._sources.get(key)
        whole = self._parameters.get(key)  # an op may read a stack of experts as one matrix, or one expert of it
        described = describe("value", tensor if whole is None or classify_nonfinite(whole) is None else whole)
        self._origin_count += 1
        if source is None:
            deliberate = kind == "inf"  # most likely a mask that is an attribute of a module
            place, op = self.locator.locate(), "unseen"
        else:
            described["name"] = source.name
            place, op = OpLocation(source.module, None), source.kind
            # A mask may be part of the batch or a buffer. A weight must never be infinite.
            masks = {"input": kind == "inf" and not bool((tensor == torch.inf).any()), "buffer": kind == "inf"}
            deliberate = masks.get(source.kind, False)
        phase = "forward" if source is not None else self.locator.phase
        return Origin(self._origin_count, kind, deliberate, place, phase, op, inputs=[described], output=described)

    def make_norm_overflow(self, name: str, module: str, gradient: Tensor) -> Origin:
        """Make an origin for finite gradients whose norm is not finite, from the largest gradient."""
        self._origin_count += 1
        described = describe(name, gradient)
        return Origin(
            self._origin_count, "inf", False, OpLocation(module, None), "backward", "gradient norm", inputs=[described]
        )

    def _count(self) -> None:
        self.ops += 1
        if self._progress is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            self._progress(f"{self.label}{self.locator.phase}: {self.ops:,} operations")


def choose_origin(origins: list[Origin]) -> Origin | None:
    """Return the earliest origin that is not deliberate, else the earliest."""
    return min(origins, key=lambda origin: (origin.deliberate, origin.order), default=None)


def make_input_source(place: str) -> Source:
    """Make the source of a tensor in the batch, such as ``batch[0]``."""
    return Source("input", f"batch{place}", BATCH)


@dataclass(frozen=True)
class _Traits:
    """What is known about an op from its schema."""

    name: str
    is_view: bool
    written: frozenset[str]
    reads_what_it_writes: bool
    pointwise: bool


_KNOWN_TRAITS: dict[Any, _Traits] = {}


def _read_traits(func: Any) -> _Traits:
    if func not in _KNOWN_TRAITS:
        schema = func._schema
        written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        name = schema.name.rpartition("::")[2]
        views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
        overwrites = name in OVERWRITE or any(a.is_out for a in schema.arguments)
        _KNOWN_TRAITS[func] = _Traits(
            name=name,
            # The schema calls lift_fresh a view, but its tensor comes from Python and is new.
            is_view=bool(views) and all(views) and not written and not name.startswith("lift_fresh"),
            written=written,
            reads_what_it_writes=bool(written) and not overwrites,
            pointwise=torch.Tag.pointwise in func.tags,
        )
    return _KNOWN_TRAITS[func]


def _list_arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers of a call with their parameter names; for lists, name[index]."""
    names = [argument.name for argument in func._schema.arguments]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, list | tuple):
            tensors = [item for item in value if isinstance(item, Tensor)]
            yield from ((f"{name}[{index}]", item) for index, item in enumerate(tensors))
        elif isinstance(value, Tensor) or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield name, value


def _storage_key(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return id(tensor)


def _is_nonfinite_elsewhere(part: Tensor) -> bool:
    """Whether the memory of a tensor has more inf and NaN than the tensor, which may be a view of it."""
    if part.layout != torch.strided or part._is_zerotensor():
        return False
    storage = part.untyped_storage()
    if storage.nbytes() <= part.numel() * part.element_size():
        return False
    whole = torch.empty(0, dtype=part.dtype, device=part.device).set_(storage)
    bad_in_part, bad_in_whole = (int((~torch.isfinite(read_values(t))).sum()) for t in (part, whole))
    return bad_in_whole > bad_in_part


def _check_wider_formats(func: Any, call: tuple[Any, Any], outputs: list[Tensor]) -> dict[str, bool | None]:
    """Whether the op is finite on the same inputs in FP32 and FP64; None if it does not run in them."""
    leaves = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
    narrow = any(t.is_floating_point() and t.dtype not in WIDE for t in [*leaves, *outputs])
    return {
        "fp32": _is_finite_in(func, call, torch.float32) if narrow else False,
        "fp64": _is_finite_in(func, call, torch.float64),
    }


def _is_finite_in(func: Any, call: tuple[Any, Any], dtype: torch.dtype) -> bool | None:
    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype, copy=True)
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return dtype
        return value

    try:
        with random_state.preserve():  # the op may use random numbers
            args, kwargs = tree_map(widen, call)
            result = func(*args, **kwargs)
    except Exception:  # a kernel that supports only one format
        return None
    written = [
        value
        for name, value in _list_arguments(func, args, kwargs)
        if name.partition("[")[0] in _read_traits(func).written
    ]
    tensors = [leaf for leaf in tree_leaves((result, written)) if isinstance(leaf, Tensor)]
    return all(classify_nonfinite(tensor) is None for tensor in tensors)
