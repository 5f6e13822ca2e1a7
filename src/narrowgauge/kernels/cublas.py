"""Matrix products by direct calls of cuBLASLt, with the algorithm that measures fastest for a shape.

torch takes cuBLAS's first proposal, which comes from a model of the hardware and not from a measurement. On an H200
other proposals take a ninth less time for all of GPT-2 124M's FP8 products (docs/results.md). So the first product of a
shape tries all proposals on its own operands, torch's included, and keeps the fastest, also for later processes
(``algorithm_store``): 0.15 s at most.

``product`` returns None if torch should compute: not on a GPU, for small products, under a dispatch mode or
torch.compile, if autograd must see the product, with torch's deterministic algorithms (a choice by measurement is not
repeatable), if torch's own algorithm is the fastest, and if the library is not as expected here. Split-K sums are
always in FP32.
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

from narrowgauge.kernels import can_bypass_op, rehearsal
from narrowgauge.kernels.algorithm_store import DEFAULT, AlgorithmStore

SMALLEST = 2e10
"""FLOPs of the smallest product worth a search. Smaller ones run for less than 40 microseconds on an H200."""
WORKSPACE_BYTES = 32 << 20
PROPOSALS = 16
FINALISTS = 4
ROUNDS = 4
MARGIN = 0.985
"""An algorithm must take less than this share of torch's time. A smaller gain is within measurement noise."""
MOST_SHAPES = 128
"""Batches of varying lengths would search in every step. After this many shapes, all others go to torch."""
MOST_LAYOUTS = 4096
"""After as many layouts of operands, new ones go to torch without being looked at."""
ALIGNMENT = 256
"""Bytes: the address alignment that cuBLASLt assumes by default."""

# From cublasLt.h: cudaDataType, cublasComputeType_t, and the attributes of a product and of a search.
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_FP32, _SCALE_FP32 = 68, 0
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS, _SCALE_A, _SCALE_B, _FAST, _BIAS_TYPE = 3, 4, 7, 8, 17, 18, 25, 26
_ADD_BIAS = 4
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
    """The key of a choice: device, sizes, formats, layouts, fast (tensor-core) or FP32 accumulation, and bias."""

    device: int
    sizes: tuple[int, int, int]
    types: tuple[torch.dtype, torch.dtype, torch.dtype]
    turned: tuple[bool, bool]
    strides: tuple[int, int]
    fast: bool
    bias: bool


def product(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    by_torch: Callable[[Tensor], Any],
    inverses: tuple[Tensor, Tensor] | None = None,
    fast: bool = False,
    bias: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor | None:
    """Return a [M, K] @ b [K, N] + bias [N] in ``out_dtype``, or None if torch should compute it.

    a and b are each row-major or transposed, a bias is BF16. ``inverses`` are the inverse scales of FP8 operands.
    ``by_torch`` computes the same product into the tensor it is given. ``into`` takes the result.
    """
    if rehearsal.noted is not None and a.is_cuda:
        return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device) if into is None else into
    if not can_bypass_op(a, b) or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return None
    key = (a.device, b.device, a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, out_dtype, fast)
    shape = _shapes.get((*key, bias is None), _UNKNOWN)
    if shape is _UNKNOWN:
        if len(_shapes) > MOST_LAYOUTS:
            return None
        shape = _shapes[*key, bias is None] = _get_shape(a, b, out_dtype, fast, bias)
    if shape is None or (a.data_ptr() | b.data_ptr()) % ALIGNMENT or torch.are_deterministic_algorithms_enabled():
        return None
    if a.device.index != torch._C._cuda_getDevice() or not _is_usable(bias, shape):
        return None
    known = _choices.get(shape, _UNKNOWN)
    if known is None or (known is _UNKNOWN and not _can_search()):
        return None
    if into is not None and (into.data_ptr() % ALIGNMENT or not into.is_contiguous()):
        return None
    out = torch.empty(shape.sizes[:2], dtype=out_dtype, device=a.device) if into is None else into
    try:
        if known is _UNKNOWN:
            known = _choices[shape] = _choose_algorithm(shape, a, b, out, inverses, bias, by_torch)
        if known is None:
            return None
        _get_call(shape).run(known, a, b, out, inverses, bias)
    except _NotSupported:
        _choices[shape] = None
        return None
    return out


def _is_usable(bias: Tensor | None, shape: _Shape) -> bool:
    if bias is None:
        return True
    return bias.dtype is torch.bfloat16 and bias.shape == (shape.sizes[1],) and bias.is_contiguous()


