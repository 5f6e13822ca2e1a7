"""A function mode that torch.compile does not compile on its own: the base of modes that are active in a forward.

torch.compile traces the handler of a mode as part of a graph. Between two graphs of a forward, where a model waits for
the host, the handler runs as an ordinary function, once for each op. There torch.compile would make graphs of the
handler itself until its limit is reached: that takes long, and backward fails if one of the ops is in place (a list of
experts that add to their output).
"""

from __future__ import annotations

import sys

from torch.overrides import TorchFunctionMode


class EagerFunctionMode(TorchFunctionMode):
    """A function mode whose handler runs uncompiled outside of graphs."""

    def __enter__(self) -> EagerFunctionMode:
        # Importing torch._dynamo takes long. Without it nothing is compiled.
        skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip_code is not None:
            skip_code(type(self).__torch_function__.__code__)
        entered: EagerFunctionMode = super().__enter__()  # type: ignore[no-untyped-call]
        return entered
