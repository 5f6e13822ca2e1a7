"""Lets someone look at tensors inside fused blocks and the head, where no module is called that a hook could wait for.

Nothing is listening as a rule, and then a tap costs a comparison. A listener must not change what it is shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

from narrowgauge.nn.products.gemm import Operand

Listener = Callable[[str, str, Tensor, Tensor | None], None]
"""Given the kind (activation or gradient), the module's path, the tensor, and for FP8 the inverse of its scale."""

_listener: Listener | None = None


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Show ``listener`` what fused parts compute in the meantime."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def is_heard() -> bool:
    """Whether anyone listens: to ask before making something only to be shown."""
    return _listener is not None


def tap(kind: str, path: str, tensor: Tensor | Operand, inverse_scale: Tensor | None = None) -> None:
    """Show a tensor, or an operand in whichever format it has."""
    if _listener is None:
        return
    if isinstance(tensor, Operand):
        shown = tensor.hp if tensor.hp is not None else tensor.lp if tensor.lp is not None else tensor.lp_t
        if shown is None:
            return
        inverse_scale = None if shown is tensor.hp else tensor.inv_scale
        tensor = shown
    _listener(kind, path, tensor, inverse_scale)
