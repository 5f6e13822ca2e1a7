"""Products by cuBLASLt, called directly: of the algorithms it proposes for a shape, the one that measures fastest.

torch takes cuBLAS's first proposal, which a model of the hardware puts first and not a clock. On an H200 others
take a ninth less time for all of GPT-2 124M's products in FP8 (docs/results.md), so the first product of a shape
tries all of them on its own operands, torch's among them, and keeps the fastest for the process: 0.15 s at most.

``product`` answers None where torch is to compute: on another device than a GPU, for small products, under a dispatch
mode or while compiling, where autograd is to see the product, where torch's deterministic algorithms are asked for (a
choice by the clock is not repeatable), where torch's own algorithm is the fastest, and where anything is not as it is
known here. Sums between the parts of a product that is split are in FP32 always.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.kernels import direct

SMALLEST = 2e10
"""Operations of the smallest product that is worth it: below, it runs for less than 40 microseconds on an H200."""
WORKSPACE_BYTES = 32 << 20
PROPOSALS = 16
FINALISTS = 4
ROUNDS = 4
MARGIN = 0.985
"""An algorithm is taken where it needs less than this share of torch's time: less is within the clock's noise."""
MOST_SHAPES = 128
"""Batches of ever new lengths would be searched for in every step; after as many shapes all others are torch's."""
ALIGNMENT = 256
"""Bytes: what cuBLASLt takes for granted of an operand's address where nothing else is said."""

# From cublasLt.h: cudaDataType, cublasComputeType_t, and the attributes of a product and of a search.
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_FP32, _SCALE_FP32 = 68, 0
_TRANSPOSE_A, _TRANSPOSE_B, _SCALE_A, _SCALE_B, _FAST = 3, 4, 17, 18, 25
_MOST_WORKSPACE, _REDUCTION = 1, 3
_REDUCE_IN_FP32 = 2


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Shape(NamedTuple):
    """What a choice holds for: device, sizes, formats, layouts, and the tensor cores' own accumulation or FP32's."""

    device: int
    sizes: tuple[int, int, int]
    types: tuple[torch.dtype, torch.dtype, torch.dtype]
    turned: tuple[bool, bool]
    strides: tuple[int, int]
    fast: bool


def product(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    by_torch: Callable[[Tensor], Any],
    inverses: tuple[Tensor, Tensor] | None = None,
    fast: bool = False,
) -> Tensor | None:
    """a [M, K] @ b [K, N] in ``out_dtype``, each of a and b row-major or the transpose of that; None: by torch.

    ``inverses`` are what FP8 operands are multiplied by. ``by_torch`` computes the same into the tensor it is given.
    """
    shape = _shape_of(a, b, out_dtype, fast)
    if shape is None:
        return None
    known = _chosen.get(shape, _UNKNOWN)
    if known is None or (known is _UNKNOWN and not _may_search()):
        return None
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    try:
        if known is _UNKNOWN:
            known = _chosen[shape] = _choose(shape, a, b, out, inverses, by_torch)
        if known is None:
            return None
        _call_of(shape).run(known, a, b, out, inverses)
    except _Refused:
        _chosen[shape] = None
        return None
    return out


def _may_search() -> bool:
    return len(_chosen) < MOST_SHAPES and not torch.cuda.is_current_stream_capturing()


_UNKNOWN: Any = object()
_chosen: dict[_Shape, _Proposal | None] = {}
"""None: torch's own algorithm."""
_mine = threading.local()


class _Refused(Exception):
    """cuBLASLt said no."""


def _shape_of(a: Tensor, b: Tensor, out_dtype: torch.dtype, fast: bool) -> _Shape | None:
    if not direct(a, b) or not a.is_cuda or torch.are_deterministic_algorithms_enabled():
        return None
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return None
    (m, k), n = a.shape, b.shape[1]
    if (
        2.0 * m * n * k < SMALLEST
        or a.device != b.device
        or a.device.index != torch.cuda.current_device()
        or _library() is None
    ):
        return None
    if (a.data_ptr() | b.data_ptr()) % ALIGNMENT or not {a.dtype, b.dtype, out_dtype} <= _TYPES.keys():
        return None
    turned = a.stride(1) != 1, b.stride(1) != 1
    if (turned[0] and a.stride(0) != 1) or (turned[1] and b.stride(0) != 1):
        return None
    strides = a.stride(1 if turned[0] else 0), b.stride(1 if turned[1] else 0)
    return _Shape(a.device.index, (m, n, k), (a.dtype, b.dtype, out_dtype), turned, strides, fast)


@functools.cache
def _library() -> Any:
    """The library that torch has loaded; None where there is none."""
    if not torch.version.cuda:
        return None
    try:
        loaded = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        needed = ("Create", "MatmulDescCreate", "MatrixLayoutCreate", "MatmulAlgoGetHeuristic", "Matmul")
        return loaded if all(hasattr(loaded, f"cublasLt{name}") for name in needed) else None
    except OSError:
        return None


def _ask(name: str, *arguments: Any) -> None:
    if getattr(_library(), f"cublasLt{name}")(*arguments):
        raise _Refused(name)