def _can_search() -> bool:
    return len(_choices) < MOST_SHAPES and not torch.cuda.is_current_stream_capturing()


_UNKNOWN: Any = object()
_shapes: dict[Any, _Shape | None] = {}
"""The shape of each layout of operands; None for those that are torch's."""
_choices: dict[_Shape, _Proposal | None] = {}
"""The algorithm for each shape; None for torch's own."""
_thread_local = threading.local()


class _NotSupported(Exception):
    """cuBLASLt returned an error status."""


def _get_shape(a: Tensor, b: Tensor, out_dtype: torch.dtype, fast: bool, bias: Tensor | None) -> _Shape | None:
    """Return the shape of a product that is worth a search and possible, else None."""
    (m, k), n = a.shape, b.shape[1]
    if not a.is_cuda or a.device != b.device or 2.0 * m * n * k < SMALLEST or _library() is None:
        return None
    if not {a.dtype, b.dtype, out_dtype} <= _TYPES.keys():
        return None
    turned = a.stride(1) != 1, b.stride(1) != 1
    if (turned[0] and a.stride(0) != 1) or (turned[1] and b.stride(0) != 1):
        return None
    strides = a.stride(1 if turned[0] else 0), b.stride(1 if turned[1] else 0)
    types = (a.dtype, b.dtype, out_dtype)
    return _Shape(a.device.index, (m, n, k), types, turned, strides, fast, bias is not None)


@functools.cache
def _library() -> Any:
    """Return the cuBLASLt that torch has loaded, or None."""
    if not torch.version.cuda:
        return None
    try:
        loaded = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        needed = ("Create", "GetVersion", "MatmulDescCreate", "MatrixLayoutCreate", "MatmulAlgoGetHeuristic", "Matmul")
        return loaded if all(hasattr(loaded, f"cublasLt{name}") for name in needed) else None
    except OSError:
        return None


def _call_library(name: str, *arguments: Any) -> None:
    if getattr(_library(), f"cublasLt{name}")(*arguments):
        raise _NotSupported(name)


