"""An autocast rule for grouped products (the experts of a mixture), which torch's autocast does not support.

``torch._grouped_mm`` multiplies tokens, sorted by expert, by a stack of matrices: [S, K] x [E, K, N]. Autocast has no
rule for it: FP32 experts would run in FP32 while other layers run in 16 bits, and 16-bit weights would reject FP32
tokens. The rule is a kernel under autocast's dispatch keys. It is active while an engine's step context is open.
Otherwise it passes its arguments on, so that code outside of engines computes as before. Other operations have no added
cost, calls from C++ are covered, and torch.compile traces through it. Backward needs no rule: it multiplies what
forward saved, in 16 bits.

Under torch.compile, transformers replaces grouped products with a loop if weights are FP32, since torch compiles them
only in BF16. The rule restores the grouped product. torch.compile caches graphs on disk under keys that do not
include such rules, so an engine's graphs have their own tag (``separate_compile_cache``). A function mode, which graphs
would include, does not work: torch 2.13 mixes up its calls at graph breaks (``tensor.device`` returned a shape).

Casting a module's parameters before it runs (``functional_call``) would be simpler, but wrong in one case: if tokens
gather their experts' matrices (``weight[index]``, transformers' batched_mm), the gradients of many tokens would be
summed in 16 bits.
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
"""Formats that are cast, as in autocast's own products: FP64 is not."""
ALIGNMENT_BYTES = 16
"""Row alignment that grouped kernels need: 4 numbers in FP32, 8 in 16 bits."""

_libraries: dict[str, torch.library.Library] = {}
_lock = threading.Lock()
_open = 0
"""Open step contexts in the process, not in this thread: autograd recomputes blocks in its own thread."""


@contextlib.contextmanager
def autocast_grouped_mm() -> Iterator[None]:
    """Context manager in which grouped products under autocast run in autocast's dtype."""
    global _open
    with _lock:
        _register("aten", "_grouped_mm", grouped_product)
        if "transformers.integrations.moe" in sys.modules:
            _register("transformers", "grouped_mm_fallback", _multiply_looped)
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1


def separate_compile_cache() -> contextlib.AbstractContextManager[Any]:
    """Context manager that caches compiled graphs separately from code without this autocast rule."""
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
    """Compute ``torch._grouped_mm`` of operands cast to ``dtype``; None does not cast."""
    if dtype is None or a.dtype not in CASTABLE or b.dtype not in CASTABLE:
        product: Tensor = aten._grouped_mm.default(a, b, offs, bias, out_dtype)
        return product
    width = b.shape[-1]
    a, b = a.to(dtype), b.to(dtype)
    if a.dim() == 2 and b.dim() == 3:
        a, b = _align(a, b)
    product = aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    return product if product.shape[-1] == width else product[..., :width]


def _multiply_looped(dtype: torch.dtype | None, input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Do the same for transformers' loop, which remains for formats that grouped kernels do not support."""
    if dtype is torch.bfloat16:
        return grouped_product(dtype, input, weight, offs)
    if dtype is not None:
        input, weight = input.to(dtype), weight.to(dtype)
    looped: Tensor = torch.ops.transformers.grouped_mm_fallback(input, weight, offs)
    return looped


def _align(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pad [S, K] and [E, K, N] with zeros to rows of a multiple of 16 bytes; zeros add nothing to the sums."""
    step = ALIGNMENT_BYTES // a.element_size()
    depth, width = -a.shape[1] % step, -b.shape[2] % step
    if depth:
        a = F.pad(a, (0, depth))
    return a, F.pad(b, (0, width, 0, depth)) if depth or width else b


def _register(namespace: str, name: str, rule: Callable[..., Tensor]) -> None:
    """Register a rule once per process, unless torch has its own."""
    if namespace in _libraries:
        return
    library = torch.library.Library(namespace, "IMPL")
    for device, key in KEYS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key):
            library.impl(name, functools.partial(_autocast_kernel, rule, device, key), key)
    _libraries[namespace] = library  # deleting it would unregister the kernels


def _autocast_kernel(rule: Callable[..., Tensor], device: str, key: str, /, *args: Any, **kwargs: Any) -> Tensor:
    dtype = torch.get_autocast_dtype(device) if _open else None
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
        return rule(dtype, *args, **kwargs)
