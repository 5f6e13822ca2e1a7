"""Blocks inside ``torch.utils.checkpoint``, as in transformers after ``gradient_checkpointing_enable()``.

torch discards what autograd saves in such a function, and runs all of it again as soon as backward asks for one of
these tensors, once per backward that asks. A fused block keeps tensors that autograd does not know, and its attention
has a backward of its own: nothing would be freed, and forward would run three times more instead of once. So a block
does what it does with ``checkpoint=full``: it keeps its input, and runs its forward again in backward. torch sees
nothing that it could discard, and does not run the function again unless something else in it asks for that.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from narrowgauge.nn.fused.plan import BlockPlan


def is_checkpointed() -> bool:
    """Whether torch would discard what is saved now. With ``use_reentrant=True`` nothing is saved at this point."""
    get_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if get_hooks is None else get_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def choose_plan(plan: BlockPlan) -> tuple[BlockPlan, contextlib.AbstractContextManager[Any]]:
    """Return the plan of a call, and the context to run it in."""
    if not is_checkpointed():
        return plan, contextlib.nullcontext()
    # A node that holds its own output could never be freed: hence without its history.
    return replace(plan, checkpoint="full"), saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
