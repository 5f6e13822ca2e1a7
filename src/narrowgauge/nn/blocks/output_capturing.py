"""Forward hooks with which transformers collects router logits, hidden states and attention weights of a model.

The first call that asks for one of them installs hooks for all, and they stay. A hook does nothing in a call that does
not ask for its outputs: the hook for attention weights, in a call that asks for router logits. Such a module can be
fused all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

MODULE = "transformers.utils.output_capturing"


def is_idle(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one of transformers', and collects nothing in the call that runs now, if one does."""
    if getattr(hook, "__module__", None) != MODULE:
        return False
    active = getattr(sys.modules.get(MODULE), "_active_collector", None)
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None)
    if active is None or code is None or cells is None or "key" not in code.co_freevars:
        return False
    collected = active.get()
    return collected is None or cells[code.co_freevars.index("key")].cell_contents not in collected
