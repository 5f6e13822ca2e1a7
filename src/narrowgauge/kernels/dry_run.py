"""Runs the Python around kernels without launching them: for forecasts, whose tensors have no data.

Kernels that are custom ops need nothing of this, as torch asks their fake implementations for the results. The others
go through ``launch.launch_kernel``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from narrowgauge.kernels import multi_tensor

_is_dry = False


def is_dry_run() -> bool:
    """Whether kernels are not launched now."""
    return _is_dry


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Launch no kernel inside the context, and act as if Triton was installed."""
    global _is_dry
    before, _is_dry = _is_dry, True
    multi_tensor.make_cached_table.cache_clear()  # it holds tensors, with data before and without data afterwards
    try:
        yield
    finally:
        _is_dry = before
        multi_tensor.make_cached_table.cache_clear()