def _create(name: str, *arguments: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _call_library(name, ctypes.byref(made), *arguments)
    return made


def _set(name: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call_library(name, of, attribute, ctypes.byref(value), ctypes.sizeof(value))


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    return _create("Create")


def _get_call(shape: _Shape) -> _MatmulCall:
    """Return the description of a product; one per thread, as it contains the pointers to the scales."""
    calls: dict[_Shape, _MatmulCall] = _thread_local.__dict__.setdefault("calls", {})
    call = calls.get(shape)
    if call is None:
        call = calls[shape] = _MatmulCall(shape)
    return call


class _MatmulCall:
    """A product in cuBLASLt's column-major view: out = a b is computed as its transpose, b' a'."""

    def __init__(self, shape: _Shape) -> None:
        (m, n, k), (a_type, b_type, out_type) = shape.sizes, shape.types
        (a_turned, b_turned), (a_stride, b_stride) = shape.turned, shape.strides
        self.handle, self.device = _handle(shape.device), shape.device
        self.what = _create("MatmulDescCreate", _COMPUTE_FP32, _SCALE_FP32)
        for attribute, turned in ((_TRANSPOSE_A, b_turned), (_TRANSPOSE_B, a_turned)):
            _set("MatmulDescSetAttribute", self.what, attribute, ctypes.c_int(turned))
        if shape.fast:
            _set("MatmulDescSetAttribute", self.what, _FAST, ctypes.c_int8(1))
        if shape.bias:
            _set("MatmulDescSetAttribute", self.what, _EPILOGUE, ctypes.c_int(_ADD_BIAS))
            _set("MatmulDescSetAttribute", self.what, _BIAS_TYPE, ctypes.c_int(_TYPES[torch.bfloat16]))
        self.b = _create_layout(b_type, (k, n) if b_turned else (n, k), b_stride)
        self.a = _create_layout(a_type, (m, k) if a_turned else (k, m), a_stride)
        self.out = _create_layout(out_type, (n, m), n)
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.constants = one, zero
        self.one, self.zero = ctypes.byref(one), ctypes.byref(zero)
        # Attributes that change with each call are written to the same memory.
        self.values = {name: ctypes.c_void_p() for name in (_BIAS, _SCALE_A, _SCALE_B)}
        self.places = {name: ctypes.byref(value) for name, value in self.values.items()}

    def get_proposals(self) -> list[_Proposal]:
        search = _create("MatmulPreferenceCreate")
        _set("MatmulPreferenceSetAttribute", search, _MOST_WORKSPACE, ctypes.c_size_t(WORKSPACE_BYTES))
        _set("MatmulPreferenceSetAttribute", search, _REDUCTION, ctypes.c_uint32(_REDUCE_IN_FP32))
        found, count = (_Proposal * PROPOSALS)(), ctypes.c_int()
        _call_library(
            "MatmulAlgoGetHeuristic", self.handle, self.what, self.b, self.a, self.out, self.out, search, PROPOSALS,
            found, ctypes.byref(count),
        )  # fmt: skip
        _call_library("MatmulPreferenceDestroy", search)
        return [one for one in found[: count.value] if not one.status]

    def run(
        self,
        how: _Proposal,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        inverses: tuple[Tensor, Tensor] | None,
        bias: Tensor | None,
    ) -> None:
        if bias is not None:
            self._point(_BIAS, bias)
        if inverses is not None:
            self._point(_SCALE_A, inverses[1])
            self._point(_SCALE_B, inverses[0])
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        # The allocator does not reuse this memory before the stream has finished the product.
        space = torch.empty(how.workspace, dtype=torch.uint8, device=out.device) if how.workspace else None
        result, scratch = out.data_ptr(), None if space is None else space.data_ptr()
        _run_matmul()(
            self.handle, self.what, self.one, b.data_ptr(), self.b, a.data_ptr(), self.a, self.zero, result, self.out,
            result, self.out, ctypes.byref(how.algorithm), scratch, how.workspace, stream,
        )  # fmt: skip

    def _point(self, attribute: int, tensor: Tensor) -> None:
        self.values[attribute].value = tensor.data_ptr()
        _set_attribute()(self.what, attribute, self.places[attribute], 8)


@functools.cache
def _run_matmul() -> Callable[..., None]:
    """Return cublasLtMatmul with declared types, which lets it take addresses as plain integers."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    types = [pointer] * 14 + [size, pointer]
    return _declare("Matmul", types)


@functools.cache
def _set_attribute() -> Callable[..., None]:
    return _declare("MatmulDescSetAttribute", [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t])


def _declare(name: str, types: list[Any]) -> Callable[..., None]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *types)
    function = prototype((f"cublasLt{name}", _library()))

    def call(*arguments: Any) -> None:
        if function(*arguments):
            raise _NotSupported(name)

    return call


def _create_layout(dtype: torch.dtype, sizes: tuple[int, int], stride: int) -> ctypes.c_void_p:
    rows, columns = (ctypes.c_uint64(size) for size in sizes)
    return _create("MatrixLayoutCreate", _TYPES[dtype], rows, columns, ctypes.c_int64(stride))


def _choose_algorithm(
    shape: _Shape,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    inverses: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    by_torch: Callable[[Tensor], Any],
) -> _Proposal | None:
    call, store, name = _get_call(shape), _get_store(shape.device), str(tuple(shape[1:]))
    proposals = call.get_proposals()
    known = store.find(name, len(proposals))
    if known is not None:
        return None if known == DEFAULT else proposals[known]
    runs: list[tuple[int, Callable[[], Any]]] = [(DEFAULT, lambda: by_torch(out))]
    for place, proposal in enumerate(proposals):
        run = functools.partial(call.run, proposal, a, b, out, inverses, bias)
        try:
            run()
            runs.append((place, run))
        except _NotSupported:
            continue
    place = pick_fastest(runs, _measure_ms)
    store.add(name, place, len(proposals))
    return None if place == DEFAULT else proposals[place]


@functools.cache
def _get_store(device: int) -> AlgorithmStore:
    version = _library().cublasLtGetVersion
    version.restype = ctypes.c_size_t
    return AlgorithmStore(torch.cuda.get_device_name(device), version())


def pick_fastest(runs: list[tuple[Any, Callable[[], Any]]], clock: Callable[[Callable[[], Any], int], float]) -> Any:
    """Return the key of the fastest run; the first is the default. Runs are timed in turns."""
    tried = [(clock(run, 1), index) for index, (_, run) in enumerate(runs)]
    repeat = max(1, min(10, int(1.0 / max(min(tried)[0], 1e-6))))
    best = {index: float("inf") for index in (0, *[index for _, index in sorted(tried) if index][:FINALISTS])}
    for _ in range(ROUNDS):
        for index in best:
            best[index] = min(best[index], clock(runs[index][1], repeat))
    first = min(best, key=best.__getitem__)
    return runs[first if best[first] < MARGIN * best[0] else 0][0]


def _measure_ms(run: Callable[[], Any], repeat: int) -> float:
    run()  # warms the caches, and the timer starts while the device is busy
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeat
