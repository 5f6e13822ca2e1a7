"""Rules of our own for operations under autocast: registered with torch, and active while an engine's context is open.

    grouped products     torch's autocast has no rule for them (``grouped_mm``)
    writes               of values into a tensor of another dtype raise an error in torch (``mixed_writes``)

A rule is a kernel under autocast's dispatch keys. It is active while an engine's step context is open. Otherwise it
passes its arguments on, so that code outside of engines computes as before. Other operations have no added cost, calls
from C++ are covered, and torch.compile traces through it. Backward needs no rule: it computes with what forward saved.
torch.compile caches graphs on disk under keys that do not include such rules, so an engine's graphs have their own tag
(``separate_compile_cache``). A function mode, which graphs would include, does not work: torch 2.13 mixes up its calls
at graph breaks (``tensor.device`` returned a shape).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from narrowgauge.nn import grouped_mm, mixed_writes
from narrowgauge.nn.eager_modes import leave_uncompiled

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
Rule = Callable[..., Any]
"""Takes autocast's dtype (None outside of engines) and the operation's arguments."""

_libraries: dict[str, torch.library.Library] = {}
_registered: set[str] = set()
_lock = threading.Lock()
_open = 0
"""Open step contexts in the process, not in this thread: autograd recomputes blocks in its own thread."""


@contextlib.contextmanager
def autocast_rules() -> Iterator[None]:
    """Context manager in which the rules are active under autocast."""
    global _open
    leave_uncompiled(_run, and_what_it_calls=True)  # between the graphs of a model that torch.compile cuts into pieces
    with _lock:
        if not _registered:
            _register("aten", "_grouped_mm", grouped_mm.grouped_product)
            for name, rule in mixed_writes.list_rules():
                _register("aten", name, rule)
        if "transformers.integrations.moe" in sys.modules:
            _register("transformers", "grouped_mm_fallback", grouped_mm.multiply_looped)
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1


def separate_compile_cache() -> contextlib.AbstractContextManager[Any]:
    """Context manager that caches compiled graphs separately from code without these rules."""
    config: Any = torch.compiler.config
    patched: contextlib.AbstractContextManager[Any] = config.patch(cache_key_tag="narrowgauge: autocast rules")
    return patched


def _register(namespace: str, name: str, rule: Rule) -> None:
    """Register a rule once per process, unless torch has its own."""
    whole = f"{namespace}::{name}"
    if whole in _registered:
        return
    _registered.add(whole)
    library = _libraries.setdefault(namespace, torch.library.Library(namespace, "IMPL"))  # deleted, it would unregister
    for device, key in KEYS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(whole, key):
            library.impl(name, functools.partial(_run, rule, device, key), key)


def _run(rule: Rule, device: str, key: str, /, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(device) if _open else None
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
        return rule(dtype, *args, **kwargs)