def _created(name: str, *arguments: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _ask(name, ctypes.byref(made), *arguments)
    return made


def _set(name: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _ask(name, of, attribute, ctypes.byref(value), ctypes.sizeof(value))


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    return _created("Create")


def _call_of(shape: _Shape) -> _Call:
    """The description of a product, made once for each thread, as pointers to scales are set in it."""
    calls: dict[_Shape, _Call] = _mine.__dict__.setdefault("calls", {})
    call = calls.get(shape)
    if call is None:
        call = calls[shape] = _Call(shape)
    return call


class _Call:
    """A product as cuBLASLt sees it: columns first, so that out = a b is its transpose, b' a'."""

    def __init__(self, shape: _Shape) -> None:
        (m, n, k), (a_type, b_type, out_type) = shape.sizes, shape.types
        (a_turned, b_turned), (a_stride, b_stride) = shape.turned, shape.strides
        self.handle = _handle(shape.device)
        self.what = _created("MatmulDescCreate", _COMPUTE_FP32, _SCALE_FP32)
        for attribute, turned in ((_TRANSPOSE_A, b_turned), (_TRANSPOSE_B, a_turned)):
            _set("MatmulDescSetAttribute", self.what, attribute, ctypes.c_int(turned))
        if shape.fast:
            _set("MatmulDescSetAttribute", self.what, _FAST, ctypes.c_int8(1))
        self.b = _layout(b_type, (k, n) if b_turned else (n, k), b_stride)
        self.a = _layout(a_type, (m, k) if a_turned else (k, m), a_stride)
        self.out = _layout(out_type, (n, m), n)
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def proposals(self) -> list[_Proposal]:
        search = _created("MatmulPreferenceCreate")
        _set("MatmulPreferenceSetAttribute", search, _MOST_WORKSPACE, ctypes.c_size_t(WORKSPACE_BYTES))
        _set("MatmulPreferenceSetAttribute", search, _REDUCTION, ctypes.c_uint32(_REDUCE_IN_FP32))
        found, count = (_Proposal * PROPOSALS)(), ctypes.c_int()
        _ask(
            "MatmulAlgoGetHeuristic", self.handle, self.what, self.b, self.a, self.out, self.out, search, PROPOSALS,
            found, ctypes.byref(count),
        )  # fmt: skip
        _ask("MatmulPreferenceDestroy", search)
        return [one for one in found[: count.value] if not one.status]

    def run(self, how: _Proposal, a: Tensor, b: Tensor, out: Tensor, inverses: tuple[Tensor, Tensor] | None) -> None:
        if inverses is not None:
            _set("MatmulDescSetAttribute", self.what, _SCALE_A, ctypes.c_void_p(inverses[1].data_ptr()))
            _set("MatmulDescSetAttribute", self.what, _SCALE_B, ctypes.c_void_p(inverses[0].data_ptr()))
        # The allocator gives this memory to nobody else before the stream has come to the product's end.
        space = torch.empty(how.workspace, dtype=torch.uint8, device=out.device) if how.workspace else None
        result = ctypes.c_void_p(out.data_ptr())
        _ask(
            "Matmul", self.handle, self.what,
            ctypes.byref(self.one), ctypes.c_void_p(b.data_ptr()), self.b, ctypes.c_void_p(a.data_ptr()), self.a,
            ctypes.byref(self.zero), result, self.out, result, self.out,
            ctypes.byref(how.algorithm), ctypes.c_void_p(space.data_ptr() if space is not None else None),
            ctypes.c_size_t(how.workspace), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip


def _layout(dtype: torch.dtype, sizes: tuple[int, int], stride: int) -> ctypes.c_void_p:
    rows, columns = (ctypes.c_uint64(size) for size in sizes)
    return _created("MatrixLayoutCreate", _TYPES[dtype], rows, columns, ctypes.c_int64(stride))


def _choose(
    shape: _Shape,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    inverses: tuple[Tensor, Tensor] | None,
    by_torch: Callable[[Tensor], Any],
) -> _Proposal | None:
    call = _call_of(shape)
    runs: list[tuple[_Proposal | None, Callable[[], Any]]] = [(None, lambda: by_torch(out))]
    for proposal in call.proposals():
        run = functools.partial(call.run, proposal, a, b, out, inverses)
        try:
            run()
            runs.append((proposal, run))
        except _Refused:
            continue
    found: _Proposal | None = fastest(runs, _milliseconds)
    return found


def fastest(runs: list[tuple[Any, Callable[[], Any]]], clock: Callable[[Callable[[], Any], int], float]) -> Any:
    """Which of some ways to do a thing takes least time, of which the first is the usual one; they take turns."""
    tried = [(clock(run, 1), index) for index, (_, run) in enumerate(runs)]
    repeat = max(1, min(10, int(1.0 / max(min(tried)[0], 1e-6))))
    best = {index: float("inf") for index in (0, *[index for _, index in sorted(tried) if index][:FINALISTS])}
    for _ in range(ROUNDS):
        for index in best:
            best[index] = min(best[index], clock(runs[index][1], repeat))
    first = min(best, key=best.__getitem__)
    return runs[first if best[first] < MARGIN * best[0] else 0][0]


def _milliseconds(run: Callable[[], Any], repeat: int) -> float:
    run()  # the caches are as they will be, and the clock starts while the device is busy
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeat
