"""Grouped products (the experts of a mixture) in autocast's format, which torch's autocast does not know.

``torch._grouped_mm`` multiplies tokens, sorted by expert, by a stack of matrices: [S, K] x [E, K, N]. Autocast has no
rule for it: FP32 experts would run in FP32 beside layers in 16 bits, and 16-bit weights would refuse FP32 tokens. The
rule is a kernel under autocast's dispatch keys. It acts while an engine's surroundings are open. Otherwise it hands on
what it was given, so that code outside of engines computes as before. Other operations pay nothing, C++ callers are
reached, and torch.compile traces through it. Backward needs no rule: it multiplies what forward has kept, in 16 bits.

Inside torch.compile transformers calls a loop of its own where weights are in FP32, since torch compiles grouped
products in BF16 alone. The rule puts the real product in its place. torch.compile keeps graphs on disk under keys that
know nothing of such rules, so an engine's have a tag of their own (``own_graphs``). A function mode, which graphs would
show, is no way: torch 2.13 confuses its calls where a graph breaks (``tensor.device`` gave a shape).

To cast a module's parameters before it runs (``functional_call``) would be simpler, but wrong in one case: where tokens
gather their experts' matrices (``weight[index]``, transformers' batched_mm), the gradients of many tokens would be
added up in 16 bits.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
"""As for autocast's own products: FP64 stays."""
ALIGNMENT_BYTES = 16
"""Of rows: what grouped kernels ask for. FP32 rows of 4 numbers have it, 16-bit rows need 8."""

_libraries: dict[str, torch.library.Library] = {}
_lock = threading.Lock()
_open = 0
"""How many surroundings are open in the process, not in this thread: autograd recomputes blocks in its own."""


@contextlib.contextmanager
def grouped_in_autocast() -> Iterator[None]:
    """While open, grouped products under autocast run in autocast's format."""
    global _open
    with _lock:
        _register("aten", "_grouped_mm", grouped_product)
        if "transformers.integrations.moe" in sys.modules:
            _register("transformers", "grouped_mm_fallback", _looped_product)
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1


def own_graphs() -> contextlib.AbstractContextManager[Any]:
    """While open, graphs are compiled apart from those of code that has no rule for grouped products."""
    config: Any = torch.compiler.config
    patched: contextlib.AbstractContextManager[Any] = config.patch(cache_key_tag="narrowgauge: grouped products")
    return patched


def grouped_product(
    dtype: torch.dtype | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``torch._grouped_mm`` of operands cast to ``dtype``; None: of the operands as they are."""
    if dtype is None or a.dtype not in CASTABLE or b.dtype not in CASTABLE:
        product: Tensor = aten._grouped_mm.default(a, b, offs, bias, out_dtype)
        return product
    width = b.shape[-1]
    a, b = a.to(dtype), b.to(dtype)
    if a.dim() == 2 and b.dim() == 3:
        a, b = _aligned(a, b)
    product = aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    return product if product.shape[-1] == width else product[..., :width]


def _looped_product(dtype: torch.dtype | None, input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """The same for transformers' loop, which stays where grouped kernels have no such format."""
    if dtype is torch.bfloat16:
        return grouped_product(dtype, input, weight, offs)
    if dtype is not None:
        input, weight = input.to(dtype), weight.to(dtype)
    looped: Tensor = torch.ops.transformers.grouped_mm_fallback(input, weight, offs)
    return looped


def _aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """[S, K] and [E, K, N] with zeros up to whole rows of 16 bytes; they add nothing to the sums."""
    step = ALIGNMENT_BYTES // a.element_size()
    depth, width = -a.shape[1] % step, -b.shape[2] % step
    if depth:
        a = F.pad(a, (0, depth))
    return a, F.pad(b, (0, width, 0, depth)) if depth or width else b


def _register(namespace: str, name: str, rule: Callable[..., Tensor]) -> None:
    """Once in a process; not where torch has a rule of its own."""
    if namespace in _libraries:
        return
    library = torch.library.Library(namespace, "IMPL")
    for device, key in KEYS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key):
            library.impl(name, functools.partial(_autocast_kernel, rule, device, key), key)
    _libraries[namespace] = library  # it takes its kernels with it when it is dropped


def _autocast_kernel(rule: Callable[..., Tensor], device: str, key: str, /, *args: Any, **kwargs: Any) -> Tensor:
    dtype = torch.get_autocast_dtype(device) if _open else None
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
        return rule(dtype, *args, **kwargs)
