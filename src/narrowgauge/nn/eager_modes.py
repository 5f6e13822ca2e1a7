"""Modes that torch.compile does not compile on their own: for modes that are active in a forward.

torch.compile traces the handler of a mode as part of a graph. Between two graphs of a forward, where a model waits for
the host, the handler runs as an ordinary function, once for each op. There torch.compile would make graphs of the
handler itself until its limit is reached: that takes long, and backward fails if one of the ops is in place (a list of
experts that add to their output).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


def leave_uncompiled(handler: Callable[..., Any], and_what_it_calls: bool = False) -> None:
    """Let torch.compile run a handler as it is outside of graphs.

    ``torch.compiler.disable`` does the same with a wrapper, which takes as long as a small op.

    Args:
        handler: The function.
        and_what_it_calls: Whether this holds for the Python functions that it calls, too.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # to import it takes long; without it nothing is compiled
    if frames is not None:
        skip, default = frames.FrameAction.SKIP, frames.FrameAction.DEFAULT
        strategy = frames.FrameExecStrategy(skip, skip if and_what_it_calls else default)
        frames.set_code_exec_strategy(handler.__code__, strategy)


class EagerFunctionMode(TorchFunctionMode):
    """A function mode whose handler runs uncompiled outside of graphs."""

    def __enter__(self) -> EagerFunctionMode:
        leave_uncompiled(type(self).__torch_function__)
        entered: EagerFunctionMode = super().__enter__()  # type: ignore[no-untyped-call]
        return entered
